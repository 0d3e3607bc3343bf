"""Where the time of a run went, by arithmetic over diaries made by hand."""

from __future__ import annotations

import pytest
from diary import event, killed_run, resume, start, step, survived_run

from milepost.checkpoint.diary.goodput import Goodput, goodput
from milepost.checkpoint.diary.history import history_of


def spent(events: list[dict[str, object]]) -> Goodput:
    found = goodput(history_of(events))
    assert found is not None
    return found


def test_a_killed_run() -> None:
    # 60 + 40 + 40 s of sessions, 20 s down; the pause after the session that was done is nobody's.
    assert spent(killed_run()).parts == pytest.approx(
        {
            "training": 80,
            "redone": 10,
            "saving": 4,
            "validating": 0,
            "starting": 30,
            "down": 20,
            "stalled": 0,
            "rest": 16,
        }
    )


def test_a_run_that_met_with_everything() -> None:
    found = spent(survived_run())
    assert found.total == pytest.approx(273)
    # 11 steps of 10 s that count, one of which hung for 50 s more; steps 8 and 9 of 10 s each were lost. Saves of 1 s
    # and one in the background, whose 13.9 s cost 0.4.
    assert found.parts == pytest.approx(
        {"training": 110, "redone": 20, "saving": 4.4, "validating": 0, "starting": 30, "down": 43, "stalled": 50,
         "rest": 15.6}
    )  # fmt: skip
    assert found.share == pytest.approx(110 / 273)
    assert found.words() == (
        "40% of 4 min 33 s was training (stalled 50 s; down 43 s; starting 30 s; redone 20 s; rest 16 s; saving 4.4 s)"
    )


def test_validation_counts_where_its_time_is_known() -> None:
    events = [start(0), resume(1, None), step(11, 1), event(13, "validation", step=1, seconds=1.5, metrics={})]
    assert spent(events).validating == 1.5


def test_before_the_first_step_there_is_nothing_to_tell() -> None:
    assert goodput(history_of([start(0), resume(1, None)])) is None


def test_a_step_without_any_time_around_it_is_all_training() -> None:
    assert spent([step(0, 1)]).share == 1.0
    assert spent([step(0, 1, took=0.0)]).share == 0.0


def test_a_hang_is_taken_from_the_part_that_it_lay_in_and_counts_once() -> None:
    def hung(at: float, number: int, phase: str, rank: int, seconds: float) -> list[dict[str, object]]:
        told = {"step": number, "phase": phase, "rank": rank}
        return [event(at, "stall", **told, seconds=1.0), event(at + 1, "stall_over", **told, seconds=seconds)]

    events = [
        start(0),
        *hung(20, 0, "resume", 0, 15.0),
        resume(30, None),
        step(41, 1),
        event(61, "save_durable", step=1, seconds=20.0, stall=20.0, bytes=1, folder="global_step_1"),
        *hung(60, 1, "save_checkpoint", 0, 18.0),
        *hung(80, 1, "logging", 0, 12.0),
        *hung(82, 2, "agreeing", 1, 12.0),  # rank 1 waits meanwhile, at the next step's door
        step(100, 2),
    ]
    found = spent(events)
    assert found.parts == pytest.approx(
        {"training": 20, "redone": 0, "saving": 2, "validating": 0, "starting": 16, "down": 0, "stalled": 45,
         "rest": 17}
    )  # fmt: skip
    assert found.total == pytest.approx(100)
