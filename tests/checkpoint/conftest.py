from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is one: these tests save hundreds of steps, and each waits for its flushes."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="milepost-test-", dir=MEMORY if usable else None) as directory:
        yield Path(directory)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as directory:
        yield directory


@pytest.fixture(scope="module")
def module_path() -> Iterator[Path]:
    with in_memory() as directory:
        yield directory


@pytest.fixture(scope="session")
def mount_namespace() -> list[str]:
    """The beginning of a command whose mounts vanish with it; the test is skipped where that takes rights it lacks."""
    command = ["unshare", "-m"]
    if os.geteuid() or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root and mount namespaces")
    return command
