"""Deleting what retention lets go: whole steps, exports inside steps that stay, and what killed saves have left.

A step first loses its name and then its files (`litter.delete_step`). An export first loses its place in the manifest,
by one rename, and then its files. So at every moment, and after every kill, what the disk says is true.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.diary.history import read_history
from milepost.checkpoint.diary.status import is_running
from milepost.checkpoint.files import sync_directory, write_durably
from milepost.checkpoint.inventory import PIN, DiskStep, disk_steps, export_files, without_export
from milepost.checkpoint.litter import delete_step, litter
from milepost.checkpoint.lock import LOCK, exclusive
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.retention import Decision, Retention, decide, exports_to_drop
from milepost.checkpoint.steps import read_tracker, scan
from milepost.checkpoint.tracker import mend_tracker
from milepost.errors import CallError, CheckpointError, NotFoundError, WriteError
from milepost.wording import disk_error

STEP, EXPORT = "step", "export"
_QUIET_SECONDS = 3600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Marks:
    """Steps that are to be pinned, and those that no longer are."""

    pin: tuple[int, ...] = ()
    unpin: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pin or self.unpin)

    def check(self, place: object, steps: Collection[int]) -> None:
        """Raise, before anything is written, NotFoundError for a step that is not there, CallError for one that is to
        be pinned and not."""
        missing = [step for step in (*self.pin, *self.unpin) if step not in steps]
        if missing:
            raise NotFoundError(f"{place} holds no step {missing[0]}")
        both = sorted(set(self.pin) & set(self.unpin))
        if both:
            raise CallError(f"--pin {both[0]} --unpin {both[0]}: one of them")

    def on(self, step: int) -> bool | None:
        """Whether a step is to be pinned, or to be so no longer; None where it stays as it is."""
        return True if step in self.pin else False if step in self.unpin else None


@dataclass(frozen=True)
class Going:
    """Something that is to be deleted, and its bytes. `what`: `STEP`, or `EXPORT` of a step that stays."""

    what: str
    step: int
    path: Path
    bytes: int


@dataclass(frozen=True)
class PrunePlan:
    """What retention says of a run: a decision for every step, and what goes."""

    root: Path
    decisions: tuple[Decision, ...]
    going: tuple[Going, ...]

    @property
    def bytes(self) -> int:
        """Bytes that it frees."""
        return sum(one.bytes for one in self.going)


def plan_prune(
    root: Path, retention: Retention, *, whole: dict[int, bool] | None = None, marks: Marks | None = None
) -> PrunePlan:
    """Decide from the disk what goes; nothing is changed.

    whole:  steps of which it is known whether they are
    marks:  what is to be pinned before the plan is carried out
    """
    steps = disk_steps(root, whole=whole)
    for step in steps:
        if marks is not None and (pinned := marks.on(step.step)) is not None:
            step.pinned = pinned
    decisions = decide(steps, retention.policy)
    gone = {decision.step for decision in decisions if not decision.kept}
    by_number = {step.step: step for step in steps if step.own}
    going = [Going(STEP, number, by_number[number].path, _bytes_of(by_number[number])) for number in sorted(gone)]
    staying = [step for step in steps if step.step not in gone]
    for number in exports_to_drop(staying, retention.keep_exports):
        step = by_number[number]
        if _can_drop_export(step):
            files = [file for role in read_manifest(step.path).roles for file in export_files(step.path / role)]
            going.append(Going(EXPORT, number, step.path, sum(file.stat().st_size for file in files)))
    return PrunePlan(root, decisions, tuple(going))


Unread = Callable[[int], contextlib.AbstractContextManager[bool]]
"""Of a step, what holds it against readers; it yields False where one is at it."""


def nobody_reads(_step: int) -> contextlib.AbstractContextManager[bool]:
    """Of a folder that nothing is uploaded from."""
    return contextlib.nullcontext(True)


def carry_out(plan: PrunePlan, *, unread: Unread = nobody_reads) -> tuple[Going, ...]:
    """Delete what a plan says; returns what is gone. What a disk refuses to delete stays, and is logged.

    unread: held while something of a step is deleted; a step that is being read stays for now
    """
    going = {one.step for one in plan.going if one.what == STEP}
    if read_tracker(plan.root) in going:
        # It must not name what is not there. The newest whole step never goes, so there is one to name.
        newest = next((step for step in reversed(disk_steps(plan.root)) if step.own and step.whole), None)
        if newest is not None:
            mend_tracker(plan.root, newest.step)
    gone = []
    for one in plan.going:
        with unread(one.step) as free:
            if free and _delete(one):
                gone.append(one)
    return tuple(gone)


def _delete(one: Going) -> bool:
    """Whether it is gone."""
    if one.what == STEP:
        delete_step(one.path)
        return not one.path.exists()
    try:
        drop_export(one.path)
    except OSError as error:
        _log.warning("the Hugging Face weights of %s were not deleted: %s", one.path, disk_error(error))
        return False
    return True


def drop_export(step_dir: Path) -> None:
    """Delete a step's weights in Hugging Face's form; config and tokenizer stay. The step stays whole throughout."""
    manifest = read_manifest(step_dir)
    without = without_export(manifest)
    if without != manifest:
        for left in step_dir.glob(f".{MANIFEST}.*.tmp"):  # by a process that was killed right here
            left.unlink()
        fresh = step_dir / f".{MANIFEST}.{secrets.token_hex(4)}.tmp"
        write_durably(fresh, without.to_json().encode())
        fresh.replace(step_dir / MANIFEST)
        sync_directory(step_dir)
    for role in manifest.roles:
        for file in export_files(step_dir / role):
            file.unlink()


def pin(root: Path, marks: Marks) -> None:
    """Mark steps of a run as to be kept, or take the mark away. Raises as `Marks.check`, and then has done nothing;
    WriteError where the disk refuses."""
    places = {place.step: place.path for place in scan(root)}
    marks.check(root, places)
    for step in (*marks.pin, *marks.unpin):
        mark = places[step] / PIN
        try:
            if step in marks.pin:
                mark.touch()
            else:
                mark.unlink(missing_ok=True)
            sync_directory(places[step])
        except OSError as error:
            raise WriteError(f"{mark}: cannot be written: {disk_error(error)}") from None


def sweepable(root: Path, *, certain: bool) -> list[str]:
    """The names of what killed saves have left in a run's folder. Unless it is `certain` that nobody saves there now,
    only what has not been touched for `_QUIET_SECONDS`."""
    return [name for name in litter(root) if certain or time.time() - _touched(root / name) > _QUIET_SECONDS]


@contextlib.contextmanager
def alone(root: Path) -> Iterator[bool]:
    """Hold the folder of a run against every other process. Yields whether it is certain that no run writes there.

    Raises WriteError where a run is alive, or the lock cannot be written. A run that takes no lock (the manager in
    somebody's own loop) is known by its diary alone, if it has one.
    """
    locks = (root / LOCK).exists()
    with contextlib.ExitStack() as held:
        if locks:
            try:
                held.enter_context(exclusive(root, f"prune-{secrets.token_hex(4)}"))
            except WriteError as error:
                raise WriteError(f"{root}: nothing is deleted while a run is alive there ({error})") from None
            except OSError as error:
                raise WriteError(f"{root / LOCK}: cannot be written: {disk_error(error)}") from None
        history = read_history(root)
        last = history.sessions[-1] if history.sessions else None
        here = locks and last is not None and last.host == socket.gethostname()
        if last is not None and not here and is_running(history, time.time()):
            where = f" on {last.host}" if last.host else ""
            raise WriteError(f"{root}: the run{where} may be alive, its diary is fresh; stop it first, or wait")
        yield locks


def _can_drop_export(step: DiskStep) -> bool:
    """Only where the role's own weights lie beside them."""
    manifest = read_manifest(step.path)
    return "model" in manifest.contents and "huggingface" not in manifest.roles.values()


def _bytes_of(step: DiskStep) -> int:
    try:
        return read_manifest(step.path).nbytes
    except CheckpointError:
        return sum(file.stat().st_size for file in step.path.rglob("*") if file.is_file())


def _touched(path: Path) -> float:
    """When anything in there was last written, in unix seconds; infinity where somebody is at it in this moment: a
    file is renamed, or the whole becomes a step."""
    try:
        return max(path.stat().st_mtime, *(below.lstat().st_mtime for below in path.rglob("*")), -math.inf)
    except FileNotFoundError:
        return math.inf
