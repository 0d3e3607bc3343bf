"""Random histories of saves, kills, damage and starts keep every promise at once."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from faults.histories import History

TestHistories = History.TestCase
TestHistories.settings = settings(
    max_examples=12,
    stateful_step_count=12,
    deadline=None,
    phases=(Phase.generate,),
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
