"""New files of a directory, of known sizes, for writers that fill them by position."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_files(directory: Path, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Make files of these sizes, in bytes, and yield their descriptors by name.

    A context that ends well flushes them to disk; all are closed in any case. Files left with an error are incomplete,
    and the caller's to remove. OSError where one is there already or the disk has no room for it.
    """
    fds: dict[str, int] = {}
    try:
        for name, size in sizes.items():
            fd = fds[name] = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            _allocate(fd, size)
        yield fds
        for fd in fds.values():
            os.fsync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)
        fds.clear()


def _allocate(fd: int, size: int) -> None:
    """Reserve the space, so that a full disk is found before the work, where the file system can."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)
