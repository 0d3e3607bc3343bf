"""A run that is asked to stop, that cannot save, or that hangs: whole runs of the real loop in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import alive, ended, events_of, start, wait_for
from ranks import run_ranks
from whole_runs import exit_statuses, measured

from milepost.checkpoint.comm import SingleProcess
from milepost.checkpoint.diary.events import EVENTS, EventLog, read_events
from milepost.checkpoint.diary.status import run_status
from milepost.checkpoint.preemption import Stop
from milepost.checkpoint.steps import TRACKER
from milepost.errors import UploadError, WriteError
from milepost.trainer.base_model import build_base_model
from milepost.trainer.config import load_config
from milepost.trainer.loop import PpoTrainer
from milepost.trainer.metrics import Stopwatch
from milepost.trainer.ranks import Ranks
from milepost.trainer.schema import TaskConfig, WarmStartConfig
from milepost.trainer.stall import StallLimits, StallWatch
from milepost.trainer.worker import watch_for_stalls

QUICK = [
    "trainer.logger=[]",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "data.train_batch_size=4",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.top_k=3",  # so that responses seldom end early
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "base"
    build_base_model(directory, TaskConfig(), WarmStartConfig(hidden_size=16, intermediate_size=24, steps=0))
    return directory


def train(overrides: list[str], names: list[str], environment: dict[str, str]) -> tuple[Any, ...] | None:
    """Train as one rank of the process group; why and where it was stopped."""
    from milepost.checkpoint.preemption import StopSignals
    from milepost.trainer.config import load_config
    from milepost.trainer.worker import choose_device
    from milepost.trainer.worker import train as train_as_rank

    os.environ |= environment
    signals = StopSignals(names)
    signals.install()
    config = load_config(None, overrides)
    ending = train_as_rank(config, choose_device(config), signals)
    return None if ending is None else (ending.why.reason, ending.why.signal, ending.step, ending.saved)


def words_of(directory: Path, model: Path, steps: int, *overrides: str, reward: str = "") -> list[str]:
    """A run to `steps` as overrides. `reward` is the body of f(prompt, response, ground_truth)."""
    code = directory.parent / f"{directory.name}_reward.py"
    lines = (reward or "return len(set(response)) / 4").splitlines()
    body = "\n    ".join(lines)
    code.write_text(f"CALLS = []\ndef mine(prompt, response, ground_truth):\n    {body}\n")
    return [
        *QUICK,
        f"trainer.default_local_dir={directory}",
        f"trainer.total_training_steps={steps}",
        f"actor_rollout_ref.model.path={model}",
        f"reward.path={code}:mine",
        *overrides,
    ]


def run(
    directory: Path, model: Path, ranks: int, steps: int, *overrides: str, reward: str = "", **environment: str
) -> list[Any]:
    """Train as `words_of` says; what each rank came to."""
    words = words_of(directory, model, steps, *overrides, reward=reward)
    return run_ranks(train, ranks, words, ["SIGTERM", "SIGUSR1"], environment)


# In the midst of a rollout

IN_THE_NEXT_ROLLOUT = """
import os, pathlib, signal, threading, time
CALLS.append(prompt)
def later():
    while '"event": "step", "step": 1' not in pathlib.Path(DIARY).read_text():
        time.sleep(0.005)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
if os.environ["RANK"] == "1" and len(CALLS) == 1 and os.environ.get("STOP_ME"):
    threading.Thread(target=later).start()
with open(f"{DIARY}.{os.environ['RANK']}", "a") as file:
    file.write(prompt + "\\n")
return len(set(response)) / 4
"""


@pytest.fixture(scope="module")
def halves(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three steps at one go; and the same with a SIGTERM to rank 1 in the rollout of step 2, and gone on with."""
    root = tmp_path_factory.mktemp("halves")
    longer = "data.max_response_length=80"

    def trained(name: str, **environment: str) -> list[Any]:
        reward = IN_THE_NEXT_ROLLOUT.replace("DIARY", repr(str(root / name / EVENTS)))
        return run(root / name, model, 2, 3, longer, reward=reward, **environment)

    ends = {"straight": trained("straight"), "first": trained("parts", STOP_ME="1")}
    judged = sum(len((root / "parts" / f"{EVENTS}.{rank}").read_text().split()) for rank in range(2))
    first = run_status(root / "parts").lines()
    return {**ends, "judged": judged, "status": first, "second": trained("parts", STOP_ME=""), "root": root}


