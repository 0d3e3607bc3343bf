from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diary import (
    BEGIN,
    commit_step,
    event,
    killed_run,
    made_run,
    resume,
    start,
    step,
    survived_run,
    write_events,
)
from tiny_engine import resumed, trained

from milepost.checkpoint import steps
from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.checkpoint.diary.status import LOOKED_INTO, RunStatus, run_status
from milepost.checkpoint.resume import choose_start
from milepost.checkpoint.steps import TRACKER
from milepost.errors import IncompleteError, NotFoundError


def told(status: RunStatus) -> dict[str, list[str]]:
    """The lines by their label; a line without one belongs to the label before."""
    found: dict[str, list[str]] = {}
    label = ""
    for line in status.lines():
        label = line[:12].strip() or label
        found.setdefault(label, []).append(line[12:])
    return found


def status_of(run_dir: Path, seconds: float = 190) -> RunStatus:
    return run_status(run_dir, now=BEGIN + seconds)


def test_a_run_that_was_killed_resumed_and_ended(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert told(status_of(run, 240)) == {
        "run": [f"{run} (run id r2)"],
        "state": ["ended: done, 1 min ago"],
        "last start": [
            "2027-01-15 08:02:20 UTC, world size 1",
            "resumed from runs/r/global_step_6 (step 6, saved by 2 ranks)",
            "restored  actor/weights",
            "fresh     actor/RNG: saved by 2 ranks, now 1",
            "went on with step 7",
        ],
        "newest": ["global_step_8, committed, whole: every file is there with its size (2 files, 1.5 kB)"],
        "tracker": ["names step 8, the same"],
        "whole": ["steps 2, 4, 6, 8"],
        "so far": ["3 starts, 1 kill, 1 step lost; world size 2, then 1"],
        # Of 160 s: 8 steps that count, of 10 s each; 10 s from each start to its first step; 4 saves; 20 s killed.
        "goodput": ["50% of 2 min 40 s was training (starting 30 s; down 20 s; rest 16 s; redone 10 s; saving 4.0 s)"],
        "next": ["nothing: the run is done. A longer run would go on with step 9"],
    }


def test_the_answer_as_json(tmp_path: Path) -> None:
    status = status_of(made_run(tmp_path / "run"))
    found = json.loads(json.dumps(status.as_json(), allow_nan=False))
    assert (found["format"], found["run_dir"], found["state"]) == (1, str(tmp_path / "run"), "ended")
    assert (found["starts"], found["kills"], found["lost_steps"]) == (3, 1, 1)
    assert (found["last_step"], found["next_step"], found["last_event_age"]) == (8, 9, 10)
    assert found["last_start"]["resume"]["from_step"] == 6
    on_disk = found["on_disk"]
    assert (on_disk["tracker"], on_disk["newest"]["folder"], on_disk["listed"]) == (8, "global_step_8", [])
    newest = on_disk["looked_into"][-1]
    assert (newest["state"], newest["bytes"], newest["world_size"], newest["roles"]) == (
        "committed", 1500, 1, ["actor", "critic"],
    )  # fmt: skip


def test_a_fresh_run_before_its_first_save(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", [start(0), resume(10, None), step(20, 1)])
    lines = told(status_of(run, 25))
    assert lines["last start"][1:] == ["began fresh", "fresh     actor/weights", "went on with step 1"]
    assert lines["newest"] == ["no whole step on disk"]
    assert lines["so far"] == ["1 start, no kills; world size 2"]
    assert lines["next"] == ["a start now begins with step 1"]


def test_a_start_that_is_still_loading(tmp_path: Path) -> None:
    lines = told(status_of(write_events(tmp_path / "run", [start(0)]), 5))
    assert lines["last start"][1] == "no resume recorded: it ended before, or is still loading"


def test_what_a_start_warned_of_is_told_again(tmp_path: Path) -> None:
    skipped = [{"folder": "global_step_6", "why": "incomplete: a file is missing"}]
    run = write_events(tmp_path / "run", [start(0), resume(1, 4, skipped=skipped, notes=["look out"])])
    lines = told(status_of(run))["last start"]
    assert "not taken global_step_6: incomplete: a file is missing" in lines
    assert "note      look out" in lines


def test_a_killed_run_goes_on_from_its_newest_whole_step(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", killed_run()[:11])  # up to step 5; no stop
    commit_step(run, 4)
    lines = told(status_of(run, 60 + 3600))
    assert lines["state"] == ["unknown: no stop recorded, and no event for 1 h: killed, or in a very long step"]
    assert lines["next"] == ["a start now goes on from global_step_4 with step 5"]


@pytest.mark.parametrize(
    ("took", "age", "state"),
    # quiet for 120 s, or for 10 typical steps, says nothing yet
    [(1, 119, "running"), (1, 121, "unknown"), (100, 999, "running"), (100, 1001, "unknown")],
)
def test_on_another_host_silence_is_judged_by_the_length_of_a_step(
    tmp_path: Path, took: float, age: float, state: str
) -> None:
    run = write_events(tmp_path / "run", [start(0), step(10, 1, took=took)])
    assert status_of(run, 10 + age).state == state


def test_on_this_host_the_process_itself_is_looked_for(tmp_path: Path) -> None:
    here: dict[str, Any] = {"host": socket.gethostname()}
    alive = write_events(tmp_path / "alive", [start(0, pid=os.getpid(), **here)])
    assert status_of(alive, 1e6).state == "running"
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = status_of(write_events(tmp_path / "gone", [start(0, pid=ended.pid, **here)]), 1)
    assert (gone.state, f"process {ended.pid} is not seen on this host" in gone.reason) == ("unknown", True)


@pytest.mark.parametrize(
    ("reason", "says"),
    [("error", "stopped on an error, 9.0 s ago: no GPU"), ("signal", "stopped on a signal, 9.0 s ago: no GPU")],
)
def test_a_run_that_stopped_on_something_says_on_what(tmp_path: Path, reason: str, says: str) -> None:
    run = write_events(tmp_path / "run", [start(0), event(1, "stop", reason=reason, error="no GPU")])
    status = status_of(run, 10)
    assert (status.state, status.reason) == ("ended", says)
    assert told(status)["next"] == ["a start now begins with step 1"]


def test_the_newest_step_lacks_a_file(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run / "global_step_8/critic/model.pt").unlink()
    lines = told(status_of(run))
    assert lines["newest"][0].startswith("global_step_6, committed")
    assert lines["incomplete"] == [f"global_step_8: {run}/global_step_8/critic/model.pt is missing"]
    assert lines["tracker"] == ["names step 8"]
    assert lines["next"] == ["nothing: the run is done. A longer run would go on with step 7"]


def test_the_tracker_names_a_step_that_is_not_there(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run / TRACKER).write_text("10")
    lines = told(status_of(run))
    assert lines["tracker"] == ["names step 10"]
    assert lines["note"] == [f"{run / TRACKER} names step 10, which is not there; step 8 is the newest that is whole"]


@pytest.mark.parametrize("damage", ["no step is whole", "only a tracker is left"])
def test_status_says_so_where_a_start_would_refuse(tmp_path: Path, damage: str) -> None:
    run = write_events(tmp_path / "run", [start(0), resume(1, None), step(2, 1)])
    folder = commit_step(run, 1)
    (folder / "actor/model.pt").unlink()
    if damage == "only a tracker is left":
        folder.rename(tmp_path / "elsewhere")
    else:
        (run / TRACKER).unlink()
    with pytest.raises(IncompleteError):
        choose_start(run, "auto", None, ())
    status = status_of(run)
    assert status.next_step is None
    assert told(status)["next"] == [
        "a start now refuses: bring a whole step back, or begin anew with resume_mode=disable"
    ]


def test_a_run_of_another_program_has_no_events(tmp_path: Path) -> None:
    (tmp_path / "run/global_step_3/actor").mkdir(parents=True)
    (tmp_path / "run/global_step_3/actor/weights.bin").write_bytes(b"\0" * 70)
    status = run_status(tmp_path / "run")
    assert (status.state, status.starts, status.last_start, status.last_event_age) == ("unknown", 0, None, None)
    lines = told(status)
    assert "so far" not in lines and "last start" not in lines
    assert "holds no manifest.json" in lines["incomplete"][0]
    assert status.on_disk.looked_into[0].bytes == 70


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("none", "no such directory"),
        ("file", "is a file"),
        ("empty", "holds no run"),
        ("run/global_step_8", "is one step of a run. Give the run's directory: {root}/run"),
    ],
)
def test_what_is_no_run_is_refused_with_the_remedy(tmp_path: Path, path: str, says: str) -> None:
    made_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError) as caught:
        run_status(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)
    assert says.format(root=tmp_path) in str(caught.value)


