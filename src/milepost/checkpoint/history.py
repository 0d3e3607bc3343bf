"""The life of a run, told from its events.

`events.jsonl` is a flat sequence written by whichever process happened to be rank 0. Here it becomes facts: sessions
(from one start to a stop, a kill, or the present), the steps each of them trained, and which of those steps still
count. A step is *kept* until a later session trains it again or resumes from before it; the values of the lost ones
are kept too, so that both can be shown.

Events are read as a stranger's data: a field that is missing or of the wrong type is as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from milepost.checkpoint.events import EVENTS, read_events

# 9999-12-31, the last day that a calendar of four-digit years can show.
_LAST_TIME = 253_402_214_400.0


@dataclass(frozen=True)
class Part:
    """One part of the training state at a start: `state` is restored, fresh or skipped; `why` may be empty."""

    name: str
    state: str
    why: str


@dataclass(frozen=True)
class PassedOver:
    """A step folder that a start did not take, and why."""

    folder: str
    why: str


@dataclass(frozen=True)
class Resume:
    """What a session started from. `from_step` is None for a fresh start; `time` is in unix seconds."""

    time: float
    from_step: int | None
    folder: str | None
    next_step: int | None
    parts: tuple[Part, ...]
    passed_over: tuple[PassedOver, ...]
    saved_world_size: int | None


@dataclass(frozen=True)
class StepRecord:
    """One trained step. `seconds` is its duration and `reward` its mean reward, None where not recorded; a metric that
    was recorded but is no number is NaN. `session` counts from 0."""

    step: int
    time: float
    session: int
    kept: bool
    seconds: float | None
    reward: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Validation:
    """One validation, after `step` steps."""

    step: int
    time: float
    session: int
    kept: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Save:
    """One save. `outcome` is durable, failed (see `error`), or open: requested, and then nothing more was heard.

    requested, time:  unix seconds of the request and of the outcome
    seconds, bytes:   of a durable save, None where not recorded
    """

    step: int
    session: int
    outcome: str
    requested: float
    time: float
    seconds: float | None
    bytes: int | None
    folder: str | None
    error: str | None


@dataclass(frozen=True)
class Kill:
    """A session that ended without a stop.

    time:            unix seconds of its last sign of life
    seen:            unix seconds of the start that noticed it
    last_step:       the last step it finished, None for none
    committed_step:  the step that was safe on disk, None for none
    lost_steps:      number of finished steps that were not safe on disk
    """

    session: int
    time: float
    seen: float
    last_step: int | None
    committed_step: int | None
    lost_steps: int


@dataclass(frozen=True)
class Session:
    """From one start to its end. `end` is the reason of its stop (done, signal, error), killed, or None: not known."""

    index: int
    start: float
    last: float
    run_id: str | None
    attempt: int | None
    host: str | None
    pid: int | None
    world_size: int | None
    engine: str | None
    version: str | None
    resume: Resume | None
    end: str | None
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True)
class RunHistory:
    """All that the events of a run tell; every tuple is in the order of the events."""

    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    validations: tuple[Validation, ...]
    saves: tuple[Save, ...]
    kills: tuple[Kill, ...]

    @property
    def kept_steps(self) -> tuple[StepRecord, ...]:
        """The steps that count, by step number."""
        return tuple(record for record in self.steps if record.kept)

    @property
    def lost_steps(self) -> tuple[StepRecord, ...]:
        """The steps whose work was lost: trained again later, or to be trained again."""
        return tuple(record for record in self.steps if not record.kept)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """The world sizes of the sessions in order, a repeated one once."""
        sizes = [session.world_size for session in self.sessions if session.world_size is not None]
        return tuple(size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1])

    @property
    def typical_step_seconds(self) -> float | None:
        """Median duration of a step in seconds."""
        durations = [record.seconds for record in self.steps if record.seconds is not None]
        return median(durations) if durations else None

    @property
    def trained_seconds(self) -> float:
        """Seconds spent in the steps that count."""
        return sum(record.seconds or 0.0 for record in self.kept_steps)

    @property
    def redone_seconds(self) -> float:
        """Seconds spent in steps whose work was lost."""
        return sum(record.seconds or 0.0 for record in self.lost_steps)

    @property
    def down_seconds(self) -> float:
        """Seconds between the last sign of life of each killed session and the first step begun after it (or, where
        there is none yet, the start that noticed the kill)."""
        first: dict[int, StepRecord] = {}
        for record in self.steps:
            first.setdefault(record.session, record)
        total = 0.0
        for kill in self.kills:
            begun = first.get(kill.session + 1)
            back = kill.seen if begun is None else max(kill.seen, begun.time - (begun.seconds or 0.0))
            total += max(0.0, back - kill.time)
        return total


def read_history(run_dir: Path) -> RunHistory:
    """The history in `run_dir/events.jsonl`; an empty one where there is no such file."""
    return history_of(read_events(run_dir / EVENTS))


def history_of(events: Iterable[Mapping[str, Any]]) -> RunHistory:
    """Turn events, in the order they were written, into facts."""
    groups = _sessions_of(_timed(events))
    killed_by = _kills_by_session(groups)
    steps, validations = _trained(groups)
    saves = tuple(save for index, group in enumerate(groups) for save in _saves(index, group))
    sessions = tuple(
        _session(index, group, killed=index in killed_by or (index + 1 < len(groups)))
        for index, group in enumerate(groups)
    )
    kills = []
    for session, after in zip(sessions, [*groups[1:], []], strict=True):
        if session.end == "killed":
            lost = [record for record in steps if record.session == session.index and not record.kept]
            kills.append(_kill(session, killed_by.get(session.index), after, len(lost)))
    return RunHistory(sessions, steps, validations, saves, tuple(kills))


def _timed(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events with a usable time, made to run forward: a clock that was set back must not turn a bar around."""
    timed: list[dict[str, Any]] = []
    latest = 0.0
    for event in events:
        time = number(event.get("time"))
        if time is None or not 0.0 <= time <= _LAST_TIME:
            continue
        latest = max(latest, time)
        timed.append({**event, "time": latest})
    return timed