def test_all_ranks_stop_in_the_rollout_and_save_the_step_before(halves: dict[str, Any]) -> None:
    assert halves["straight"] == [None, None]
    assert halves["first"] == [("signal", "SIGTERM", 1, True)] * 2
    assert halves["judged"] == 4  # no response of step 2 has got as far as the reward
    assert any(
        line.startswith("state") and "stopped on SIGTERM, saved step 1, requeue" in line for line in (halves["status"])
    )
    assert any("a start now goes on from global_step_1 with step 2" in line for line in halves["status"])


def test_the_step_that_was_left_undone_is_done_again_bit_for_bit(halves: dict[str, Any]) -> None:
    assert halves["second"] == [None, None]
    straight, parts = (read_events(halves["root"] / name / EVENTS) for name in ("straight", "parts"))
    assert measured(straight) == measured(parts)
    assert [event["prompts"] for event in parts if event["event"] == "step"] == [[0, 4], [4, 8], [8, 12]]
    states = [
        json.loads((halves["root"] / name / "global_step_3/trainer_state.json").read_text())["parts"]
        for name in ("straight", "parts")
    ]
    assert states[0] == states[1]


# A deadline


def test_what_the_diary_says_of_durations_decides_what_fits_before_the_deadline(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    before = [
        {"time": 1.0, "event": "step", "step": 1, "seconds": 600},
        {"time": 2.0, "event": "save_durable", "step": 1, "seconds": 300.0},
    ]
    (run_dir / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in before))
    variable = "trainer.esi_deadline_env=MACHINE_GOES_AT"
    fits = run(run_dir, model, 1, 2, variable, MACHINE_GOES_AT=str(time.time() + 900 + 60 + 100))
    too_late = run(run_dir, model, 1, 4, variable, MACHINE_GOES_AT=str(time.time() + 900 + 60 - 1))
    assert fits == [None]
    assert too_late == [("deadline", None, 2, True)]
    stop = events_of(run_dir, "stop")[-1]
    assert (stop["reason"], stop["step"], stop["saved"]) == ("deadline", 2, True)


# A disk that refuses

FULL_FOR_A_WHILE = """
import os, resource, signal, threading
CALLS.append(prompt)
step = FIRST + (len(CALLS) - 1) // 2
for thread in threading.enumerate():
    if thread.name.startswith("milepost-step-"):  # what is on its way has arrived, or not
        thread.join()
if os.environ["RANK"] == "1":
    soft = 4096 if step in FULL else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
    if step == STOP and len(CALLS) % 2:
        os.kill(os.getpid(), signal.SIGTERM)
return 0.5
"""


def full(first: int, steps: tuple[int, ...], stop: int = 0) -> str:
    """A reward by which the disk of rank 1 is full from the rollouts of `steps` on until that of a step after them, and
    which has it told to stop in that of `stop`."""
    code = FULL_FOR_A_WHILE.replace("FIRST", str(first)).replace("FULL", repr(steps))
    return code.replace("STOP", str(stop))


