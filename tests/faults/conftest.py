from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import places, shim
from faults.savers import Savers

MEMORY = Path("/dev/shm")


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder in memory where there is such: each of hundreds of saves waits for its flushes."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="milepost-test-", dir=MEMORY if usable else None) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where the shim cannot be built. In CI that is a failure: it would prove none of what is promised here."""
    if shim.COMPILER is None:
        without = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip
        without("the preload shim takes a C compiler (cc, gcc or clang): install one")


@pytest.fixture(scope="session")
def savers(compiler: None) -> Iterator[Savers]:
    """The program that forks savers, with the shim in it."""
    with Savers(mounts=not places.why_not()) as program:
        yield program


@pytest.fixture
def mounting() -> None:
    """Skips where no file system can be mounted."""
    if places.why_not():
        pytest.skip(places.why_not())
