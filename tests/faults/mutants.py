"""Savers with one safeguard taken out: what proves that the proofs can fail.

Savers that do not flush are made by the shim, which skips the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from milepost.checkpoint import commit, files
from milepost.checkpoint.litter import delete_step
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.saving import saver
from milepost.checkpoint.steps import TRACKER, scan, step_name


def apply(name: str) -> None:
    """Take that safeguard out of this process; "" takes out none."""
    if name:
        {**MUTANTS, **FLUSHES}[name]()


def _put(place: Any, name: str, value: Any) -> None:
    assert hasattr(place, name), f"the mutant is out of date: {place} has no {name}"
    setattr(place, name, value)


def _manifest_after_rename() -> None:
    """The step gets its name first and its manifest then."""
    write, rename, waiting = commit.write_durably, Path.rename, {}

    def write_later(path: Path, data: bytes) -> None:
        if path.name == MANIFEST:
            waiting[path.parent] = data
        else:
            write(path, data)

    def rename_and_write(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if path in waiting:
            write(target / MANIFEST, waiting.pop(path))
        return renamed

    _put(commit, "write_durably", write_later)
    _put(Path, "rename", rename_and_write)


def _tracker_first() -> None:
    """The tracker names the step before it is there."""
    prepare = commit.prepare_tracker

    def prepare_and_move(root: Path, step: int) -> Path:
        prepared = prepare(root, step)
        return prepared.replace(root / TRACKER)

    _put(commit, "prepare_tracker", prepare_and_move)


def _in_place() -> None:
    """The step is written under its own name."""
    make = commit._make_temporary

    def make_final(request: Any) -> Path:
        made: Path = make(request).rename(request.root / step_name(request.step))
        return made

    _put(commit, "_make_temporary", make_final)


def _delete_first() -> None:
    """Older steps go before the new one is there."""
    make = commit._make_temporary

    def make_room(request: Any) -> Path:
        for step in scan(request.root):
            delete_step(step.path)
        return make(request)

    _put(commit, "_make_temporary", make_room)


def _aside_unflushed() -> None:
    """What is set aside is not flushed where it was put."""
    move, flush = saver.move_aside, files.sync_directory

    def move_unflushed(root: Path, folders: Iterable[Path]) -> Path:
        _put(files, "sync_directory", lambda path: None)
        try:
            return move(root, folders)
        finally:
            files.sync_directory = flush

    _put(saver, "move_aside", move_unflushed)


MUTANTS: Mapping[str, Callable[[], None]] = {
    "manifest after rename": _manifest_after_rename,
    "tracker first": _tracker_first,
    "in place": _in_place,
    "delete first": _delete_first,
}
"""What kills find out."""

FAULTS: Mapping[str, str] = {
    "manifest after rename": r"global_step_3 is incomplete: .* holds neither manifest\.json",
    "tracker first": r"the tracker names 3, acknowledged is 2, the newest is 2",
    "in place": r"global_step_3 is (incomplete|damaged): ",
    "delete first": r"step 2 was acknowledged, the newest is [01]",
    "set aside without a flush": r"step \d is neither where it was nor set aside",
    "no fsync": r"global_step_\d is damaged: ",
    "no fsyncdir": r"step \d was acknowledged, the newest is \d",
}
"""What is found of each mutant, and of a saver without one kind of flush: regular expressions for `Finding.shows`."""

FLUSHES: Mapping[str, Callable[[], None]] = {"set aside without a flush": _aside_unflushed}
"""What a power cut finds out, where a run has gone back to an older step."""