def _sessions_of(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if not groups or event.get("event") == "start":
            groups.append([])
        groups[-1].append(event)
    return groups


def _kills_by_session(groups: Sequence[list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Take the `kill_seen` events out of the groups and give each to the session that was killed: the one before the
    start that saw it."""
    killed: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        for event in [event for event in group if event.get("event") == "kill_seen"]:
            # Found at the end of a group, it was written just before the `start` that opens the next one.
            before_start = event is group[-1] and index + 1 < len(groups) and group[0] is not event
            fresh = all(other.get("event") in ("start", "kill_seen") for other in group[: group.index(event)])
            of = index - 1 if fresh and not before_start else index
            killed.setdefault(max(of, 0), event)
            group.remove(event)
    return killed


def _trained(groups: Sequence[list[dict[str, Any]]]) -> tuple[tuple[StepRecord, ...], tuple[Validation, ...]]:
    """Steps and validations, each told whether it still counts."""
    rows: list[tuple[int, int, dict[str, Any]]] = []
    lost: set[int] = set()
    kept: dict[str, list[int]] = {"step": [], "validation": []}
    for session, group in enumerate(groups):
        for event in group:
            kind = event.get("event")
            if kind == "resume":
                following = integer(event.get("next_step"))
                for stack in kept.values() if following is not None else ():
                    _drop(stack, rows, following or 0, lost)
            step = integer(event.get("step"))
            if kind in kept and step is not None:
                _drop(kept[str(kind)], rows, step, lost)
                kept[str(kind)].append(len(rows))
                rows.append((session, step, event))
    steps = tuple(
        StepRecord(
            step=step,
            time=event["time"],
            session=session,
            kept=row not in lost,
            seconds=_positive(event.get("seconds")),
            reward=_metrics({"reward": event["reward"]}).get("reward") if "reward" in event else None,
            metrics=_metrics(event.get("metrics")),
        )
        for row, (session, step, event) in enumerate(rows)
        if event["event"] == "step"
    )
    validations = tuple(
        Validation(step, event["time"], session, row not in lost, _metrics(event.get("metrics")))
        for row, (session, step, event) in enumerate(rows)
        if event["event"] == "validation"
    )
    return steps, validations


def _drop(stack: list[int], rows: Sequence[tuple[int, int, dict[str, Any]]], step: int, lost: set[int]) -> None:
    """`step` is about to be done: it and all after it no longer count. The steps in `stack` ascend."""
    while stack and rows[stack[-1]][1] >= step:
        lost.add(stack.pop())


def _saves(session: int, group: Sequence[dict[str, Any]]) -> list[Save]:
    requested: dict[int, float] = {}
    saves = []
    for event in group:
        step = integer(event.get("step"))
        kind = event.get("event")
        if step is None:
            continue
        if kind == "save_requested":
            requested[step] = event["time"]
        elif kind in ("save_durable", "save_failed"):
            seconds = _positive(event.get("seconds"))
            saves.append(
                Save(
                    step=step,
                    session=session,
                    outcome="durable" if kind == "save_durable" else "failed",
                    requested=requested.pop(step, event["time"] - (seconds or 0.0)),
                    time=event["time"],
                    seconds=seconds,
                    bytes=integer(event.get("bytes")),
                    folder=_text(event.get("folder")),
                    error=_text(event.get("error")),
                )
            )
    last = group[-1]["time"] if group else 0.0
    unheard = [Save(step, session, "open", time, last, None, None, None, None) for step, time in requested.items()]
    return sorted([*saves, *unheard], key=lambda save: save.requested)


def _session(index: int, group: Sequence[dict[str, Any]], killed: bool) -> Session:
    start = next((event for event in group if event.get("event") == "start"), {})
    stop = next((event for event in reversed(group) if event.get("event") == "stop"), None)
    resume = next((event for event in group if event.get("event") == "resume"), None)
    steps = [
        step for event in group if event.get("event") == "step" if (step := integer(event.get("step"))) is not None
    ]
    end = (_text(stop.get("reason")) or "done") if stop is not None else ("killed" if killed else None)
    world_size = integer(start.get("world_size"))
    return Session(
        index=index,
        start=group[0]["time"] if group else 0.0,
        last=group[-1]["time"] if group else 0.0,
        run_id=_text(start.get("run_id")),
        attempt=integer(start.get("attempt")),
        host=_text(start.get("host")),
        pid=integer(start.get("pid")),
        world_size=world_size if world_size is not None or resume is None else integer(resume.get("world_size")),
        engine=_text(start.get("engine")),
        version=_text(start.get("version")),
        resume=None if resume is None else _resume(resume),
        end=end,
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
    )


def _resume(event: Mapping[str, Any]) -> Resume:
    return Resume(
        time=event["time"],
        from_step=integer(event.get("from_step")),
        folder=_text(event.get("folder")),
        next_step=integer(event.get("next_step")),
        parts=tuple(
            Part(_text(part.get("name")) or "?", _text(part.get("state")) or "?", _text(part.get("why")) or "")
            for part in _dicts(event.get("parts"))
        ),
        passed_over=tuple(
            PassedOver(_text(skipped.get("folder")) or "?", _text(skipped.get("why")) or "")
            for skipped in _dicts(event.get("skipped"))
        ),
        saved_world_size=integer(event.get("saved_world_size")),
    )


def _kill(session: Session, event: Mapping[str, Any] | None, after: Sequence[dict[str, Any]], lost: int) -> Kill:
    """`after` is the session that followed; where it left no `kill_seen`, the records themselves have to tell."""
    seen = event["time"] if event is not None else (after[0]["time"] if after else session.last)
    fields: Mapping[str, Any] = event or {}
    told = fields.get("lost_steps")
    last_step = integer(fields.get("last_step"))
    return Kill(
        session=session.index,
        time=session.last,
        seen=seen,
        last_step=session.last_step if last_step is None else last_step,
        committed_step=integer(fields.get("committed_step")),
        lost_steps=len(told) if isinstance(told, list) else max(0, integer(told) or 0) if told is not None else lost,
    )


def number(value: Any) -> float | None:
    """A finite or infinite number or NaN as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def integer(value: Any) -> int | None:
    """A whole number of at most 18 digits (as a double would still order it); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 10**18:
        return None
    return value


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) and found >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _metrics(value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict):
        return {}
    found = {str(name): math.nan if item is None else number(item) for name, item in value.items()}
    return {name: item for name, item in found.items() if item is not None}