def test_of_ten_thousand_steps_only_the_newest_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5, 50_001, 5):
        (tmp_path / f"global_step_{number}").mkdir()
    commit_step(tmp_path, 49_990)
    judged: list[int] = []
    judge = steps.judge
    monkeypatch.setattr(steps, "judge", lambda path, *rest: judged.append(0) or judge(path, *rest))
    status = status_of(tmp_path)
    assert len(judged) == LOOKED_INTO + 3  # once more for the search: 50,000 and 49,995, which are empty, and 49,990
    assert status.on_disk.newest is not None and status.on_disk.newest.step == 49_990
    assert [facts.step for facts in status.on_disk.looked_into] == list(range(49_955, 50_001, 5))
    assert len(status.on_disk.listed) == 9_990
    assert told(status)["older"] == ["steps 5 to 49,950 (9,990 of them), not looked into"]
    assert max(map(len, status.lines())) < 250


def test_a_whole_step_is_found_however_many_newer_ones_are_not(tmp_path: Path) -> None:
    commit_step(tmp_path, 1)
    for number in range(2, 30):
        (tmp_path / f"global_step_{number}").mkdir()
    status = status_of(tmp_path)
    assert status.on_disk.newest is not None and status.on_disk.newest.step == 1
    assert "and 18 older ones that are not whole" in told(status)["incomplete"]
    assert status.next_step == 2


