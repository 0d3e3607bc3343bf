from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from diary import BEGIN, event, killed_run, resume, save, start, step, survived_run, write_events

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.diary.facts import Kill, RunHistory
from milepost.checkpoint.diary.history import history_of, read_history
from milepost.errors import CallError


def counted(history: RunHistory) -> list[tuple[int, int, bool]]:
    return [(record.session, record.step, record.kept) for record in history.steps]


def test_a_killed_and_resumed_run_in_facts() -> None:
    history = history_of(killed_run())
    assert [(s.start - BEGIN, s.last - BEGIN, s.end, s.first_step, s.last_step) for s in history.sessions] == [
        (0, 60, "killed", 1, 5),
        (80, 120, "done", 5, 6),
        (140, 180, "done", 7, 8),
    ]
    assert [(s.run_id, s.attempt, s.world_size) for s in history.sessions] == [("r1", 0, 2), ("r1", 1, 2), ("r2", 0, 1)]
    assert history.world_sizes == (2, 1)
    assert history.kills == (Kill(0, BEGIN + 60, BEGIN + 85, 5, 4, 1),)
    assert [(s.step, s.session, s.outcome, s.time - s.requested) for s in history.saves] == [
        (2, 0, "durable", 1), (4, 0, "durable", 1), (6, 1, "durable", 1), (8, 2, "durable", 1),
    ]  # fmt: skip


def test_a_step_done_again_counts_once_and_its_first_values_are_kept() -> None:
    history = history_of(killed_run())
    assert [record.step for record in history.kept_steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(record.step, record.session, record.reward) for record in history.lost_steps] == [(5, 0, 0.9)]
    assert [(record.step, record.session, record.reward) for record in history.kept_steps][4] == (5, 1, 0.5)


def test_what_a_kill_cost() -> None:
    history = history_of(killed_run())
    # 8 kept steps and one lost, of 10 s each; the last sign of life at 60, step 5 began again at 100 - 10
    assert (history.trained_seconds, history.redone_seconds, history.down_seconds) == (80, 10, 30)
    assert history.typical_step_seconds == 10


def test_a_resume_tells_what_it_took() -> None:
    first, _, third = history_of(killed_run()).sessions
    assert first.resume is not None and third.resume is not None
    assert (first.resume.from_step, first.resume.next_step) == (None, 1)
    assert (third.resume.from_step, third.resume.saved_world_size, third.resume.mode) == (6, 2, "auto")
    assert [(part.name, part.state, part.why) for part in third.resume.parts] == [
        ("actor/weights", "restored", ""),
        ("actor/RNG", "fresh", "saved by 2 ranks, now 1"),
    ]


def test_skipped_steps_and_notes_of_a_start_are_told() -> None:
    skipped = [{"folder": "global_step_6", "why": "incomplete"}, "junk"]
    found = history_of([start(0), resume(1, 4, skipped=skipped, notes=["careful", 7])]).sessions[0].resume
    assert found is not None
    assert [(s.folder, s.why) for s in found.skipped] == [("global_step_6", "incomplete")]
    assert found.notes == ("careful",)


def test_steps_after_the_one_resumed_from_are_lost_before_they_are_done_again() -> None:
    history = history_of([start(0), resume(1, None), step(2, 1), step(3, 2), step(4, 3), start(9), resume(10, 1)])
    assert counted(history) == [(0, 1, True), (0, 2, False), (0, 3, False)]


def test_a_validation_is_lost_with_its_step() -> None:
    validations = [event(5, "validation", step=2, metrics={"a": 1}), event(6, "validation", step=4, metrics={"a": 2})]
    history = history_of([start(0), *validations, start(9), resume(10, 2)])
    assert [(v.step, v.kept) for v in history.validations] == [(2, True), (4, False)]


def test_a_session_that_another_followed_without_a_word_was_killed() -> None:
    """Killed while it was loading, before it could note the kill it saw itself."""
    history = history_of([
        start(0), resume(1, None), step(2, 1), step(3, 2),
        start(5),
        start(7), event(8, "kill_seen", last_step=2, committed_step=0, lost_steps=2), resume(9, None), step(10, 1),
    ])  # fmt: skip
    assert [session.end for session in history.sessions] == ["killed", "killed", None]
    assert [(k.session, k.seen - BEGIN, k.last_step, k.lost_steps) for k in history.kills] == [
        (0, 5, 2, 2),
        (1, 8, 2, 2),
    ]


