"""What a start takes from the diary of the sessions before; the diary may hold odd lines."""

from __future__ import annotations

import json

from milepost.trainer.earlier import earlier_durations, earlier_phases, earlier_rewards


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


ODD = [
    {"event": "step"},
    {"event": "step", "step": 9, "seconds": "x", "metrics": [1]},
    {"event": "save_durable", "step": 9, "seconds": True, "stall": None},
    {"event": ["step"], "step": 9, "seconds": 9.0, "metrics": {"timing_s/gen": 9.0}},
]


def step(number: int, seconds: float, **phases: float) -> dict[str, object]:
    metrics = {f"timing_s/{name}": value for name, value in phases.items()}
    metrics |= {"timing_s/step": seconds, "critic/score/mean": 7.0}
    return {"event": "step", "step": number, "seconds": seconds, "metrics": metrics}


def test_a_deadline_is_kept_by_steps_updates_and_saves_of_earlier_sessions() -> None:
    events = [
        step(1, 10.0, gen=6.0, update_critic=1.0, update_actor=2.5),
        {"event": "save_durable", "step": 1, "seconds": 4.0, "stall": 0.5},
        *ODD,
        step(2, 11.0, gen=7.0, update_critic=1.0),  # while the critic warms up
    ]
    assert earlier_durations(events) == {"step": [10.0, 11.0], "update": [3.5, 1.0], "save": [4.0]}
    assert len(earlier_durations([step(n, 1.0, update_actor=1.0) for n in range(99)])["update"]) == 20


def test_a_phase_is_watched_by_what_it_took_in_earlier_sessions_but_where_it_hung() -> None:
    events = [
        step(1, 10.0, gen=6.0, reward=1.0),
        {"event": "validation", "step": 1, "seconds": 3.0},
        {"event": "save_durable", "step": 1, "seconds": 4.0, "stall": 0.5},
        {"event": "stall", "step": 2, "phase": "reward", "rank": 1, "seconds": 600.0},
        step(2, 1000.0, gen=7.0, reward=990.0),
        *ODD,
    ]
    assert earlier_phases(events) == {
        "gen": [6.0, 7.0],
        "reward": [1.0],
        "testing": [3.0],
        "save_checkpoint": [0.5],
    }
    json.dumps(earlier_phases(events))  # it travels to all ranks
