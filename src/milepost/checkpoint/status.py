"""What an operator asks of a run: did it resume, what is newest and whole, what was lost, what is next.

The answer is read from the disk and from `events.jsonl`; a run of another program, which keeps no events, still shows
its steps. Nothing is written and no tensor is opened.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milepost.checkpoint.events import EVENTS
from milepost.checkpoint.history import RunHistory, Session, read_history
from milepost.checkpoint.manifest import read_manifest
from milepost.checkpoint.steps import StepState, list_steps, newest_good, scan, step_number
from milepost.errors import CheckpointError, NotFoundError
from milepost.wording import counted, duration, file_size, moment, ranges

FORMAT = 1
_QUIET_SECONDS = 120.0  # no event for this long says nothing yet
_QUIET_STEPS = 10.0  # nor for this many typical steps
_MOST_LISTED = 10
_INDENT = 12


@dataclass(frozen=True)
class StepFacts:
    """One step folder: how it was judged (see `milepost.checkpoint.steps`), and what it holds.

    files, bytes:  as the manifest has them; without one, as the disk has them
    created:       unix seconds, None without a manifest; `world_size` and `roles` likewise
    """

    folder: str
    step: int
    state: str
    why: str
    files: int
    bytes: int
    world_size: int | None
    roles: tuple[str, ...]
    created: float | None

    @property
    def good(self) -> bool:
        """Whether training can go on from it."""
        return self.state in ("committed", "foreign")


@dataclass(frozen=True)
class RunStatus:
    """The answer. `state` is running, ended or unknown, and `reason` says why in words.

    last_event_age:  seconds since the last event, None without events
    last_start:      the newest session, None without events
    newest:          the newest step that training can go on from
    tracker:         what `latest_checkpointed_iteration.txt` names
    notes:           what does not fit together, in words
    lost_steps:      finished steps that kills took, over the whole run
    next_step:       the step that a start now would do first
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
    newest: StepFacts | None
    tracker: int | None
    notes: tuple[str, ...]
    steps: tuple[StepFacts, ...]
    kills: int
    lost_steps: int
    next_step: int

    def lines(self) -> list[str]:
        """The answer in plain lines, ready to be printed."""
        lines = [_line("run", f"{self.run_dir}{f' (run id {self.run_id})' if self.run_id else ''}")]
        lines.append(_line("state", f"{self.state}: {self.reason}"))
        if self.last_start is not None:
            lines += _start_lines(self.last_start)
        lines += self._step_lines()
        if self.starts:
            sizes = ", then ".join(map(str, self.world_sizes)) or "not recorded"
            kills = (
                f"{counted(self.kills, 'kill')}, {counted(self.lost_steps, 'step')} lost" if self.kills else "no kills"
            )
            lines.append(_line("so far", f"{counted(self.starts, 'start')}, {kills}; world size {sizes}"))
        lines.append(_line("next", self._next()))
        return lines

    def _step_lines(self) -> list[str]:
        lines = []
        if self.newest is None:
            lines.append(_line("newest", "no whole step on disk"))
        else:
            size = f"{counted(self.newest.files, 'file')}, {file_size(self.newest.bytes)}"
            whole = "whole: every file is there with its size" if self.newest.state == "committed" else "no manifest"
            lines.append(_line("newest", f"{self.newest.folder}, {self.newest.state}, {whole} ({size})"))
        if self.tracker is not None:
            agrees = self.newest is not None and self.newest.step == self.tracker
            lines.append(_line("tracker", f"names step {self.tracker}{', the same' if agrees else ''}"))
        lines += [_line("note", note) for note in self.notes]
        bad = [step for step in reversed(self.steps) if not step.good]
        lines += [_line(step.state, f"{step.folder}: {step.why}") for step in bad[:_MOST_LISTED]]
        if len(bad) > _MOST_LISTED:
            lines.append(_line("", f"and {len(bad) - _MOST_LISTED} older ones that are not whole"))
        good = [step.step for step in self.steps if step.good]
        if len(good) > 1:
            lines.append(_line("on disk", f"steps {ranges(good)}"))
        return lines

    def _next(self) -> str:
        if self.state == "ended" and self.reason.startswith("done"):
            return f"nothing: the run is done. A longer run would go on with step {self.next_step}"
        origin = f"goes on from {self.newest.folder} with" if self.newest is not None else "begins with"
        return f"a start now {origin} step {self.next_step}"

    def as_json(self) -> dict[str, Any]:
        """The answer as JSON values. `format` grows when a field changes its meaning or goes."""
        facts = asdict(self)
        return {"format": FORMAT, **facts, "run_dir": str(self.run_dir)}