def test_no_control_character_reaches_the_terminal(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", [start(0, run_id="a\x1b[2J\nb\u202e"), event(1, "stop", reason="\x07\ud800")])
    text = "".join(status_of(run).lines())
    assert text.isprintable() and "a?[2J?b?" in text
    text.encode()


def test_status_needs_no_torch(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path\n"
        "from milepost.checkpoint.diary.status import run_status; from milepost.report import render_report\n"
        "run = Path(sys.argv[1]); run_status(run); render_report(run)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=60)


# Stops, hangs, clocks


def test_a_run_that_a_scheduler_stopped_says_what_is_saved(tmp_path: Path) -> None:
    events = survived_run()
    stop = next(index for index, line in enumerate(events) if line["event"] == "stop")
    run = write_events(tmp_path / "run", events[: stop + 1])
    commit_step(run, 7)
    lines = told(status_of(run, 149))
    assert lines["state"] == ["ended: stopped on SIGTERM, saved step 7, requeue, 10 s ago"]
    assert lines["next"] == ["a start now goes on from global_step_7 with step 8"]
    # 7 steps of 10 s in 139 s, and the 50 s by which one of them took longer.
    assert lines["goodput"] == [
        "50% of 2 min 19 s was training (stalled 50 s; starting 10 s; rest 6.6 s; saving 2.4 s)"
    ]
    assert lines["stall"] == [
        "step 4, gen: took 50 s, 2027-01-15 08:01:15 UTC",
        "stacks in stalls/0.txt and others there",
    ]


def test_of_a_hang_the_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    told_by = [event(50, "stall", step=1, phase="reward", rank=rank, limit=30.0) for rank in (0, 2, 3)]
    run = write_events(tmp_path / "run", [start(0, world_size=4), resume(1, None), *told_by])
    assert told(status_of(run, 60))["stall"] == [
        "step 1, reward: did not go on within 30 s, 2027-01-15 08:00:50 UTC",
        "rank 1 did not tell of it: stopped or gone, look there first",
    ]


def test_events_of_the_future_have_no_age(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", [start(0), resume(10, None), step(7200, 1)])
    status = status_of(run, 60)
    assert status.last_event_age == 0.0
    assert status.reason == "last event dated 1 h 59 min in the future: a clock was set back, so its age is not known"


def test_a_loop_of_ones_own_that_ends_well_is_not_told_as_killed(tmp_path: Path) -> None:
    with trained(tmp_path / "well", 1, 2).manager as manager:
        pass
    manager.close()  # once more says nothing more
    with pytest.raises(KeyError), trained(tmp_path / "badly", 1).manager:
        raise KeyError("price")
    states = {name: run_status(tmp_path / name).state for name in ("well", "badly")}
    assert states == {"well": "ended", "badly": "ended"}
    assert run_status(tmp_path / "well").reason.startswith("done")
    assert "stopped on an error" in run_status(tmp_path / "badly").reason
    stops = [line for line in read_events(tmp_path / "well" / EVENTS) if line["event"] == "stop"]
    assert [(stop["reason"], stop["step"]) for stop in stops] == [("done", 2)]
    assert "killed" not in "".join(resumed(tmp_path / "well").manager.report.notes)