@pytest.fixture(scope="module")
def refused(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Saved behind training's back, where the disk is full for step 2 and, once it is told to stop, for step 5; then
    with every save waited for, where it is full for step 5, and for step 7, the last one."""
    root = tmp_path_factory.mktemp("refused")
    warn = "trainer.on_save_error=warn"
    behind = ["trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=true", "trainer.logger=[console]"]
    ends = run(root / "run", model, 2, 9, warn, *behind, reward=full(1, (2, 6), stop=6))
    status = run_status(root / "run").lines()
    before = len(read_events(root / "run" / EVENTS))
    with pytest.raises(AssertionError) as raised:
        run(root / "run", model, 2, 7, warn, "trainer.save_freq=1", reward=full(5, (5, 7)))
    events = read_events(root / "run" / EVENTS)
    return {"run": root / "run", "ends": ends, "status": status, "first": events[:before], "second": events[before:],
            "error": str(raised.value)}  # fmt: skip


def saves(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(e["event"].removeprefix("save_"), e["step"]) for e in events if e["event"] in SAVES]


SAVES = ("step", "save_durable", "save_failed")


def test_a_step_takes_the_place_of_one_that_failed_behind_trainings_back(refused: dict[str, Any]) -> None:
    told = saves(refused["first"])
    assert told.index(("failed", 2)) < told.index(("step", 3))
    # Heard of after step 3, which no plan of saves would have had saved.
    assert [step for what, step in told if what == "durable"] == [3, 4]
    assert [step for what, step in told if what == "step"] == [1, 2, 3, 4, 5]
    errors = [event["error"] for event in refused["first"] if event["event"] == "save_failed"]
    assert all("rank 1" in error and "ulimit -f" in error for error in errors)


def test_a_stop_whose_save_fails_is_a_stop_and_says_so(refused: dict[str, Any]) -> None:
    assert refused["ends"] == [("signal", "SIGTERM", 5, False)] * 2
    assert saves(refused["first"])[-1] == ("failed", 5)
    (stop,) = [event for event in refused["first"] if event["event"] == "stop"]
    assert (stop["reason"], stop["step"], stop["saved"]) == ("signal", 5, False)
    assert any("a start now goes on from global_step_4 with step 5" in line for line in refused["status"])


def test_training_goes_on_after_a_save_that_failed_and_saves_the_next_step(refused: dict[str, Any]) -> None:
    assert saves(refused["second"]) == [
        *(("step", 5), ("failed", 5)),
        *(("step", 6), ("durable", 6)),
        *(("step", 7), ("failed", 7)),
    ]


def test_a_run_whose_last_step_cannot_be_saved_ends_with_an_error(refused: dict[str, Any]) -> None:
    assert "WriteError: step 7 was not saved: rank 1: " in refused["error"] and "ulimit -f" in refused["error"]
    assert "step 7 is the last one, and without it the run is not done" in refused["error"]
    assert WriteError.exit_status == 2
    stop = refused["second"][-1]
    assert (stop["event"], stop["reason"]) == ("stop", "error") and "step 7 is the last one" in stop["error"]
    assert run_status(refused["run"]).on_disk.newest.step == 6  # type: ignore[union-attr]


# A bucket that cannot be reached

OUT_OF_REACH = """
import json, pathlib, time
there, away, diary = (pathlib.Path(path) for path in PATHS)
def wait_for(event, step):
    for _ in range(1200):
        events = [json.loads(line) for line in diary.read_text().splitlines()]
        if any((e["event"], e.get("step")) == (event, step) for e in events):
            return
        time.sleep(0.05)
    raise RuntimeError(f"no {event} of step {step}")
CALLS.append(prompt)
if len(CALLS) == 5:  # the first of step 2
    wait_for("upload_durable", 1)
    there.rename(away)
    there.touch()
if len(CALLS) == 9:
    wait_for("upload_failed", 2)
if len(CALLS) == 13:
    wait_for("upload_failed", 3)
    if COMES_BACK:
        there.unlink()
        away.rename(there)
return 0.5
"""


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_upload_that_fails_ends_no_run_before_its_end(model: Path, tmp_path: Path, comes_back: bool) -> None:
    """Whatever on_save_error says: it is a save that this means. At the end both are told of it."""
    there, away, directory = tmp_path / "there", tmp_path / "away", tmp_path / "run"
    paths = repr([str(path) for path in (there, away, directory / EVENTS)])
    reward = OUT_OF_REACH.replace("PATHS", paths).replace("COMES_BACK", str(comes_back))
    on_error = "raise" if comes_back else "warn"
    settings = ["trainer.save_freq=1", f"trainer.remote_dir=file://{there}", f"trainer.on_save_error={on_error}"]
    if comes_back:
        assert run(directory, model, 1, 4, *settings, reward=reward) == [None]
        assert sorted(path.name for path in there.glob("global_step_*")) == [f"global_step_{n}" for n in (1, 2, 3, 4)]
    else:
        with pytest.raises(Exception, match=r"UploadError: step \d is durable in .* not uploaded"):
            run(directory, model, 1, 4, *settings, reward=reward)
    assert [event["step"] for event in events_of(directory, "step")] == [1, 2, 3, 4]
    assert [event["step"] for event in events_of(directory, "save_durable")] == [1, 2, 3, 4]
    (stop,) = events_of(directory, "stop")
    assert (stop["reason"], stop["step"], "not_uploaded" in stop) == ("done", 4, not comes_back)


def test_a_stop_after_an_upload_that_failed_has_saved(capfd: pytest.CaptureFixture[str]) -> None:
    def save(step: int, metrics: dict[str, float]) -> None:
        raise UploadError(f"step {step} is durable, but was not uploaded")

    trainer: Any = SimpleNamespace(
        _undo=None, _finished=2, _metrics={}, _measured=lambda step, metrics: metrics, _hear=lambda watch: None,
        _log_saved=lambda loggers, stalls: None, manager=SimpleNamespace(save=save), ranks=SimpleNamespace(rank=0),
    )  # fmt: skip
    stalls = StallWatch(None, Path(), EventLog(Path()))
    assert PpoTrainer._stop(trainer, Stop("signal"), 1, [], stalls).saved
    assert "could not be saved" not in capfd.readouterr().err


SIGNALLED_IN_THE_LAST_UPLOAD = """
import os, pathlib, signal, sys, threading, time
from milepost.checkpoint.remote.folder import Remote
from milepost.errors import OutageError
pid = pathlib.Path(DIARY).with_name("pid")
def is_closing():
    frame, names = sys._current_frames()[threading.main_thread().ident], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "_close" in names
def answers_late(*_):
    if pid.exists():
        while not is_closing():
            time.sleep(0.01)
        number = int(pid.read_text())
        pid.unlink()
        os.kill(number, signal.SIGNAL)
    for _ in range(1200):
        if '"event": "stop"' in pathlib.Path(DIARY).read_text():
            break
        time.sleep(0.05)
    raise OutageError("the connection was cut")
if os.environ["RANK"] == "0":
    Remote.put = answers_late
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    pid.write_text(str(os.getpid()))
return 0.5
"""


@pytest.mark.parametrize(("name", "ranks", "status"), [("SIGTERM", 2, 75), ("SIGINT", 1, 130)])
def test_a_signal_while_the_last_step_is_uploaded_is_a_stop(
    model: Path, tmp_path: Path, name: str, ranks: int, status: int
) -> None:
    """To a rank that uploads nothing; and a Ctrl-C, which unwinds."""
    pytest.importorskip("fsspec")
    reward = SIGNALLED_IN_THE_LAST_UPLOAD.replace("DIARY", repr(str(tmp_path / "run" / EVENTS)))
    settings = [f"trainer.remote_dir=file://{tmp_path}/there", "trainer.shutdown_timeout=10"]
    words = words_of(tmp_path / "run", model, 1, *settings, reward=reward.replace("SIGNAL", name))
    assert exit_statuses(ranks, words) == [status] * ranks
    assert [event["step"] for event in events_of(tmp_path / "run", "save_durable")] == [1]
    (stop,) = events_of(tmp_path / "run", "stop")
    assert stop["reason"] == "signal"
    if name == "SIGTERM":
        assert (stop["signal"], stop["step"], stop["saved"]) == (name, 1, True)
        assert "step 1 is durable in" in stop["not_uploaded"]


def test_a_step_that_made_up_for_a_failed_save_has_though_an_upload_failed() -> None:
    """Else every step would be saved until the network is back."""
    ends: list[Exception | None] = [WriteError("the disk is full"), UploadError("step 2 was not uploaded"), None]
    trainer: Any = PpoTrainer.__new__(PpoTrainer)
    trainer.config = load_config(None, ["trainer.on_save_error=warn"])
    trainer.ranks = Ranks(torch.device("cpu"), SingleProcess())
    trainer._held_out, trainer._save_is_due, trainer._failed_saves, trainer._saved = (0, {}), False, 0, []

    def save(*_: object, **__: object) -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    trainer.manager = SimpleNamespace(save=save, poll=lambda: ())
    due = []
    for step in (1, 2):
        trainer._record(step, {}, Stopwatch(), wanted=True, last=False)
        due.append(trainer._save_is_due)
    assert due == [True, False]


# A phase that hangs

SLOW_ONCE = """
import os, pathlib, time
from milepost.checkpoint.diary.events import read_events
def wait_for(*told):
    for _ in range(4000):
        stalls = [e for e in read_events(pathlib.Path(DIARY)) if e["event"] == "stall"]
        if {(e["rank"], e["step"], e["phase"]) for e in stalls} >= set(told):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nobody told of {told}")
if not CALLS and os.environ["RANK"] == "0":
    from torch.utils.tensorboard import SummaryWriter
    flush = SummaryWriter.flush
    def a_server_that_hangs(self):
        if '"step": 2,' in pathlib.Path(DIARY).read_text() and not CALLS[4:]:
            wait_for((0, 2, "logging"), (1, 3, "agreeing"))
        flush(self)
    SummaryWriter.flush = a_server_that_hangs
CALLS.append(prompt)
if os.environ["RANK"] == "1" and len(CALLS) == 5:
    wait_for((0, 3, "reward"), (1, 3, "reward"))
return 0.5
"""


@pytest.fixture(scope="module")
def hung(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A logger hangs after step 2, a reward in step 3, and the resume of the next session: the tracker, a small file
    that is read at a start, is one that nobody answers for."""
    root = tmp_path_factory.mktemp("hung")
    limits = ["trainer.stall_floor=0.7", "trainer.stall_factor=2", "trainer.logger=[tensorboard]"]
    reward = SLOW_ONCE.replace("DIARY", repr(str(root / "run" / EVENTS)))
    first = run(root / "run", model, 2, 3, *limits, reward=reward)
    lines = run_status(root / "run").lines()
    tracker = root / "run" / TRACKER
    tracker.unlink()
    os.mkfifo(tracker)
    answering = Thread(target=answer_once_told, args=(tracker, root / "run"))
    answering.start()
    second = run(root / "run", model, 2, 4, "trainer.stall_once=0.7", "trainer.stall_floor=60")
    answering.join()
    told = {(event["rank"], event["step"], event["phase"]): event for event in events_of(root / "run", "stall")}
    return {"run": root / "run", "ends": first + second, "told": told, "lines": lines}


def answer_once_told(tracker: Path, run_dir: Path) -> None:
    """Be the file system that answers at last."""
    for _ in range(4000):
        told = {event["rank"] for event in events_of(run_dir, "stall") if event["phase"] == "resume"}
        if told == {0, 1}:
            break
        time.sleep(0.05)
    with tracker.open("w") as pipe:
        tracker.unlink()  # who asks again finds a file
        tracker.write_text("3")
        pipe.write("3")


def stacks(hung: dict[str, Any], rank: int, step: int, phase: str) -> str:
    """What a rank wrote of a phase in which it was held up."""
    event = hung["told"][rank, step, phase]
    assert event["host"] == socket.gethostname()
    assert event["stacks"] == f"stalls/step_{step}_{phase}_rank_{rank}.txt"
    written = (hung["run"] / event["stacks"]).read_text()
    assert written.startswith(f"rank {rank} of 2 on {event['host']}, process {event['pid']}: ")
    return written


def test_a_phase_that_hangs_is_told_of_by_all_whom_it_holds_up(hung: dict[str, Any]) -> None:
    assert hung["ends"] == [None] * 4
    assert "all_gather" in stacks(hung, 0, 3, "reward") and "_reward.py" in stacks(hung, 1, 3, "reward")
    over = [event for event in events_of(hung["run"], "stall_over") if event["step"] == 3]
    assert {event["rank"] for event in over if event["phase"] == "reward"} == {0, 1}
    assert any(line.startswith("stall") and "step 3, reward: took" in line for line in hung["lines"])
    assert any(line.startswith("goodput") and "stalled" in line for line in hung["lines"])


def test_a_logger_that_hangs_is_told_of_by_its_rank_and_by_those_who_wait_for_it(hung: dict[str, Any]) -> None:
    assert "a_server_that_hangs" in stacks(hung, 0, 2, "logging")
    assert "all_reduce" in stacks(hung, 1, 3, "agreeing")


def test_a_resume_that_hangs_is_told_of_with_the_file_that_it_hangs_on(hung: dict[str, Any]) -> None:
    reader = stacks(hung, 0, 0, "resume")
    assert "before its first step, resume for" in reader and "read_tracker" in reader
    assert "all_gather" in stacks(hung, 1, 0, "resume")
    (resumed,) = [event for event in events_of(hung["run"], "resume") if event["from_step"] == 3]
    assert resumed["next_step"] == 4


def test_what_comes_once_a_start_has_a_limit_of_its_own_and_the_rest_its_history() -> None:
    limits = StallLimits(factor=10, floor=600, once=3600)
    assert limits.of("resume", 0) == limits.of("start", 9000) == limits.of("end", 1) == limits.of("models", 0) == 3600
    assert [limits.of("gen", known) for known in (0, 1, 60, 61)] == [1800, 600, 600, 610]


def test_a_save_that_waits_for_the_disk_may_take_as_long_as_saves_may_whatever_others_took() -> None:
    """In the background they take seconds of training's time, the last one and that of a stop all that it takes."""
    config = load_config(None, ["trainer.save_timeout=1000"])
    with closing(watch_for_stalls(config, Ranks(torch.device("cpu"), SingleProcess()))) as watch:
        limits = watch._limits
    assert limits is not None
    # The one before, itself, and the floor of 600.
    assert [limits.of("save_checkpoint", known) for known in (0, 3, 300)] == [2600, 2600, 3000]
    assert limits.of("poll_saves", 3) == 600


def test_a_phase_that_ends_while_it_is_told_of_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telling, over = Event(), Event()
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)

    class SlowDisk(EventLog):
        def write(self, event: str, **fields: Any) -> None:
            if event == "stall":
                telling.set()
                assert over.wait(30)
            super().write(event, **fields)

    limits = StallLimits(factor=2, floor=0.01, once=60, restart=True)
    with closing(StallWatch(limits, tmp_path / "stalls", SlowDisk(tmp_path / EVENTS))) as watch:
        watch.step = 7
        with watch.phase("gen"):
            assert telling.wait(30)
        watch.step = 8
        over.set()
    told = [(event["event"], event["step"], event["phase"]) for event in read_events(tmp_path / EVENTS)]
    assert told == [("stall", 7, "gen"), ("stall_over", 7, "gen")]
    assert exits == []