def run_status(run_dir: Path, *, now: float | None = None) -> RunStatus:
    """Look at a run. `now` is in unix seconds, by default the present.

    Raises NotFoundError where there is no such directory, or no run in it.
    """
    require_run(run_dir)
    history = read_history(run_dir)
    steps = step_facts(run_dir)
    newest = newest_good(run_dir)
    good = newest.good.path.name if newest.good is not None else None
    state, reason, age = _state(history, time.time() if now is None else now)
    trained = history.kept_steps
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
        newest=next((step for step in steps if step.folder == good), None),
        tracker=newest.tracker,
        notes=newest.notes,
        steps=steps,
        kills=len(history.kills),
        lost_steps=sum(kill.lost_steps for kill in history.kills),
        next_step=1 if newest.good is None else newest.good.step + 1,
    )


def require_run(run_dir: Path) -> None:
    """Raise NotFoundError unless `run_dir` is a directory with events or with step folders."""
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


def step_facts(run_dir: Path) -> tuple[StepFacts, ...]:
    """Every step folder of a run, in numeric order."""
    return tuple(_facts(state) for state in list_steps(run_dir))


def _facts(state: StepState) -> StepFacts:
    step = int(state.path.name.rpartition("_")[2]) if state.step < 0 else state.step
    try:
        manifest = read_manifest(state.path)
    except CheckpointError:
        sizes = _sizes_below(state.path)
        return StepFacts(state.path.name, step, state.state, state.why, len(sizes), sum(sizes), None, (), None)
    return StepFacts(
        folder=state.path.name,
        step=step,
        state=state.state,
        why=state.why,
        files=len(manifest.files),
        bytes=manifest.nbytes,
        world_size=manifest.world_size,
        roles=tuple(manifest.roles),
        created=manifest.created,
    )


def _sizes_below(directory: Path) -> list[int]:
    sizes = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(folder) / name).stat().st_size)
            except OSError:
                continue  # gone since it was listed, or a link to nothing: it holds no bytes
    return sizes


def _state(history: RunHistory, now: float) -> tuple[str, str, float | None]:
    """State, reason, and age of the last event in seconds."""
    if not history.sessions:
        return "unknown", f"no {EVENTS}, or nothing in it: only the steps on disk can be told", None
    last = history.sessions[-1]
    age = max(0.0, now - last.last)
    ago = f"{duration(age)} ago"
    if last.end is not None:
        reason = {"done": "done", "signal": "stopped on a signal", "error": "stopped on an error"}.get(
            last.end, last.end
        )
        return "ended", f"{reason}, {ago}", age
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
    resume = session.resume
    size = "" if session.world_size is None else f", world size {session.world_size}"
    lines = [_line("last start", f"{moment(session.start)}{size}")]
    if resume is None:
        return [*lines, _line("", "no resume recorded: it ended before, or is still loading")]
    if resume.from_step is None:
        lines.append(_line("", "began fresh"))
    else:
        changed = resume.saved_world_size not in (None, session.world_size)
        saved = f", saved by {counted(resume.saved_world_size or 0, 'rank')}" if changed else ""
        folder = resume.folder or f"step {resume.from_step}"
        lines.append(_line("", f"resumed from {folder} (step {resume.from_step}{saved})"))
    quiet = [part.name for part in resume.parts if part.state == "restored" and not part.why]
    if quiet:
        lines.append(_line("", f"restored  {', '.join(quiet)}"))
    for part in resume.parts:
        if part.name not in quiet:
            lines.append(_line("", f"{part.state:<9} {part.name}{part.why and ': ' + part.why}"))
    lines += [_line("", f"not taken {over.folder}{over.why and ': ' + over.why}") for over in resume.passed_over]
    return lines


def _line(label: str, words: str) -> str:
    # Words come from files: a control character must not reach a terminal, nor half a surrogate pair its encoder.
    return "".join(char if char.isprintable() else "?" for char in f"{label:<{_INDENT}}{words}".rstrip())
