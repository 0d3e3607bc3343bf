"""What must hold of a run's folder after any fault, and after the start that follows it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tiny_engine import disk_is_at, names, resumed

from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.steps import TRACKER, judge, newest_good, read_tracker, scan
from milepost.errors import MilepostError

ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Promise:
    """What a run's savers were told, which the disk must keep.

    saved:    the newest step that was acknowledged; the newest whole one is no older
    tracker:  and the tracker names no older one than this
    goes_back: whether the run was told to go on from an older step: the tracker may name one that was set aside
    """

    saved: int
    tracker: int
    goes_back: bool = False


def newest(root: Path) -> int:
    """The newest step that is whole; 0 where there is none."""
    good = newest_good(root, ROLES).good
    return 0 if good is None else good.step


def faults_of(root: Path, promise: Promise) -> list[str]:
    """What does not hold, in words; nothing where all is well: every folder named as a step is whole and holds, bit for
    bit, the state of its step; none that was acknowledged is lost; the tracker names one of them."""
    found = []
    at = newest(root)
    if at < promise.saved:
        found.append(f"step {promise.saved} was acknowledged, the newest is {at}")
    for step in scan(root):
        verdict = judge(step.path, ROLES)
        if not verdict.good:
            found.append(f"{step.path.name} is {verdict.state}: {verdict.why}")
        elif check_files(step.path, read_manifest(step.path), deep=True):
            found.append(f"{step.path.name} has other bytes than were written")
        elif not disk_is_at(step.path, step.step):
            found.append(f"{step.path.name} does not hold the state of its step")
    tracker = read_tracker(root)
    if tracker is None and promise.tracker:
        found.append("the tracker names no step")
    elif tracker is not None and not (promise.tracker <= tracker <= at or promise.goes_back):
        found.append(f"the tracker names {tracker}, acknowledged is {promise.tracker}, the newest is {at}")
    return found


def faults_of_next_start(root: Path) -> list[str]:
    """Start again on the folder: what does not hold then. The newest whole step comes back, litter is gone, and the
    tracker names that step."""
    at = newest(root)
    try:
        run = resumed(root, keep_last=2)
    except MilepostError as error:
        return [f"the next start fails: {error}"]
    found = [] if not at or run.is_at(at) else [f"a resume does not bring back step {at}"]
    left = names(root) ^ ({step.path.name for step in scan(root)} | ({TRACKER} if at else set()))
    if any(not name.startswith("set_aside_") for name in left):
        found.append(f"after the next start there lie, or lack, {sorted(left)}")
    named = read_tracker(root) or 0
    if named < at:
        found.append(f"after the next start the tracker names {named} instead of {at}")
    run.manager.close()
    return found


def lost(root: Path, steps: Collection[int]) -> list[str]:
    """Which of these steps are neither in the run's folder nor set aside."""
    where = (root, *root.glob("set_aside_*"))
    gone = [step for step in steps if not any((folder / f"global_step_{step}").is_dir() for folder in where)]
    return [f"step {step} is neither where it was nor set aside" for step in gone]
