"""Where training begins: which step it goes on from and why, and the block that every start prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from milepost.checkpoint.steps import TRACKER, StepState, judge, newest_good, scan, step_number
from milepost.errors import ConfigError, DamagedError, IncompleteError, NotFoundError
from milepost.wording import counted

MODES = ("auto", "disable", "resume_path")
_LABEL = 10


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the training state at a start: "actor/weights", "data", ...

    state:  "restored", "fresh", or "skipped" (in the checkpoint, but this run has no place for it)
    why:    in words; may be empty
    """

    name: str
    state: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A newer step that was not taken, and why."""

    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """The step to go on from, or None for a fresh start.

    keep_up_to:  steps of the run's folder up to this number are the history that training goes on with; newer ones
                 belong to another and are set aside before the first new step takes its place
    """

    folder: Path | None
    step: int | None
    keep_up_to: int
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What a start restored.

    folder, step:      of the checkpoint; None on a fresh start
    next_step:         the step that training does first
    world_size:        ranks now
    saved_world_size:  ranks that saved; None on a fresh start
    """

    mode: str
    root: Path
    folder: Path | None
    step: int | None
    next_step: int
    parts: tuple[Part, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    world_size: int
    saved_world_size: int | None

    def lines(self) -> list[str]:
        """The block for people."""
        return [
            self._headline(),
            *self._part_lines(),
            *(_line("not taken", f"{step.folder}: {step.why}") for step in self.skipped),
            *(_line("note", note) for note in self.notes),
            _line("next", f"step {self.next_step}"),
        ]

    def as_event(self) -> dict[str, Any]:
        """The fields of the `resume` event."""
        return {
            "mode": self.mode,
            "from_step": self.step,
            "folder": None if self.folder is None else str(self.folder),
            "next_step": self.next_step,
            "parts": [asdict(part) for part in self.parts],
            "world_size": self.world_size,
            "saved_world_size": self.saved_world_size,
            "skipped": [asdict(step) for step in self.skipped],
            "notes": list(self.notes),
        }

    def _headline(self) -> str:
        if self.folder is None:
            return f"fresh start in {self.root} on {counted(self.world_size, 'rank')}"
        ranks = counted(self.world_size, "rank")
        if self.saved_world_size not in (None, self.world_size):
            ranks = f"{ranks} (saved by {self.saved_world_size})"
        return f"resumed from {self.folder}: step {self.step}, on {ranks}"

    def _part_lines(self) -> list[str]:
        """One line for each role's restored parts, and one for each part that is not simply restored or fresh."""
        lines = []
        owners = dict.fromkeys(part.name.partition("/")[0] for part in self.parts)
        for owner in owners:
            parts = [part for part in self.parts if part.name.partition("/")[0] == owner]
            plain = {state: [_short(p) for p in parts if p.state == state and not p.why] for state in _STATES}
            said = [f"{state}{': ' if names[0] else ''}{', '.join(names)}" for state, names in plain.items() if names]
            for part in parts:
                if part.why:
                    said.append(f"{part.state}{f': {_short(part)}' if _short(part) else ''} ({part.why})")
            lines += [_line(owner if number == 0 else "", text) for number, text in enumerate(said)]
        return lines


_STATES = ("restored", "fresh", "skipped")


def _short(part: Part) -> str:
    return part.name.partition("/")[2]


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}} {text}"


