"""A directory that appears whole or not at all.

    OUT                  the directory; what stands there stays until the new one takes its place
    .OUT.{nonce}.tmp     the new one while it is made; afterwards, for a moment, the old one
    .OUT.lock            held by the one process that writes OUT

What a killed process left of these goes when the next one writes the same OUT.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CallError, WriteError
from milepost.layouts.huggingface import CONFIG
from milepost.wording import disk_error

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


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
    like an output of this kind is replaced. Two writers of one target: the second is refused.

    With an error, or Ctrl-C, nothing remains and the target is as it was. Where the process is killed the target is the
    old one or the new one too, and what remains beside it goes with the next writing; but where the file system cannot
    exchange two names in one step, the old one may have to wait for that under another name.
    """
    target = place_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target):
            _clear(target)
            _check_target(target, overwrite, sources, kind)
            building = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
            try:
                building.mkdir()
                yield building
                sync_tree(building)
                _replace(target, building)
            finally:
                _remove(building)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {disk_error(error)}") from None


def place_of(target: Path) -> Path:
    """The directory itself that a path means: where links lead to. CallError where it is one that cannot be replaced:
    the root, or one on which a disk is mounted."""
    place = Path(os.path.realpath(target))
    if os.path.ismount(place):
        raise CallError(f"{target}: is a whole disk's directory, which cannot be replaced; name one inside it")
    return place


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


def _clear(target: Path) -> None:
    """Remove what killed processes left beside a target. Its lock is held, so nobody is at work on it."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    for path in target.parent.iterdir():
        match = left.fullmatch(path.name)
        if match and match[1] == "old" and not target.exists():
            path.rename(target)
        elif match:
            _remove(path)


def _remove(directory: Path) -> None:
    """Remove a directory as far as it can be; all of it though Ctrl-C comes on the way. Of what stays a line in the log
    says so: it may be as large as a model."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    try:
        if directory.exists():
            shutil.rmtree(directory)
    except OSError as error:
        say_left(directory, error)


def say_left(directory: Path, error: OSError) -> None:
    """Log that a directory of ours stays where nobody wants it."""
    import logging  # noqa: PLC0415  on the way to an error, start-up time counts no more

    logging.getLogger(__name__).warning("%s: could not be removed: %s; remove it by hand", directory, error.strerror)


def _check_target(target: Path, overwrite: bool, sources: Iterable[Path], kind: Kind) -> None:
    if not target.exists():
        if target.is_symlink():
            raise WriteError(f"{target}: is a link that leads in a circle; choose another {kind.option}")
        return
    if not target.is_dir():
        raise WriteError(f"{target}: is a file; {kind.option} names a directory")
    if any(path.resolve().is_relative_to(target) for path in sources):
        raise CallError(f"{target}: holds {kind.source}; choose another {kind.option}")
    names = [path.name for path in target.iterdir()]
    if not names:
        return
    if not overwrite:
        raise WriteError(f"{target}: is not empty; choose another {kind.option}, or replace it with --overwrite")
    if not kind.tells(names):
        raise WriteError(f"{target}: does not look like {kind.what}, so --overwrite will not replace it")


def _replace(target: Path, building: Path) -> None:
    """Put `building` in the place of `target`. What stood there is in the place of `building` then, or gone."""
    if not target.exists():
        building.rename(target)
    elif not _exchange(building, target):
        old = target.with_name(f".{target.name}.{os.urandom(4).hex()}.old")
        try:
            target.rename(old)
            building.rename(target)
        except BaseException:
            _clear(target)  # which gives the old one its name back
            raise
        _remove(old)
    sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Whether two directories have changed places, in one step: False where the system or the disk has no such step."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    return function is not None and not function(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of a target; refused at once where another process holds it. The lock file goes with the lock."""
    lock = target.with_name(f".{target.name}.lock")
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(lock.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise WriteError(
                    f"{target}: another process is writing it now; wait for it or choose another place"
                ) from None
            # The holder before us may have removed it between our open and our lock: then this lock guards nothing.
            if lock.exists() and os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
                break
            stack.close()
        stack.callback(lock.unlink, missing_ok=True)
        yield
