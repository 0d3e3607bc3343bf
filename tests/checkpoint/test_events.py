from __future__ import annotations

import json
import math
import os
import resource
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milepost.checkpoint.diary.events import EventLog, Interrupted, interrupted_session, read_events


def test_events_come_back_in_order_with_time_and_name(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.write("step", step=1, reward=0.5, metrics={"actor/lr": np.float32(0.25)})
    log.write("stop", step=1, reason="done")
    first, second = read_events(log.path)
    assert (first["event"], first["step"], first["metrics"]) == ("step", 1, {"actor/lr": 0.25})
    assert second["reason"] == "done"
    assert first["time"] <= second["time"]


def test_numbers_that_are_not_finite_are_null_so_that_any_reader_takes_the_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1, reward=math.nan, metrics={"a": math.inf, "b": [np.float64("-inf"), 1]})
    line = json.loads(log.path.read_text(), parse_constant=pytest.fail)
    assert line["reward"] is None
    assert line["metrics"] == {"a": None, "b": [None, 1]}


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1)
    log.write("step", step=2)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-9])
    assert [event["step"] for event in read_events(log.path)] == [1]
    EventLog(log.path).write("step", step=3)
    assert [event["step"] for event in read_events(log.path)] == [1, 3]


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_disk_that_refuses_does_not_stop_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size, limits[1]))
    try:
        log.write("step", step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "event step was not written" in caplog.text
    assert [event["step"] for event in read_events(log.path)] == [1]


def start(attempt: int, pid: int = 1) -> dict[str, Any]:
    return {"event": "start", "attempt": attempt, "pid": pid, "host": "elsewhere"}


def own_start() -> dict[str, Any]:
    return {"event": "start", "attempt": 9, "pid": os.getpid(), "host": socket.gethostname()}


def resume(step: int | None) -> dict[str, Any]:
    return {"event": "resume", "from_step": step}


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number}


def saved(number: int) -> dict[str, Any]:
    return {"event": "save_durable", "step": number}


STOP = {"event": "stop", "step": 3, "reason": "done"}


@pytest.mark.parametrize(
    ("events", "resumed_from", "expected"),
    [
        ([], 0, None),
        ([own_start()], 0, None),
        ([start(0), resume(None), step(1), STOP, own_start()], 0, None),
        # killed after step 3, saved at 2: step 3 is done again
        ([start(4), resume(None), step(1), step(2), saved(2), step(3), own_start()], 2, Interrupted(3, 2, 1, 4)),
        # killed in step 1 of a resumed session
        ([start(1), resume(20), own_start()], 20, Interrupted(20, 20, 0, 1)),
        # the newest save turned out bad, so training goes on from an older one
        ([start(0), resume(None), step(4), saved(4), own_start()], 2, Interrupted(4, 2, 2, 0)),
        # the session before had itself seen a kill, and was then killed
        (
            [start(0), step(1), start(1), {"event": "kill_seen"}, resume(None), step(1), step(2)],
            0,
            Interrupted(2, 0, 2, 1),
        ),
        # an older session was killed, the one before this stopped in order
        ([start(0), step(1), start(1), {"event": "kill_seen"}, resume(None), STOP, own_start()], 0, None),
        # nobody writes starts: a session begins with its resume
        ([resume(None), step(1), resume(None), step(1), step(2)], 0, Interrupted(2, 0, 2, 0)),
        # the user chose where to begin: the loss is what the killed session had not saved
        ([start(0), resume(None), step(4), saved(4), step(5), own_start()], None, Interrupted(5, 4, 1, 0)),
    ],
)
def test_a_session_without_a_stop_was_killed(
    events: list[dict[str, Any]], resumed_from: int | None, expected: Interrupted | None
) -> None:
    assert interrupted_session(events, resumed_from) == expected