def choose_start(
    root: Path,
    mode: str,
    path: Path | None,
    roles: Collection[str],
    *,
    run_id: str = "",
    attempt: int = 0,
    without: Mapping[Path, str] = MappingProxyType({}),
) -> Start:
    """Decide from the disk where training begins; rank 0 asks, and tells the others.

    auto          the newest step that is whole; fresh only where there has never been one
    resume_path   the step at `path` and no other
    disable       fresh
    A restart (`attempt` > 0) of a run that was told `disable` or `resume_path` goes on from what it has saved itself.

    without:  steps found bad by closer inspection, and why

    Raises NotFoundError, IncompleteError or DamagedError rather than begin from nothing what was begun before.
    """
    if mode not in MODES:
        raise ConfigError(f"resume_mode={mode}: choose from {', '.join(MODES)}")
    if mode != "auto" and attempt > 0 and run_id:
        own = newest_good(root, roles, run_id=run_id, without=without)
        if own.good is not None:
            note = (
                f"restart {attempt} of this run: it goes on from its own newest step; {mode} held for its first start"
            )
            return _start_at(root, own.good, own.skipped, without, (note,))
        if own.skipped or without:
            raise IncompleteError(_nothing_whole(root, _passed_over(own.skipped, without), None))
    if mode == "disable":
        return _fresh(root)
    if mode == "resume_path":
        return _named(root, path, roles)
    ignored = () if path is None else (f"{path} is not looked at, since resume_mode is not resume_path",)
    newest = newest_good(root, roles, without=without)
    if newest.good is not None:
        return _start_at(root, newest.good, newest.skipped, without, (*newest.notes, *ignored))
    if newest.skipped or without or newest.tracker:
        raise IncompleteError(_nothing_whole(root, _passed_over(newest.skipped, without), newest.tracker))
    return Start(None, None, 0, (), ignored)


def _start_at(
    root: Path,
    good: StepState,
    skipped: Collection[StepState],
    without: Mapping[Path, str],
    notes: tuple[str, ...],
) -> Start:
    passed_over = _passed_over(skipped, without)
    if passed_over:
        notes = (*notes, _will_move(root, len(passed_over), "newer"))
    return Start(good.path, good.step, good.step, passed_over, notes)


def _passed_over(skipped: Collection[StepState], without: Mapping[Path, str]) -> tuple[Skipped, ...]:
    why = {state.path: f"{state.state}: {state.why}" for state in skipped}
    why |= {path: f"damaged: {reason}" for path, reason in without.items()}
    newest_first = sorted(why, key=lambda path: step_number(path) or 0, reverse=True)
    return tuple(Skipped(path.name, why[path]) for path in newest_first)


def _will_move(root: Path, count: int, which: str) -> str:
    steps = counted(count, f"{which} step")
    return f"the first save moves {steps} of {root} aside, into a folder set_aside_*; nothing is deleted"


def _fresh(root: Path) -> Start:
    count = len(scan(root))
    return Start(None, None, 0, (), (_will_move(root, count, "older"),) if count else ())


def _named(root: Path, path: Path | None, roles: Collection[str]) -> Start:
    if path is None:
        raise ConfigError("resume_mode=resume_path needs trainer.resume_from_path, the folder of a step")
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such folder to resume from; name an existing step, or use resume_mode=auto")
    if path.name in roles and step_number(path.resolve().parent) is not None:
        raise NotFoundError(f"{path} is one role of a step; name the step, {path.parent}")
    steps = scan(path)
    if steps:
        raise NotFoundError(f"{path} holds several steps; name one of them, such as {steps[-1].path}")
    state = judge(path, roles, named=True)
    if not state.good:
        kind = DamagedError if state.state == "damaged" else IncompleteError
        raise kind(f"{path} cannot be resumed from: {state.why}")
    if state.step < 0:
        raise NotFoundError(f"{path}: neither its name nor a manifest says which step it is; name it global_step_N")
    here = path.resolve().parent == root.resolve() and step_number(path) is not None
    others = [step for step in scan(root) if not here or step.step > state.step]
    notes = (_will_move(root, len(others), "newer" if here else "other"),) if others else ()
    return Start(path, state.step, state.step if here else 0, (), notes)


def _nothing_whole(root: Path, skipped: tuple[Skipped, ...], tracker: int | None) -> str:
    advice = "bring a whole one back, or begin anew with resume_mode=disable"
    if skipped:
        return f"{root}: no step here is whole ({skipped[0].folder} is {skipped[0].why}); {advice}"
    return f"{root / TRACKER} names step {tracker}, but no step lies in {root}; {advice}"
