"""The steps on disk, as the disk has them: which there are, which are whole, and which is newest.

A folder `global_step_{i}` (also read: `global_steps_{i}`) is

    committed    its manifest reads, every file that it names is there with its size, and the small ones with their
                 checksums
    foreign      it has no manifest, so another program wrote it, and its files are complete
    incomplete   files, or whole roles, are missing
    damaged      a file has the wrong size, a small one other bytes than were written, or one contradicts itself

Small are the files that hold no tensors (states, configs, tokenizers), and those of few bytes: they are read whole,
since a wrong number in one of them shows nowhere else. Of the others headers are compared when they are opened; all
their bytes are what `verify --deep` reads.

Listing is one scan of the root that looks into nothing; judging looks into one step. Neither needs torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, check_files, read_manifest
from milepost.errors import CheckpointError, DamagedError, IncompleteError, MilepostError
from milepost.jobs.checksums import check_records
from milepost.layouts import find_layout

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "trainer_state.json"
_STEP = re.compile(r"global_steps?_(\d+)")
_SMALL = 256 << 10  # bytes
_HOLDING_TENSORS = (".pt", ".pth", ".bin", ".distcp", ".safetensors")
_FOREIGN_DATA = re.compile(r"data(_\d+)?\.pt")


@dataclass(frozen=True, order=True, slots=True)
class StepDir:
    """A folder named as a step; nothing is known of what is in it."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class StepState:
    """A step that was looked into. `why` is a plain sentence where it is not good, else empty."""

    step: int
    path: Path
    state: str
    why: str = ""

    @property
    def good(self) -> bool:
        """Whether training can go on from it."""
        return self.state in ("committed", "foreign")


@dataclass(frozen=True, slots=True)
class Newest:
    """What a search for the newest good step found.

    good:     it, or None
    skipped:  the newer ones that are not good, newest first
    tracker:  the number in the tracker file, or None
    notes:    warnings in words, such as a tracker that names a step that is not there
    """

    good: StepState | None
    skipped: tuple[StepState, ...]
    tracker: int | None
    notes: tuple[str, ...]


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"global_step_{step}"


def step_number(path: Path) -> int | None:
    """The number in a step folder's name, or None where the name is another."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def scan(root: Path) -> tuple[StepDir, ...]:
    """Every folder of `root` that is named as a step, in numeric order; empty where there is no such root."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if _STEP.fullmatch(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(StepDir(int(name.rpartition("_")[2]), root / name) for name in names))


