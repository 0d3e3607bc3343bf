from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from object_store import BUCKET, ObjectStore, object_store, quick_retries

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


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectStore]:
    """A real S3 server, behind a proxy that misbehaves when told to."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, in the environment, behind a network that is unhurt at the beginning and the end."""
    with quick_retries(server, monkeypatch):
        yield server


@pytest.fixture
def url(store: ObjectStore, tmp_path: Path) -> str:
    """A folder of the server's bucket that no other test uses."""
    return f"s3://{BUCKET}/{tmp_path.name}"
