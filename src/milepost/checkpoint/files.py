"""Files that must not be lost: written with their checksum, flushed to disk, and never over another file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import xxhash

from milepost.checkpoint.manifest import FileRecord, digest_file
from milepost.errors import CallError, WriteError
from milepost.wording import disk_error

_BUFFER = 1 << 20  # bytes; larger writes pass through
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)


class HashedFile:
    """A new file whose bytes are counted and hashed as they pass.

    It remembers the first OSError, because a writer on top may turn it into something else: torch.save makes of a full
    disk "RuntimeError: unexpected pos".
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=_BUFFER)
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes, or anything that shows its memory as contiguous bytes."""
        view = memoryview(data).cast("B")
        with self._remember():
            self._file.write(view)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No: bytes are hashed in the order in which they lie."""
        return False

    def flush(self) -> None:
        """Hand over to the operating system what is buffered here."""
        with self._remember():
            self._file.flush()

    def commit(self) -> tuple[int, str]:
        """Flush to the disk itself and close; size in bytes and xxh3_128 in hex."""
        with self._remember():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._size, self._digest.hexdigest()

    def abandon(self) -> None:
        """Close a file that will be removed; what went wrong with it is already known."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _remember(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


class StepFiles:
    """The files that this rank puts into one directory of a step; `RoleFiles` for an engine.

    directory:  where they go
    step_dir:   the step that is being written; records are relative to it
    """

    def __init__(self, directory: Path, step_dir: Path) -> None:
        self._directory = directory
        self._step_dir = step_dir
        self.records: list[FileRecord] = []
        self.failure: WriteError | None = None

    @property
    def directory(self) -> Path:
        """The role's directory inside the step that is being written."""
        return self._directory

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file of that relative name; it is on the disk when the context ends, or WriteError is raised."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = HashedFile(path)
        except OSError as error:
            raise self._failed(path, error) from error
        try:
            yield cast(BinaryIO, file)
            size, digest = file.commit()
        except BaseException as error:
            file.abandon()
            if file.failure is not None:
                raise self._failed(path, file.failure) from error
            raise
        self.records.append(FileRecord(path.relative_to(self._step_dir).as_posix(), size, digest))

    def adopt(self, source: Path, name: str, *, copy: bool = False) -> None:
        """Take a finished file of another program into the step: by a second link to it where the file system has
        such, or by a copy. It is read once, for its checksum, and flushed to the disk; WriteError where that fails."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            linked = not copy and _link(source, path)
            if not linked:
                shutil.copyfile(source, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            record = FileRecord(path.relative_to(self._step_dir).as_posix(), path.stat().st_size, digest_file(path))
        except OSError as error:
            raise self._failed(path, error) from error
        self.records.append(record)

    def _path(self, name: str) -> Path:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise CallError(f"{name!r} is no name of a file inside a step")
        return self._directory / relative

    def _failed(self, path: Path, error: OSError) -> WriteError:
        self.failure = self.failure or WriteError(f"{path}: {reason(error)}")
        return self.failure


def _link(source: Path, path: Path) -> bool:
    """Whether `path` is now another name of the file; no name is left where it cannot be."""
    try:
        path.hardlink_to(source)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def reason(error: OSError) -> str:
    """Why a write of a step failed and what to do, in words."""
    return disk_error(error, room="free some space, or keep fewer steps")


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, where the file system knows how to."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents so that a power cut cannot take them away again."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new small file and flush it to disk; nothing of it stays where that fails."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
