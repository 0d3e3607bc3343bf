"""From a call to torchrun's agent and its workers: options, errors, and what becomes of a run whose processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launched import alive, ended, events_of, start, wait_for

from milepost.errors import CallError, ConfigError, NotFoundError, WriteError
from milepost.trainer import launch
from milepost.trainer.base_model import build_base_model
from milepost.trainer.config import load_config
from milepost.trainer.launch import LaunchOptions, check, command, environment
from milepost.trainer.schema import TaskConfig, WarmStartConfig

# The command line


def test_one_machine_needs_no_rendezvous() -> None:
    config = load_config(None, ["trainer.n_gpus_per_node=2"])
    words = command(config, Path("my.yaml"), ["a=1", "-x"], LaunchOptions())
    assert words == [
        *(sys.executable, "-m", "milepost.trainer.agent", "--standalone"),
        *("--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2"),
        *("-m", "milepost.trainer.entry", "--config", "my.yaml", "--", "a=1", "-x"),
    ]


def test_several_machines_meet_at_an_endpoint() -> None:
    options = LaunchOptions(nnodes="1:2", rdzv_endpoint="node0:29500", rdzv_id="job7", max_restarts=9)
    words = command(load_config(None, []), None, [], options)
    assert "--standalone" not in words
    assert {
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29500",
        "--rdzv-id=job7",
        "--max-restarts=9",
    } <= set(words)
    with pytest.raises(CallError, match="--nnodes 2 needs --rdzv-endpoint HOST:PORT"):
        command(load_config(None, ["trainer.nnodes=2"]), None, [], LaunchOptions())


def test_workers_share_the_cores_and_a_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    config = load_config(None, ["trainer.n_gpus_per_node=3"])
    made = environment({"PATH": "/bin"}, config, LaunchOptions())
    assert made["OMP_NUM_THREADS"] == "2" and made["OMP_WAIT_POLICY"] == "PASSIVE" and made["PATH"] == "/bin"
    assert made["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert (made[launch.STOP_SIGNALS_VARIABLE], made[launch.SHUTDOWN_TIMEOUT]) == ("SIGTERM,SIGUSR1", "600")
    assert len(made[launch.RUN_ID]) == 32
    assert environment({"OMP_NUM_THREADS": "5"}, config, LaunchOptions())["OMP_NUM_THREADS"] == "5"
    assert environment({}, config, LaunchOptions(rdzv_id="job7"))[launch.RUN_ID] == "job7"


def test_nproc_is_part_of_the_config_that_workers_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(launch, "become", lambda words, env: became.append(list(words)) or sys.exit(0))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        launch.launch(None, [f"trainer.default_local_dir={tmp_path}"], LaunchOptions(nproc=2))
    assert became[0][-2:] == [f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=2"]
    assert "--nproc-per-node=2" in became[0]


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["trainer.sede=1"], ConfigError, "trainer.seed"),
        (["actor_rollout_ref.model.path=/nowhere"], NotFoundError, "actor_rollout_ref.model.path=/nowhere"),
        (["data.train_files=[/nowhere.jsonl]"], NotFoundError, "data.train_files: /nowhere.jsonl"),
        (["reward.path=/nowhere.py:mine"], NotFoundError, "reward.path=/nowhere.py:mine: no such file"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere"],
            NotFoundError,
            "trainer.resume_from_path=/nowhere",
        ),
    ],
)
def test_what_can_be_known_before_is_refused_before(overrides: list[str], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        check(load_config(None, overrides))
    assert said in str(caught.value)


def test_a_step_may_be_named_by_its_url() -> None:
    named = "trainer.resume_from_path=s3://bucket/run/global_step_3"
    check(load_config(None, ["trainer.resume_mode=resume_path", named]))


def test_a_run_folder_that_cannot_be_made_is_refused_before_anything_starts() -> None:
    with pytest.raises(WriteError, match=r"trainer\.default_local_dir=/proc/nowhere cannot be made"):
        launch.launch(None, ["trainer.default_local_dir=/proc/nowhere"], LaunchOptions())


def test_the_launcher_imports_no_torch() -> None:
    code = "import sys, milepost.trainer.launch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "base"
    build_base_model(directory, TaskConfig(), WarmStartConfig(hidden_size=16, intermediate_size=24, steps=0))
    return directory


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two workers, told to begin anew; rank 0 is killed after step 5, of which 4 are saved."""
    directory = tmp_path_factory.mktemp("killed")
    process = start(
        directory,
        model,
        2,
        "trainer.total_training_steps=8",
        "trainer.save_freq=2",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,tensorboard]",
    )
    wait_for(lambda: [e for e in events_of(directory, "step") if e["step"] == 5], process)
    os.kill(events_of(directory, "start")[0]["pid"], signal.SIGKILL)
    status, output = ended(process)
    return {"directory": directory, "status": status, "output": output}


