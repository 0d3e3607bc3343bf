"""Files that must not be lost: written with their checksum, flushed to disk, and never over another file."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from milepost.checkpoint.manifest import FileRecord, digest_file
from milepost.checkpoint.saving.staged_file import StagedFile, Staging, in_words, refused
from milepost.checkpoint.saving.writing import OutFile
from milepost.errors import CallError, MilepostError

if TYPE_CHECKING:
    from torch import Tensor

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)


class StepFiles:
    """The files that this rank puts into one directory of a step; `RoleFiles` for an engine.

    directory:  where they go
    step_dir:   the step that is being written; records are relative to it
    into:       what they pass through; by default every file is on the disk when the call that makes it returns
    """

    def __init__(self, directory: Path, step_dir: Path, into: Staging | None = None) -> None:
        self._directory = directory
        self._step_dir = step_dir
        self._into = into
        self._files: list[OutFile] = []
        self._adopted: list[FileRecord] = []
        self._nbytes = 0
        self.failure: MilepostError | None = None

    @property
    def directory(self) -> Path:
        """The role's directory inside the step that is being written."""
        return self._directory

    @property
    def records(self) -> list[FileRecord]:
        """Every file that is on the disk."""
        return [self._record(file.path, file.size, file.xxh3_128) for file in self._files] + self._adopted

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were filled here."""
        return self._nbytes

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file of that relative name. WriteError where the disk refuses: here, or when the step is waited
        for."""
        with self._new(name) as file:
            yield cast(BinaryIO, file)

    def save(self, name: str, state: Any, *, alone: bool = False) -> None:
        """Write an object into a new file as torch.save does. It may change as soon as this returns, and its tensors on
        a device once `DeviceCopies.wait` has returned. See `RoleFiles.save`."""
        with self._new(name) as file:
            file.archive(state, alone=alone)

    def save_row(self, name: str, values: Iterable[Tensor | memoryview]) -> list[tuple[int, int]]:
        """Write tensors, each as torch.save does, and bytes one behind the other into a new file. See `RoleFiles`."""
        places = []
        with self._new(name) as file:
            for value in values:
                start = file.tell()
                if isinstance(value, memoryview):
                    file.write(value)
                else:
                    file.archive(value, alone=True)
                places.append((start, file.tell() - start))
        return places

    def adopt(self, source: Path, name: str, *, copy: bool = False) -> None:
        """Take a finished file of another program into the step: by a second link to it where the file system has
        such, or by a copy. It is read once, for its checksum, and flushed to the disk; WriteError where that fails."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if copy or not _link(source, path):
                shutil.copyfile(source, path)
        except OSError as error:
            raise self._failed(refused(path, error)) from error
        if self._into is None:
            self._seal(path)
        else:
            self._into.crew.call(partial(self._seal, path))

    def _seal(self, path: Path) -> None:
        """Flush a file that is there, and record it."""
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            self._adopted.append(self._record(path, path.stat().st_size, digest_file(path)))
        except OSError as error:
            raise self._failed(refused(path, error)) from error

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[StagedFile]:
        path = self._path(name)
        into = self._into or Staging.make()

        def make() -> StagedFile:
            path.parent.mkdir(parents=True, exist_ok=True)
            return StagedFile(path, into)

        try:
            file = into.deadline.within(path, make)
        except OSError as error:
            raise self._failed(refused(path, error)) from error
        try:
            yield file
            written = file.end()
            if self._into is None:
                into.copies.wait()
                into.wait()
        except BaseException as error:
            file.abandon()
            if self._into is None:
                into.crew.abandon()
            # A writer on top may turn it into something else: torch.save makes of a full disk "unexpected pos".
            if into.crew.failure is not None:
                raise self._failed(in_words(into.crew.failure)) from error
            raise
        self._files.append(written)
        self._nbytes += file.tell()

    def _record(self, path: Path, size: int, digest: str) -> FileRecord:
        return FileRecord(path.relative_to(self._step_dir).as_posix(), size, digest)

    def _path(self, name: str) -> Path:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise CallError(f"{name!r} is no name of a file inside a step")
        return self._directory / relative

    def _failed(self, error: MilepostError) -> MilepostError:
        self.failure = self.failure or error
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
        with contextlib.suppress(OSError):  # what the disk refused first is what is told
            path.unlink(missing_ok=True)
        raise


def set_aside_name() -> str:
    """A new name for a folder of steps that a run does not go on with."""
    return f"set_aside_{datetime.now(UTC):%Y%m%d-%H%M%S}_{secrets.token_hex(2)}"


def move_aside(root: Path, folders: Iterable[Path]) -> Path:
    """Move steps of a run's folder into a new one in it, which is returned."""
    into = root / set_aside_name()
    into.mkdir()
    sync_directory(root)  # before anything is in it that a power cut could take away with it
    for folder in folders:
        folder.rename(into / folder.name)
    sync_directory(into)
    return into