def read_tracker(root: Path) -> int | None:
    """The step that `latest_checkpointed_iteration.txt` names; None where it is absent or holds no number."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def judge(
    step_dir: Path,
    roles: Collection[str] = (),
    *,
    named: bool = False,
    closely: bool = True,
    manifest: Manifest | None = None,
) -> StepState:
    """Look into one step: is it whole?

    roles:     roles that must be there ("actor", "critic"); without them, whatever roles there are
    named:     the user named this step, so a foreign one is not asked for the `data.pt` that its writer writes last
    closely:   read the small files too; of a foreign step, which has no manifest that says what they must be, open all
    manifest:  the step's own, where it was read already
    """
    number = step_number(step_dir)
    step = -1 if number is None else number
    try:
        if manifest is not None or (step_dir / MANIFEST).exists():
            known = manifest or read_manifest(step_dir)
            return StepState(_judge_own(step_dir, known, number, roles, closely), step_dir, "committed")
        _judge_foreign(step_dir, roles, named, closely)
    except IncompleteError as error:
        return StepState(step, step_dir, "incomplete", str(error))
    except CheckpointError as error:
        return StepState(step, step_dir, "damaged", str(error))
    except (MilepostError, OSError) as error:
        return StepState(step, step_dir, "incomplete", str(error))
    return StepState(step, step_dir, "foreign")


def _judge_own(step_dir: Path, manifest: Manifest, number: int | None, roles: Collection[str], closely: bool) -> int:
    if number is not None and number != manifest.step:
        raise DamagedError(f"{step_dir / MANIFEST} is of step {manifest.step}: the folder was renamed or mixed up")
    lacking = [role for role in roles if role not in manifest.roles]
    if lacking:
        raise IncompleteError(f"{step_dir / lacking[0]} was not saved: the step holds {', '.join(manifest.roles)}")
    problems = check_files(step_dir, manifest)
    if problems:
        more = f" ({len(problems) - 1} more files are not good)" if len(problems) > 1 else ""
        missing = all(problem.kind == "missing" for problem in problems)
        raise (IncompleteError if missing else DamagedError)(f"{step_dir}/{problems[0]}{more}")
    small = [record for record in manifest.files if closely and _is_small(record)]
    altered = next(check_records(step_dir, small, deep=True), None)
    if altered is not None:
        raise DamagedError(f"{step_dir}/{altered}")
    return manifest.step


def _is_small(record: FileRecord) -> bool:
    return record.size <= _SMALL or not record.path.endswith(_HOLDING_TENSORS)


def _judge_foreign(step_dir: Path, roles: Collection[str], named: bool, open_files: bool) -> None:
    if not step_dir.is_dir():
        raise IncompleteError(f"{step_dir}: no such directory")
    # A step that is itself a role's directory is one model without roles: verl's supervised trainer writes such.
    inside = [step_dir] if find_layout(step_dir) else sorted(path for path in step_dir.iterdir() if path.is_dir())
    wanted = [step_dir / role for role in roles] or [path for path in inside if find_layout(path) is not None]
    if not wanted:
        raise IncompleteError(f"{step_dir} holds no {MANIFEST} and no role's files")
    for directory in wanted:
        layout = find_layout(directory) if directory.is_dir() else None
        if layout is None:
            raise IncompleteError(f"{directory} is missing or holds no checkpoint")
        if open_files:
            layout.open(directory)
    # Without a manifest, what the other program writes last is the only sign that it came to its end.
    if not named and not any(_FOREIGN_DATA.fullmatch(path.name) for path in step_dir.iterdir()):
        raise IncompleteError(f"{step_dir} holds neither {MANIFEST} nor data.pt: it was not written to its end")


def list_steps(root: Path, newest: int | None = None, roles: Collection[str] = ()) -> list[StepState]:
    """The steps of `root`, each looked into, in numeric order; with `newest`, only that many of the newest."""
    found = scan(root)
    return [judge(step.path, roles) for step in (found if newest is None else found[-newest:] if newest else ())]


def newest_good(root: Path, roles: Collection[str] = (), *, run_id: str = "", without: Iterable[Path] = ()) -> Newest:
    """Search `root` for the newest step that is whole. The disk decides; the tracker is only compared with it.

    roles:    roles that must be there
    run_id:   where given, only steps that this run saved count
    without:  folders to pass over
    """
    passed_over = set(without)
    found = scan(root)
    tracker = read_tracker(root)
    skipped: list[StepState] = []
    good = None
    for candidate in reversed(found):
        if candidate.path in passed_over or (run_id and _run_id(candidate.path) != run_id):
            continue
        state = judge(candidate.path, roles)
        if state.good:
            good = state
            break
        skipped.append(state)
    notes = () if run_id else _tracker_notes(root, tracker, found, good)
    return Newest(good, tuple(skipped), tracker, notes)


def _run_id(step_dir: Path) -> str | None:
    try:
        return read_manifest(step_dir).run_id
    except CheckpointError:
        return None


def _tracker_notes(
    root: Path, tracker: int | None, found: Collection[StepDir], good: StepState | None
) -> tuple[str, ...]:
    path = root / TRACKER
    taken = f"step {good.step} is the newest that is whole" if good else "no step here is whole"
    if tracker is None:
        return (f"{path} holds no step number; {taken}",) if path.exists() else ()
    if tracker not in {step.step for step in found}:
        return (f"{path} names step {tracker}, which is not there; {taken}",)
    if good is not None and good.step > tracker:
        return (f"{path} names step {tracker}; {taken}. To go back, name the step with resume_mode=resume_path",)
    return ()