def test_training_goes_on_by_itself_after_a_worker_is_killed(killed: dict[str, Any]) -> None:
    directory = killed["directory"]
    assert killed["status"] == 0, killed["output"]
    starts = events_of(directory, "start")
    assert [event["attempt"] for event in starts] == [0, 1]
    assert starts[0]["run_id"] == starts[1]["run_id"] and starts[0]["pid"] != starts[1]["pid"]
    (kill,) = events_of(directory, "kill_seen")
    first, second = events_of(directory, "resume")
    assert first["from_step"] is None
    # The kill may fall into step 6 or its save; what is durable then is what training goes on from.
    assert second["from_step"] == kill["committed_step"] in (4, 6) and kill["last_step"] in (5, 6)
    steps = [event["step"] for event in events_of(directory, "step")]
    assert steps == [*range(1, kill["last_step"] + 1), *range(kill["committed_step"] + 1, 9)]
    assert events_of(directory, "save_durable")[-1]["step"] == 8
    assert events_of(directory, "stop")[-1]["reason"] == "done"


def test_a_killed_worker_is_told_of_in_lines_not_in_tracebacks(killed: dict[str, Any]) -> None:
    assert "Traceback" not in killed["output"]
    assert "another rank is gone" in killed["output"]
    assert "fresh start in" in killed["output"] and "resumed from" in killed["output"]
    assert "step 8/8" in killed["output"]


def test_the_curves_of_both_sessions_are_one(killed: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(killed["directory"] / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("critic/score/mean")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {"timing_s/save_checkpoint", "actor/pg_loss", "perf/throughput"} <= set(curves.Tags()["scalars"])
    restarts = [point.value for point in curves.Scalars("milepost/restarts")]
    resumed = events_of(killed["directory"], "resume")[1]["from_step"]
    assert restarts == [0.0] * resumed + [1.0] * (8 - resumed)
    saved = {point.step: point.value for point in curves.Scalars("milepost/saved_bytes")}
    # A step that was saved when its rank 0 was killed may be in the diary only.
    told = {event["step"]: event["bytes"] for event in events_of(killed["directory"], "save_durable")}
    assert saved.items() <= told.items() and max(saved) == 8


def test_an_error_that_no_restart_mends_ends_the_run_at_once_with_its_status(
    killed: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    process = start(tmp_path, model, 1, "trainer.total_training_steps=9")
    status, output = ended(process)
    assert status == 1, output  # a verdict on the checkpoint
    said = [line for line in output.splitlines() if "milepost:" in line]
    assert len(said) == 1 and "names step 7" in said[0]
    assert "Traceback" not in output
    assert len(events_of(tmp_path, "start")) == 1


def test_an_error_of_ones_own_reward_on_one_rank_ends_all(model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import os\ndef mine(prompt, response, ground_truth):\n"
        "    if os.environ['RANK'] == '1': raise KeyError('price')\n    return 1.0\n"
    )
    process = start(tmp_path / "run", model, 2, f"reward.path={tmp_path / 'reward.py'}:mine")
    status, output = ended(process)
    assert status == 2, output
    said = [line for line in output.splitlines() if "milepost:" in line]
    assert len(said) == 1 and "rank 1" in said[0] and "price" in said[0]
    assert events_of(tmp_path / "run", "stop")[0]["reason"] == "error"


def test_no_worker_outlives_its_agent(model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, model, 1, "trainer.total_training_steps=100000", "trainer.save_freq=-1")
    wait_for(lambda: events_of(tmp_path, "step"), process)
    worker = events_of(tmp_path, "start")[0]["pid"]
    assert alive(worker)
    process.kill()  # it has become the agent
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)
    process.communicate(timeout=10)


def test_a_run_that_somebody_interrupts_says_so(model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, model, 1, "trainer.total_training_steps=100000", "trainer.save_freq=2")
    wait_for(lambda: events_of(tmp_path, "save_durable"), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C reaches all processes
    code, output = ended(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert [event["reason"] for event in events_of(tmp_path, "stop")] == ["signal"]
    assert not alive(events_of(tmp_path, "start")[0]["pid"])
    assert not list(tmp_path.glob(".global_step_*.tmp"))
