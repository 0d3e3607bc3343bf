"""What an operator asks of a run: did it resume, what is newest and whole, what was lost, what is next.

The answer is read from the disk and from `events.jsonl`; a run of another program, which keeps no events, still shows
its steps. Nothing is written and no tensor is opened.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.diary.facts import Resume, RunHistory, Session, Stall
from milepost.checkpoint.diary.goodput import Goodput, goodput
from milepost.checkpoint.diary.history import read_history
from milepost.checkpoint.inventory import StepFacts, facts_of
from milepost.checkpoint.remote.folder import url_of
from milepost.checkpoint.steps import list_steps, newest_good, scan, step_number
from milepost.errors import NotFoundError
from milepost.wording import counted, duration, file_size, moment, named_ranks, printable, ranges

FORMAT = 1
LOOKED_INTO = 10  # newest steps; each costs a look at every one of its files
_QUIET_SECONDS = 120.0  # no event for this long says nothing yet
_QUIET_STEPS = 10.0  # nor for this many typical steps
_CLOCK_SECONDS = 60.0  # by which clocks of two machines may differ
_MOST_LISTED = 10
_MOST_STALLS = 3
_LONGEST_LIST = 80  # characters of a list of step numbers
_INDENT = 12


@dataclass(frozen=True)
class StepsOnDisk:
    """The steps of a run as far as they were looked into.

    looked_into:  the newest of them, in numeric order; they reach back to the newest good one, however old it is
    listed:       numbers of the older ones, of which nothing but the folder's name is known, ascending
    newest:       the newest step that training can go on from
    tracker:      what `latest_checkpointed_iteration.txt` names
    notes:        what does not fit together, in words
    """

    looked_into: tuple[StepFacts, ...]
    listed: tuple[int, ...]
    newest: StepFacts | None
    tracker: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunStatus:
    """The answer. `state` is running, ended or unknown, and `reason` says why in words.

    last_event_age:  seconds since the last event, None without events
    last_start:      the newest session, None without events
    last_step:       the last step that was trained and still counts
    on_disk:         the steps there are
    lost_steps:      finished steps that kills took, over the whole run
    next_step:       the step that a start now would do first; None where it would refuse, since no step is whole
    goodput:         where the time of the run went, None before the first step
    stalls:          phases that hung, oldest first
    """

    run_dir: Path
    run_id: str | None
    state: str
    reason: str
    last_event_age: float | None
    starts: int
    world_sizes: tuple[int, ...]
    last_start: Session | None
    last_step: int | None
    on_disk: StepsOnDisk
    kills: int
    lost_steps: int
    next_step: int | None
    goodput: Goodput | None
    stalls: tuple[Stall, ...]

    def lines(self) -> list[str]:
        """The answer in plain lines, ready to be printed."""
        lines = [_line("run", f"{self.run_dir}{f' (run id {self.run_id})' if self.run_id else ''}")]
        lines.append(_line("state", f"{self.state}: {self.reason}"))
        if self.last_start is not None:
            lines += _start_lines(self.last_start)
        lines += _step_lines(self.on_disk)
        if self.starts:
            sizes = ", then ".join(map(str, self.world_sizes)) or "not recorded"
            kills = (
                f"{counted(self.kills, 'kill')}, {counted(self.lost_steps, 'step')} lost" if self.kills else "no kills"
            )
            lines.append(_line("so far", f"{counted(self.starts, 'start')}, {kills}; world size {sizes}"))
        if self.goodput is not None:
            lines.append(_line("goodput", self.goodput.words()))
        lines += _stall_lines(self.stalls, self.last_start)
        lines.append(_line("next", self._next()))
        return lines

    def _next(self) -> str:
        newest = self.on_disk.newest
        if self.next_step is None:
            return "a start now refuses: bring a whole step back, or begin anew with resume_mode=disable"
        if self.last_start is not None and self.last_start.end == "done":
            return f"nothing: the run is done. A longer run would go on with step {self.next_step}"
        origin = f"goes on from {newest.folder} with" if newest is not None else "begins with"
        return f"a start now {origin} step {self.next_step}"

    def as_json(self) -> dict[str, Any]:
        """The answer as JSON values. `format` grows when a field changes its meaning or goes."""
        return {"format": FORMAT, **asdict(self), "run_dir": str(self.run_dir)}


def run_status(run_dir: Path, *, now: float | None = None) -> RunStatus:
    """Look at a run. `now` is in unix seconds, by default the present.

    Raises NotFoundError where there is no such directory, or no run in it.
    """
    require_run(run_dir)
    history = read_history(run_dir)
    on_disk = steps_on_disk(run_dir)
    newest = on_disk.newest
    state, reason, age = _state(history, time.time() if now is None else now)
    trained = history.kept_steps
    # A start begins from nothing only where nothing was ever begun (`milepost.checkpoint.resume.choose_start`).
    refuses = newest is None and bool(on_disk.looked_into or on_disk.tracker)
    return RunStatus(
        run_dir=run_dir,
        run_id=next((session.run_id for session in reversed(history.sessions) if session.run_id), None),
        state=state,
        reason=reason,
        last_event_age=age,
        starts=len(history.sessions),
        world_sizes=history.world_sizes,
        last_start=history.sessions[-1] if history.sessions else None,
        last_step=trained[-1].step if trained else None,
        on_disk=on_disk,
        kills=len(history.kills),
        lost_steps=sum(kill.lost_steps for kill in history.kills),
        next_step=None if refuses else 1 if newest is None else newest.step + 1,
        goodput=goodput(history),
        stalls=history.stalls,
    )


def require_run(run_dir: Path) -> None:
    """Raise NotFoundError unless `run_dir` is a directory with events or with step folders."""
    if url_of(run_dir) is not None:
        raise NotFoundError(f"{url_of(run_dir)}: only steps lie at a URL; milepost inspect lists them")
    if not run_dir.exists():
        raise NotFoundError(f"{run_dir}: no such directory. Give the run's directory, trainer.default_local_dir")
    if not run_dir.is_dir():
        raise NotFoundError(f"{run_dir} is a file. Give the run's directory, trainer.default_local_dir")
    if (run_dir / EVENTS).is_file() or scan(run_dir):
        return
    if step_number(run_dir) is not None:
        raise NotFoundError(f"{run_dir} is one step of a run. Give the run's directory: {run_dir.parent}")
    raise NotFoundError(
        f"{run_dir} holds no run: neither {EVENTS} nor a folder global_step_*. "
        "Give the run's directory, trainer.default_local_dir"
    )


def steps_on_disk(run_dir: Path) -> StepsOnDisk:
    """Look into the newest steps of a run, and list the others: a run that keeps all has thousands."""
    found = newest_good(run_dir)
    states = list_steps(run_dir, newest=max(LOOKED_INTO, len(found.skipped) + 1))
    facts = tuple(facts_of(state) for state in states)
    return StepsOnDisk(
        looked_into=facts,
        listed=tuple(step.step for step in scan(run_dir) if not states or step.step < states[0].step),
        newest=next((step for step in reversed(facts) if step.good), None),
        tracker=found.tracker,
        notes=found.notes,
    )


def is_running(history: RunHistory, now: float) -> bool:
    """Whether the last session of a run seems to be alive. `now` is in unix seconds."""
    return _state(history, now)[0] == "running"


def _state(history: RunHistory, now: float) -> tuple[str, str, float | None]:
    """State, reason, and age of the last event in seconds."""
    if not history.sessions:
        return "unknown", f"no {EVENTS}, or nothing in it: only the steps on disk can be told", None
    last = history.sessions[-1]
    age = max(0.0, now - last.last)
    ago = f"{duration(age)} ago"
    if last.last - now > _CLOCK_SECONDS:
        ago = f"dated {duration(last.last - now)} in the future: a clock was set back, so its age is not known"
    if last.end is not None:
        return "ended", f"{last.ended}, {ago}{f': {last.error}' if last.error else ''}", age
    if last.pid is not None and last.host == socket.gethostname():
        if _is_alive(last.pid):
            return "running", f"process {last.pid} is there, last event {ago}", age
        return "unknown", f"no stop recorded, process {last.pid} is not seen on this host, last event {ago}", age
    if age <= max(_QUIET_SECONDS, _QUIET_STEPS * (history.typical_step_seconds or 0.0)):
        return "running", f"last event {ago}", age
    return "unknown", f"no stop recorded, and no event for {duration(age)}: killed, or in a very long step", age


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _start_lines(session: Session) -> list[str]:
    size = "" if session.world_size is None else f", world size {session.world_size}"
    first = _line("last start", f"{moment(session.start)}{size}")
    if session.resume is None:
        return [first, _line("", "no resume recorded: it ended before, or is still loading")]
    return [first, *_resume_lines(session.resume, session.world_size)]


def _resume_lines(resume: Resume, world_size: int | None) -> list[str]:
    """What the start printed then, told again."""
    if resume.from_step is None:
        lines = [_line("", "began fresh")]
    else:
        changed = resume.saved_world_size not in (None, world_size)
        saved = f", saved by {counted(resume.saved_world_size or 0, 'rank')}" if changed else ""
        folder = resume.folder or f"step {resume.from_step}"
        lines = [_line("", f"resumed from {folder} (step {resume.from_step}{saved})")]
    quiet = [part.name for part in resume.parts if part.state == "restored" and not part.why]
    if quiet:
        lines.append(_line("", f"restored  {', '.join(quiet)}"))
    for part in resume.parts:
        if part.name not in quiet:
            lines.append(_line("", f"{part.state:<9} {part.name}{part.why and ': ' + part.why}"))
    lines += [_line("", f"not taken {step.folder}{step.why and ': ' + step.why}") for step in resume.skipped]
    lines += [_line("", f"note      {note}") for note in resume.notes]
    if resume.next_step is not None:
        lines.append(_line("", f"went on with step {resume.next_step}"))
    return lines


def _stall_lines(stalls: Sequence[Stall], last: Session | None) -> list[str]:
    """The newest phases that hung; of one that hangs now, who does not say so."""
    lines = []
    for stall in stalls[-_MOST_STALLS:]:
        words = f"{stall.where}: "
        if stall.over is not None:
            words += f"took {duration(stall.over)}"
        else:
            words += f"did not go on within {duration(stall.limit or 0.0)}"
        lines.append(_line("stall", f"{words}, {moment(stall.time)}"))
        size = last.world_size if last is not None and last.index == stall.session else None
        silent = [rank for rank in range(size or 0) if rank not in stall.ranks]
        if silent and stall.over is None:
            lines.append(_line("", f"{named_ranks(silent)} did not tell of it: stopped or gone, look there first"))
        if stall.stacks:
            lines.append(_line("", f"stacks in {stall.stacks[0]}{' and others there' if stall.stacks[1:] else ''}"))
    return lines


def _step_lines(on_disk: StepsOnDisk) -> list[str]:
    lines = []
    newest = on_disk.newest
    if newest is None:
        lines.append(_line("newest", "no whole step on disk"))
    else:
        size = f"{counted(newest.files, 'file')}, {file_size(newest.bytes)}"
        whole = "whole: every file is there with its size" if newest.state == "committed" else "no manifest"
        lines.append(_line("newest", f"{newest.folder}, {newest.state}, {whole} ({size})"))
    if on_disk.tracker is not None:
        agrees = newest is not None and newest.step == on_disk.tracker
        lines.append(_line("tracker", f"names step {on_disk.tracker}{', the same' if agrees else ''}"))
    lines += [_line("note", note) for note in on_disk.notes]
    bad = [step for step in reversed(on_disk.looked_into) if not step.good]
    lines += [_line(step.state, f"{step.folder}: {step.why}") for step in bad[:_MOST_LISTED]]
    if len(bad) > _MOST_LISTED:
        lines.append(_line("", f"and {len(bad) - _MOST_LISTED} older ones that are not whole"))
    good = [step.step for step in on_disk.looked_into if step.good]
    if len(good) > 1:
        lines.append(_line("whole", f"steps {numbers(good)}"))
    if on_disk.listed:
        lines.append(_line("older", f"steps {numbers(on_disk.listed)}, not looked into"))
    return lines


def numbers(steps: Collection[int]) -> str:
    """Step numbers in words, in short where they are many: `5-7, 10`, `15 to 50,000 (9,998 of them)`."""
    words = ranges(steps)
    return words if len(words) <= _LONGEST_LIST else f"{min(steps):,} to {max(steps):,} ({len(steps):,} of them)"


def _line(label: str, words: str) -> str:
    return printable(f"{label:<{_INDENT}}{words}".rstrip())
