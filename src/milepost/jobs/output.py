"""A directory that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CallError, WriteError
from milepost.layouts.huggingface import CONFIG
from milepost.wording import disk_error


@dataclass(frozen=True)
class Kind:
    """What an output is, and what it is made of, in words; the option that names its place; how an older one is told by
    the names of its files."""

    what: str
    source: str
    option: str
    tells: Callable[[Collection[str]], bool]


EXPORT = Kind(
    "a model export",
    "the checkpoint that is being merged",
    "--target_dir",
    lambda names: CONFIG in names or any(name.endswith(".safetensors") for name in names),
)


@contextmanager
def output_directory(
    target: Path, *, overwrite: bool, sources: Iterable[Path] = (), kind: Kind = EXPORT
) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `target` when the context ends well.

    A target with files in it is refused unless `overwrite`, and then replaced as a whole; only a directory that looks
    like an output of this kind is replaced. Two writers of one target: the second is refused. With an error, or Ctrl-C,
    nothing remains and the target is as it was.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target):
            _check_target(target, overwrite, sources, kind)
            building = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
            building.mkdir()
            try:
                yield building
                sync_tree(building)
                _replace(target, building)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {disk_error(error)}") from None


def sync_tree(directory: Path) -> None:
    """Flush everything below a directory, and the directory, to disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """Flush one file or directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_target(target: Path, overwrite: bool, sources: Iterable[Path], kind: Kind) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise WriteError(f"{target}: is a file; {kind.option} names a directory")
    if any(path.resolve().is_relative_to(target.resolve()) for path in sources):
        raise CallError(f"{target}: holds {kind.source}; choose another {kind.option}")
    names = [path.name for path in target.iterdir()]
    if not names:
        return
    if not overwrite:
        raise WriteError(f"{target}: is not empty; choose another {kind.option}, or replace it with --overwrite")
    if not kind.tells(names):
        raise WriteError(f"{target}: does not look like {kind.what}, so --overwrite will not replace it")


def _replace(target: Path, building: Path) -> None:
    """Put `building` in the place of `target`; what was there goes only once the new one stands."""
    if target.exists():
        old = target.with_name(f".{target.name}.{os.urandom(4).hex()}.old")
        target.rename(old)
        try:
            building.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)
    else:
        building.rename(target)
    sync(target.parent)


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of a target; refused at once where another process holds it. The lock file goes with the lock."""
    lock = target.with_name(f".{target.name}.lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise WriteError(
                f"{target}: another process is writing it now; wait for it or choose another place"
            ) from None
        # The holder before us may have removed the file between our open and our lock: then this lock guards nothing.
        if lock.exists() and os.fstat(fd).st_ino == lock.stat().st_ino:
            break
        os.close(fd)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)
