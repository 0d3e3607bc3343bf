"""From the events of a run to its facts.

`events.jsonl` is a flat sequence written by whichever process happened to be rank 0. Here it is cut into sessions, and
each event becomes a fact (`milepost.checkpoint.diary.facts`).

Events are read as a stranger's data: a field that is missing or of the wrong type is as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.checkpoint.diary.events import EVENTS, begins_session, read_events
from milepost.checkpoint.diary.facts import Kill, Resume, RunHistory, Save, Session, Stall, StepRecord, Validation
from milepost.checkpoint.resume import Part, Skipped
from milepost.errors import CallError

# 9999-12-31, the last day that a calendar of four-digit years can show.
_LAST_TIME = 253_402_214_400.0

Event = Mapping[str, Any]


def read_history(run_dir: Path) -> RunHistory:
    """The history in `run_dir/events.jsonl`; an empty one where there is no such file.

    Raises CallError where there is one and it cannot be read.
    """
    path = run_dir / EVENTS
    try:
        events = read_events(path)
    except OSError as error:
        raise CallError(f"{path} cannot be read: {error.strerror}") from error
    return history_of(events)


def history_of(events: Iterable[Event]) -> RunHistory:
    """Turn events, in the order they were written, into facts."""
    groups = _forward([_by_one_clock(group) for group in _sessions_of(_timed(events))])
    kill_events = _take_kills(groups)
    lost = _lost(groups)
    sessions = tuple(
        # A session that another followed, and that never said that it stops, was killed.
        _session(index, group, killed=index in kill_events or index + 1 < len(groups))
        for index, group in enumerate(groups)
    )
    steps = tuple(_step(*found) for found in _numbered(groups, "step", lost))
    return RunHistory(
        sessions=sessions,
        steps=steps,
        validations=tuple(_validation(*found) for found in _numbered(groups, "validation", lost)),
        saves=tuple(save for index, group in enumerate(groups) for save in _saves(index, group)),
        kills=tuple(
            _kill(session, kill_events.get(session.index), sessions[session.index + 1 : session.index + 2], steps)
            for session in sessions
            if session.end == "killed"
        ),
        stalls=tuple(stall for index, group in enumerate(groups) for stall in _stalls(index, group)),
    )


def _timed(events: Iterable[Event]) -> list[Event]:
    """The events with a name and a usable time."""
    timed: list[Event] = []
    for event in events:
        time = _number(event.get("time"))
        if time is not None and 0.0 <= time <= _LAST_TIME and isinstance(event.get("event"), str):
            timed.append({**event, "time": time})
    return timed


def _by_one_clock(group: list[Event]) -> list[Event]:
    """The events of a session in times that run as those of its process did, which no setting of the clock on the wall
    moves: that of its first event, and from there by the clock that only counts."""
    first = next((event for event in group if _duration(event.get("clock")) is not None), None)
    if first is None:
        return group
    begun, count = first["time"], first["clock"]
    retimed: list[Event] = []
    for event in group:
        clock = _duration(event.get("clock"))
        # Other ranks, which tell of stalls, may be on other machines, whose clocks count from elsewhere.
        own = clock is not None and clock >= count and _integer(event.get("rank")) in (None, 0)
        time = begun + clock - count if own and clock is not None else event["time"]
        retimed.append({**event, "time": min(time, _LAST_TIME)})
    return retimed


def _forward(groups: Sequence[list[Event]]) -> list[list[Event]]:
    """Times that never run backward: a clock that was set back must not turn a bar around."""
    latest = 0.0
    forward: list[list[Event]] = []
    for group in groups:
        forward.append([])
        for event in group:
            latest = max(latest, event["time"])
            forward[-1].append({**event, "time": latest})
    return forward


def _sessions_of(events: Sequence[Event]) -> list[list[Event]]:
    groups: list[list[Event]] = []
    for event in events:
        if not groups and event["event"] == "kill_seen":
            continue  # what was killed is not in the file
        if not groups or begins_session(event, groups[-1]):
            groups.append([])
        groups[-1].append(event)
    return groups


def _take_kills(groups: Sequence[list[Event]]) -> dict[int, Event]:
    """Take the `kill_seen` events out of the groups and give each to the session that was killed."""
    killed: dict[int, Event] = {}
    for index, group in enumerate(groups):
        for event in [event for event in group if event["event"] == "kill_seen"]:
            # It is written right before a `resume`. If that also opens the next session, as it does where nobody
            # writes starts, then what stands here was killed; if only a start stands here, then the session before.
            opening = all(other["event"] in ("start", "kill_seen") for other in group[: group.index(event)])
            killed.setdefault(index - 1 if opening else index, event)
            group.remove(event)
    return killed


def _lost(groups: Sequence[Sequence[Event]]) -> set[int]:
    """The `id` of each step and validation that no longer counts."""
    lost: set[int] = set()
    counting: dict[str, list[tuple[int, int]]] = {"step": [], "validation": []}  # (step, id), ascending by step

    def drop(kind: str, first: int) -> None:
        while counting[kind] and counting[kind][-1][0] >= first:
            lost.add(counting[kind].pop()[1])

    for event in (event for group in groups for event in group):
        kind, step, next_step = event["event"], _integer(event.get("step")), _integer(event.get("next_step"))
        if kind == "resume" and next_step is not None:
            drop("step", next_step)
            drop("validation", next_step)
        elif kind in counting and step is not None:
            drop(kind, step)
            counting[kind].append((step, id(event)))
    return lost


def _numbered(groups: Sequence[Sequence[Event]], kind: str, lost: set[int]) -> Iterable[tuple[int, int, bool, Event]]:
    """(session, step, whether it is kept, event) of each event of that kind."""
    for session, group in enumerate(groups):
        for event in group:
            step = _integer(event.get("step"))
            if event["event"] == kind and step is not None:
                yield session, step, id(event) not in lost, event


def _step(session: int, step: int, kept: bool, event: Event) -> StepRecord:
    return StepRecord(
        step=step,
        time=event["time"],
        session=session,
        kept=kept,
        seconds=_duration(event.get("seconds")),
        reward=_metric(event["reward"]) if "reward" in event else None,
        metrics=_metrics(event.get("metrics")),
    )


def _validation(session: int, step: int, kept: bool, event: Event) -> Validation:
    seconds = _duration(event.get("seconds"))
    return Validation(step, event["time"], session, kept, _metrics(event.get("metrics")), seconds)


def _saves(session: int, group: Sequence[Event]) -> list[Save]:
    requested: dict[int, float] = {}
    saves = []
    for event in group:
        step = _integer(event.get("step"))
        kind = event["event"]
        if step is None:
            continue
        if kind == "save_requested":
            # One that does not block is written down once its state has been taken, with how long that took.
            requested[step] = event["time"] - (_duration(event.get("seconds")) or 0.0)
        elif kind in ("save_durable", "save_failed"):
            seconds = _duration(event.get("seconds"))
            stall = _duration(event.get("stall"))
            saves.append(
                Save(
                    step=step,
                    session=session,
                    outcome="durable" if kind == "save_durable" else "failed",
                    requested=requested.pop(step, event["time"] - (seconds or 0.0)),
                    time=event["time"],
                    seconds=seconds,
                    bytes=_integer(event.get("bytes")),
                    folder=_text(event.get("folder")),
                    error=_text(event.get("error")),
                    stall=seconds if stall is None else stall,
                )
            )
    unheard = [
        Save(step, session, "open", time, group[-1]["time"], None, None, None, None) for step, time in requested.items()
    ]
    return sorted([*saves, *unheard], key=lambda save: save.requested)


def _stalls(session: int, group: Sequence[Event]) -> list[Stall]:
    """Every rank tells for itself: what they tell of the same phase of the same step is one stall."""
    told: dict[tuple[int, str], list[Event]] = {}
    for event in group:
        step, phase = _integer(event.get("step")), _text(event.get("phase"))
        if event["event"] in ("stall", "stall_over") and step is not None and phase is not None:
            told.setdefault((step, phase), []).append(event)
    stalls = []
    for (step, phase), events in told.items():
        begun = [event for event in events if event["event"] == "stall"]
        took = [_duration(event.get("seconds")) for event in events if event["event"] == "stall_over"]
        if begun:
            ranks = {rank for event in begun if (rank := _integer(event.get("rank"))) is not None}
            stacks = {file for event in begun if (file := _text(event.get("stacks"))) is not None}
            stalls.append(
                Stall(
                    session=session,
                    step=step,
                    phase=phase,
                    time=begun[0]["time"],
                    ranks=tuple(sorted(ranks)),
                    limit=_duration(begun[0].get("limit")),
                    over=max((seconds for seconds in took if seconds is not None), default=None),
                    stacks=tuple(sorted(stacks)),
                )
            )
    return stalls


def _session(index: int, group: Sequence[Event], killed: bool) -> Session:
    nothing: Event = {}
    start = next((event for event in group if event["event"] == "start"), nothing)
    stop = next((event for event in reversed(group) if event["event"] == "stop"), None)
    resume = next((event for event in group if event["event"] == "resume"), None)
    steps = [step for event in group if event["event"] == "step" if (step := _integer(event.get("step"))) is not None]
    end = (_text(stop.get("reason")) or "done") if stop is not None else ("killed" if killed else None)
    world_size = _integer(start.get("world_size"))
    return Session(
        index=index,
        start=group[0]["time"],
        last=group[-1]["time"],
        run_id=_text(start.get("run_id")),
        attempt=_integer(start.get("attempt")),
        host=_text(start.get("host")),
        pid=_integer(start.get("pid")),
        world_size=world_size if world_size is not None or resume is None else _integer(resume.get("world_size")),
        engine=_text(start.get("engine")),
        version=_text(start.get("version")),
        resume=None if resume is None else _resume(resume),
        end=end,
        error=None if stop is None else _text(stop.get("error")),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        signal=None if stop is None else _text(stop.get("signal")),
        stopped_at=None if stop is None else _integer(stop.get("step")),
        saved=stop["saved"] if stop is not None and isinstance(stop.get("saved"), bool) else None,
    )


def _resume(event: Event) -> Resume:
    notes = event.get("notes")
    return Resume(
        time=event["time"],
        mode=_text(event.get("mode")),
        from_step=_integer(event.get("from_step")),
        folder=_text(event.get("folder")),
        next_step=_integer(event.get("next_step")),
        parts=tuple(
            Part(_text(part.get("name")) or "?", _text(part.get("state")) or "?", _text(part.get("why")) or "")
            for part in _dicts(event.get("parts"))
        ),
        skipped=tuple(
            Skipped(_text(skipped.get("folder")) or "?", _text(skipped.get("why")) or "")
            for skipped in _dicts(event.get("skipped"))
        ),
        notes=tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else (),
        saved_world_size=_integer(event.get("saved_world_size")),
    )


def _kill(session: Session, event: Event | None, followers: Sequence[Session], steps: Iterable[StepRecord]) -> Kill:
    """`followers` is the session that came next, if one did. Where it left no `kill_seen`, being killed itself before
    it could, the records have to tell."""
    told: Event = event or {}
    last_step, lost = _integer(told.get("last_step")), _integer(told.get("lost_steps"))
    if lost is None:
        lost = len([record for record in steps if record.session == session.index and not record.kept])
    return Kill(
        session=session.index,
        time=session.last,
        seen=event["time"] if event is not None else followers[0].start,
        last_step=session.last_step if last_step is None else last_step,
        committed_step=_integer(told.get("committed_step")),
        lost_steps=max(0, lost),
    )


def _number(value: Any) -> float | None:
    """A finite or infinite number or NaN as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(value: Any) -> int | None:
    """A whole number of at most 15 digits, which a double holds exactly; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 10**15:
        return None
    return value


def _duration(value: Any) -> float | None:
    """Seconds that a calendar can hold; None for anything else."""
    found = _number(value)
    return found if found is not None and 0.0 <= found <= _LAST_TIME else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _dicts(value: Any) -> list[Event]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _metric(value: Any) -> float | None:
    """A recorded value: null, which is how the diary writes a number that is not finite, is NaN."""
    return math.nan if value is None else _number(value)


def _metrics(value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict):
        return {}
    found = {str(name): _metric(item) for name, item in value.items()}
    return {name: item for name, item in found.items() if item is not None}