NO_MORE_NETWORK = """
import os, pathlib, signal
from milepost.checkpoint.remote.folder import Remote
from milepost.errors import OutageError
def cut(*_):
    raise OutageError("the connection was cut")
if '"event": "step", "step": 1' in pathlib.Path(DIARY).read_text() and Remote.put is not cut:
    Remote.put = cut
    os.kill(os.getpid(), signal.SIGTERM)
return len(set(response)) / 4
"""


def test_a_stop_without_the_network_is_a_stop(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("tenacity")
    reward = NO_MORE_NETWORK.replace("DIARY", repr(str(tmp_path / "run" / EVENTS)))
    there = f"trainer.remote_dir=file://{tmp_path}/there"
    ends = run(tmp_path / "run", model, 1, 9, there, reward=reward)
    ((reason, name, step, saved),) = ends
    assert (reason, name, saved) == ("signal", "SIGTERM", True)
    (stop,) = events_of(tmp_path / "run", "stop")
    assert stop["saved"] and f"step {step} is durable in" in stop["not_uploaded"]
    assert "the connection was cut" in stop["not_uploaded"]


# Through the launcher

HANGS_ONCE = """
import os, pathlib, time
def mine(prompt, response, ground_truth):
    first = pathlib.Path(__file__).with_name("hung")
    diary = pathlib.Path(__file__).with_name("run") / "events.jsonl"
    if os.environ["RANK"] == "1" and not first.exists() and '"event": "step", "step": 2' in diary.read_text():
        first.touch()
        time.sleep(10_000)
    return 0.5
"""


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two workers; one hangs in step 3, which has them started again; then a scheduler that cannot wait."""
    root = tmp_path_factory.mktemp("stopped")
    (root / "reward.py").write_text(HANGS_ONCE)
    process = start(
        root / "run",
        model,
        2,
        f"reward.path={root / 'reward.py'}:mine",
        "trainer.total_training_steps=100000",
        "trainer.save_freq=2",
        "trainer.stall_action=restart",
        "trainer.stall_floor=8",  # below which a busy box may be slow
        "trainer.stall_factor=2",
    )
    wait_for(lambda: [event for event in events_of(root / "run", "step") if event["step"] == 7], process, 300)
    # To one worker first, then to everybody and again and again, while they save.
    os.kill(events_of(root / "run", "start")[-1]["pid"], signal.SIGUSR1)
    while process.poll() is None:
        time.sleep(0.02)
        try:
            os.killpg(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            break
    status, output = ended(process, 300)
    return {"run": root / "run", "status": status, "output": output}


def test_a_hang_has_all_workers_started_again(stopped: dict[str, Any]) -> None:
    run_dir = stopped["run"]
    events = read_events(run_dir / EVENTS)
    told = [
        number
        for number, event in enumerate(events)
        if event["event"] == "stall" and (event["step"], event["phase"]) == (3, "reward")
    ]
    assert told, stopped["output"]  # by the rank whose limit is over first: it ends, and that ends the other
    assert " of 2 on " in stopped["output"] and "step 3: reward goes on for" in stopped["output"]
    after = [event["event"] for event in events[told[-1] :]]
    assert after.count("start") == 1
    assert [event["from_step"] for event in events[told[-1] :] if event["event"] == "resume"] == [2]


def test_a_run_that_a_scheduler_stops_saves_and_asks_to_be_started_again(stopped: dict[str, Any]) -> None:
    run_dir = stopped["run"]
    assert stopped["status"] == 75, stopped["output"]
    stops = events_of(run_dir, "stop")
    assert [(event["reason"], event["saved"]) for event in stops] == [("signal", True)]
    assert stops[0]["step"] >= 7
    assert events_of(run_dir, "save_durable")[-1]["step"] == stops[0]["step"]
    last = events_of(run_dir, "step")[-1]["step"]
    assert last == stops[0]["step"]  # nothing that was finished is lost
    assert f"stopped on {stops[0]['signal']}, step {last} is saved" in stopped["output"]
    assert "Traceback" not in stopped["output"]
    assert not list(run_dir.glob(".global_step_*"))
    assert not any(alive(event["pid"]) for event in events_of(run_dir, "start"))


def test_a_signal_to_the_agent_alone_reaches_its_workers(model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, model, 1, "trainer.total_training_steps=100000", "trainer.save_freq=-1")
    wait_for(lambda: events_of(tmp_path, "step"), process)
    process.send_signal(signal.SIGTERM)
    status, output = ended(process)
    assert status == 75, output
    (stop,) = events_of(tmp_path, "stop")
    assert (stop["signal"], stop["saved"]) == ("SIGTERM", True)
    assert events_of(tmp_path, "save_durable")[-1]["step"] == stop["step"] == events_of(tmp_path, "step")[-1]["step"]
    assert sys.platform == "linux" and not alive(events_of(tmp_path, "start")[0]["pid"])
