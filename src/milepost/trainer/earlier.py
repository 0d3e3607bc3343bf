"""What the diary says of earlier sessions, as far as training goes on with it. Odd lines are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from milepost.trainer.metrics import TIMING
from milepost.trainer.stall import SAVING

_NEWEST = 20
Event = Mapping[str, Any]


def earlier_durations(events: Iterable[Event]) -> dict[str, list[float]]:
    """How long steps, their updates and saves took, in seconds, newest last: by them a deadline is kept."""
    found: dict[str, list[float]] = {"step": [], "update": [], "save": []}
    for event in events:
        name = {"step": "step", "save_durable": "save"}.get(str(event["event"]))
        seconds = _seconds(event.get("seconds"))
        if name is not None and seconds is not None:
            found[name].append(seconds)
        if name == "step":
            updates = [seconds for phase, seconds in _timed(event) if phase.startswith("update_")]
            found["update"] += [sum(updates)] if updates else []
    return {name: seconds[-_NEWEST:] for name, seconds in found.items()}


def earlier_phases(events: Iterable[Event]) -> dict[str, list[float]]:
    """How long the phases of steps took, by name, in seconds, newest last, but for those that hung: what the watch over
    them (`milepost.trainer.stall`) compares with. What comes after the step's line is not there: metrics going out,
    and asking after saves.
    """
    found: dict[tuple[str, Any], list[tuple[int, float]]] = defaultdict(list)
    hung = set()
    for number, event in enumerate(events):
        kind, step, seconds = str(event["event"]), event.get("step"), _seconds(event.get("seconds"))
        if not isinstance(step, int):
            continue
        if kind == "stall":
            hung.add((str(event.get("phase")), step))
        for phase, took in _timed(event) if kind == "step" else ():
            found[phase, step].append((number, took))
        if kind == "validation" and seconds is not None:
            found["testing", step].append((number, seconds))
        stall = _seconds(event.get("stall"))
        if kind == "save_durable" and stall is not None:
            found[SAVING, step].append((number, stall))
    phases: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (phase, step), took_at in found.items():
        if (phase, step) not in hung:
            phases[phase] += took_at
    return {phase: [took for _, took in sorted(took_at)[-_NEWEST:]] for phase, took_at in phases.items()}


def earlier_rewards(events: Sequence[Event], next_step: int) -> list[float]:
    """The mean rewards of the steps before `next_step`, in order."""
    rewards: dict[int, float] = {}
    for event in events:
        step, reward = event.get("step"), event.get("reward")
        if event["event"] == "step" and isinstance(step, int) and isinstance(reward, int | float):
            rewards[step] = float(reward)
    return [rewards[step] for step in sorted(rewards) if step < next_step]


def _timed(event: Event) -> Iterator[tuple[str, float]]:
    """The phases of a step and their seconds, from its metrics."""
    metrics = event.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        seconds = _seconds(value)
        if name.startswith(TIMING) and name != f"{TIMING}step" and seconds is not None:
            yield name.removeprefix(TIMING), seconds


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None
