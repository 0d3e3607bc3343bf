"""The worker's own small pieces; that it trains is shown by test_launch and test_resume."""

from __future__ import annotations

from milepost.trainer.worker import earlier_rewards


def test_the_curve_is_read_from_a_diary_with_odd_lines() -> None:
    events = [
        {"event": "step"},
        {"event": "step", "step": "x", "reward": 1},
        {"event": "step", "step": 2, "reward": None},
        {"event": "step", "step": 2, "reward": 0.25},
        {"event": "step", "step": 1, "reward": 0.5},
        {"event": "step", "step": 2, "reward": 0.75},  # trained again after a kill: the later one counts
        {"event": "step", "step": 3, "reward": 1.0},
        {"event": ["a"], "step": 1, "reward": 9.0},
    ]
    assert earlier_rewards(events, 3) == [0.5, 0.75]