def test_a_kill_seen_by_a_session_that_was_killed_at_once_is_of_the_one_before() -> None:
    history = history_of([
        start(0), resume(1, None), step(2, 1),
        start(5), event(6, "kill_seen", last_step=1, committed_step=0, lost_steps=1),
        start(7), event(8, "kill_seen", last_step=0, committed_step=0, lost_steps=0), resume(9, None),
    ])  # fmt: skip
    assert [(kill.session, kill.seen - BEGIN, kill.lost_steps) for kill in history.kills] == [(0, 6, 1), (1, 8, 0)]


def test_where_nobody_writes_starts_a_second_resume_begins_a_session() -> None:
    history = history_of([
        resume(0, None, world_size=3), step(2, 1), step(3, 2),
        event(5, "kill_seen", last_step=2, committed_step=1, lost_steps=1), resume(6, 1), step(7, 2),
    ])  # fmt: skip
    assert [(session.end, session.last - BEGIN) for session in history.sessions] == [("killed", 3), (None, 7)]
    assert history.sessions[0].world_size == 3
    assert [(kill.session, kill.committed_step) for kill in history.kills] == [(0, 1)]
    assert counted(history) == [(0, 1, True), (0, 2, False), (1, 2, True)]


def test_a_kill_of_what_the_file_does_not_hold_is_nobodys() -> None:
    kill = event(1, "kill_seen", last_step=2, committed_step=1, lost_steps=1)
    for events in ([start(0), kill, resume(2, 1)], [kill, resume(2, 1)], [kill]):
        history = history_of(events)
        assert history.kills == ()
        assert [session.end for session in history.sessions] == [None] * (len(events) > 1)


def test_a_stop_says_why() -> None:
    history = history_of([start(0), event(1, "stop", reason="error", error="disk full"), start(2)])
    assert [(session.end, session.error) for session in history.sessions] == [("error", "disk full"), (None, None)]
    assert history.kills == ()


def test_saves_that_failed_or_were_never_heard_of_again() -> None:
    history = history_of([
        start(0),
        event(1, "save_requested", step=1), event(3, "save_failed", step=1, error="no space"),
        event(4, "save_requested", step=2), step(6, 3),
        event(9, "save_durable", step=3, seconds=2.0, bytes=7),
    ])  # fmt: skip
    told = [(s.step, s.outcome, s.requested - BEGIN, s.time - BEGIN, s.error) for s in history.saves]
    assert told == [(1, "failed", 1, 3, "no space"), (2, "open", 4, 9, None), (3, "durable", 7, 9, None)]


def test_null_and_missing_values_differ() -> None:
    history = history_of([
        event(0, "step", step=1, reward=None, metrics={"a": None, "b": 1, "c": "x", "d": True, "e": 10**400}),
        event(1, "step", step=2),
    ])  # fmt: skip
    first, second = history.steps
    assert first.reward is not None and math.isnan(first.reward) and second.reward is None
    assert set(first.metrics) == {"a", "b", "e"} and math.isnan(first.metrics["a"]) and first.metrics["b"] == 1
    assert second.metrics == {} and second.seconds is None


def test_a_clock_that_was_set_back_turns_nothing_around() -> None:
    history = history_of([start(100), step(50, 1), step(120, 2)])
    assert [record.time - BEGIN for record in history.steps] == [100, 120]


@pytest.mark.parametrize(
    "line",
    [
        {"event": "step", "step": 9},
        {"time": "noon", "event": "step", "step": 9},
        {"time": math.nan, "event": "step", "step": 9},
        {"time": 1e300, "event": "step", "step": 9},
        {"time": BEGIN, "event": ["step"], "step": 9},
        {"time": BEGIN, "event": "step", "step": "9"},
        {"time": BEGIN, "event": "step", "step": 10**15},
        {"time": BEGIN, "event": "step", "step": True},
    ],
)
def test_an_event_without_time_or_step_is_no_fact(line: dict[str, Any]) -> None:
    assert [record.step for record in history_of([step(0, 1), line]).steps] == [1]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write_events(tmp_path, [start(0), step(1, 1), step(2, 2)])
    content = (tmp_path / EVENTS).read_bytes()
    (tmp_path / EVENTS).write_bytes(content[:-20])
    assert [record.step for record in read_history(tmp_path).steps] == [1]


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe junk\n"])
def test_nothing_to_read_is_an_empty_history(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / EVENTS).write_bytes(content)
    history = read_history(tmp_path)
    assert history == RunHistory((), (), (), (), ())
    assert (history.typical_step_seconds, history.down_seconds, history.world_sizes) == (None, 0, ())


