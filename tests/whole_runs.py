"""Whole runs of the real loop, for tests that compare them: what a rank does, and what a run measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_CLOCK = ("timing_s/", "perf/time", "perf/th")


def train(overrides: list[str]) -> None:
    """Train as one rank of the process group."""
    from milepost.trainer.config import load_config
    from milepost.trainer.worker import choose_device
    from milepost.trainer.worker import train as train_as_rank

    config = load_config(None, overrides)
    train_as_rank(config, choose_device(config))


def measured(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each step of a run's diary, but for the clock's."""
    return {
        event["step"]: {name: value for name, value in event["metrics"].items() if not name.startswith(_CLOCK)}
        for event in events
        if event["event"] == "step"
    }