def test_events_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / EVENTS).mkdir()
    with pytest.raises(CallError, match=r"events\.jsonl cannot be read: Is a directory"):
        read_history(tmp_path)


def test_only_saves_of_this_session_answer_its_requests() -> None:
    history = history_of([start(0), event(1, "save_requested", step=2), start(5), *save(6, 2)])
    assert [(s.session, s.outcome, s.requested - BEGIN) for s in history.saves] == [(0, "open", 1), (1, "durable", 6)]


# What a run survives


def test_how_each_session_ended_is_told_in_words() -> None:
    sessions = history_of(survived_run()).sessions
    assert [session.ended for session in sessions] == [
        "stopped on SIGTERM, saved step 7, requeue",
        "killed",
        "stopped for other machines to join, saved step 10",
        "done",
    ]
    assert [session.world_size for session in sessions] == [2, 1, 2, 4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reason": "signal"}, "stopped on a signal"),  # the agent's, which knows of no step
        (
            {"reason": "signal", "signal": "SIGUSR1", "step": 0, "saved": False},
            "stopped on SIGUSR1, no step yet, requeue",
        ),
        ({"reason": "deadline", "step": 3, "saved": False}, "stopped before its deadline, step 3 not saved, requeue"),
        ({"reason": "odd"}, "odd"),
    ],
)
def test_an_end_says_what_is_kept(fields: dict[str, Any], words: str) -> None:
    (session,) = history_of([start(0), event(1, "stop", **fields)]).sessions
    assert session.ended == words


def test_what_ranks_tell_of_one_hang_is_one_stall() -> None:
    (stall,) = history_of(survived_run()).stalls
    assert (stall.session, stall.step, stall.phase, stall.limit, stall.over) == (0, 4, "gen", 30.0, 50.0)
    assert stall.ranks == (0, 1) and stall.stacks == ("stalls/0.txt", "stalls/1.txt")
    assert stall.time == BEGIN + 75


def test_a_stall_that_did_not_end_and_odd_lines() -> None:
    hung = event(9, "stall", step=1, phase="reward", rank="x", limit="y", stacks=3)
    odd = [event(9, "stall"), event(9, "stall", step=1), event(9, "stall_over", step=2, phase="gen", seconds=4.0)]
    (stall,) = history_of([start(0), hung, *odd]).stalls
    assert (stall.over, stall.ranks, stall.limit, stall.stacks) == (None, (), None, ())


def test_a_save_in_the_background_costs_its_stall_alone() -> None:
    saves = {save.step: save for save in history_of(survived_run()).saves}
    assert (saves[2].seconds, saves[2].stall) == (1.0, 1.0)
    # Asked for when the copy began; written down when it was made.
    assert (saves[4].requested, saves[4].seconds, saves[4].stall) == (pytest.approx(BEGIN + 104.1), 13.9, 0.4)
    assert (saves[6].outcome, saves[6].stall) == ("failed", None)


def test_a_clock_that_is_set_moves_no_length() -> None:
    """An hour forward after step 1, and two back after step 2; the other clock only counts."""

    def at(seconds: float, jump: float, name: str, /, **fields: Any) -> dict[str, Any]:
        return event(seconds + jump, name, clock=5000 + seconds, **fields)

    events = [
        at(0, 0, "start", world_size=1),
        at(10, 0, "step", step=1, seconds=10),
        at(20, 3600, "step", step=2, seconds=10),
        at(30, -3600, "step", step=3, seconds=10),
        # Another machine's clock counts from elsewhere, so its time on the wall is all there is.
        {**event(31, "stall", step=3, phase="gen", rank=1), "clock": 77},
        at(40, -3600, "stop", reason="done"),
    ]
    history = history_of(events)
    assert [record.time - BEGIN for record in history.steps] == [10, 20, 30]
    assert history.stalls[0].time - BEGIN == 31
    assert history.sessions[0].last - BEGIN == 40
