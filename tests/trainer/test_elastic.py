"""Two machines on one: each has an agent of its own, and one of them is killed and comes back."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launched import alive, ended, events_of, start, wait_for

from milepost.checkpoint.diary.history import read_history
from milepost.trainer.base_model import build_base_model
from milepost.trainer.schema import TaskConfig, WarmStartConfig

PROMPTS = 20
REWARD = """
import os, time
def seen(prompt, response, ground_truth, **extra):
    with open(os.path.join({folder!r}, str(os.getpid())), "a") as file:
        file.write(prompt + "\\n")
    time.sleep(0.02)
    return 0.5
"""


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One machine and another; the agent of the other is killed with -9, and comes back; a scheduler stops one."""
    root = tmp_path_factory.mktemp("elastic")
    (root / "seen").mkdir()
    model = root / "base"
    build_base_model(model, TaskConfig(), WarmStartConfig(hidden_size=16, intermediate_size=24, steps=0))
    prompts = [{"prompt": f"{number:02d}+1=", "ground_truth": str(number + 1)} for number in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "reward.py").write_text(REWARD.format(folder=str(root / "seen")))
    words = [
        f"data.train_files=[{root / 'prompts.jsonl'}]",
        f"reward.path={root / 'reward.py'}:seen",
        "trainer.save_freq=4",
        "trainer.logger=[console]",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = root / "run"

    def machine() -> subprocess.Popen[str]:
        return start(
            run,
            model,
            1,
            *words,
            "trainer.total_training_steps=100000",
            nnodes="1:2",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_id="elastic",
            rdzv_conf="join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
            max_restarts=8,
        )

    def trains_on(size: int) -> bool:
        """Whether the newest start is of so many ranks, and has trained two steps."""
        last = read_history(run).sessions[-1:]
        return bool(last) and last[0].world_size == size and (last[0].last_step or 0) > (last[0].first_step or 0)

    first = machine()  # it holds the store at which they meet
    while True:
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    second = machine()
    wait_for(lambda: trains_on(2), first)
    workers = children(second.pid)
    second.kill()
    wait_for(lambda: not any(alive(pid) for pid in workers), first, 20)
    second.communicate(timeout=20)
    wait_for(lambda: trains_on(1), first)
    third = machine()
    wait_for(lambda: trains_on(2), first)
    third.send_signal(signal.SIGTERM)
    stops = {"first": ended(first), "third": ended(third)}
    steps = read_history(run).kept_steps[-1].step
    seen = [line for path in (root / "seen").iterdir() for line in path.read_text().split()]
    return {"run": run, "workers": workers, "stops": stops, "steps": steps, "seen": Counter(seen)}


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[1]) == pid:
                found.append(int(folder.name))
    return found


def test_a_run_shrinks_grows_and_stops(elastic: dict[str, Any]) -> None:
    sessions = read_history(elastic["run"]).sessions
    sizes = [session.world_size for session in sessions]
    changes = [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]
    assert changes[-3:] == [2, 1, 2] and set(changes) == {1, 2}, elastic["stops"]
    assert [session.end for session in sessions[-3:]] == ["killed", "resize", "signal"]
    assert sessions[-1].last_step == sessions[-1].stopped_at == elastic["steps"] and sessions[-1].saved


def test_the_workers_of_a_killed_agent_do_not_train_on(elastic: dict[str, Any]) -> None:
    assert elastic["workers"] and not any(alive(pid) for pid in elastic["workers"])


def test_a_machine_that_comes_costs_no_step(elastic: dict[str, Any]) -> None:
    grown = next(session for session in read_history(elastic["run"]).sessions if session.end == "resize")
    stop = next(event for event in events_of(elastic["run"], "stop") if event["reason"] == "resize")
    assert stop["saved"] and stop["step"] == grown.last_step
    assert events_of(elastic["run"], "resume")[grown.index + 1]["from_step"] == stop["step"]


def test_a_signal_to_one_machine_stops_both_with_the_status_that_asks_for_more(elastic: dict[str, Any]) -> None:
    for status, output in elastic["stops"].values():
        assert status == 75, output
        assert "Traceback" not in output


def test_every_prompt_counts_once_an_epoch_through_all_of_it(elastic: dict[str, Any]) -> None:
    history = read_history(elastic["run"])
    # Of a step that was done again, the later one counts.
    taken = {event["step"]: event["prompts"] for event in events_of(elastic["run"], "step")}
    assert [taken[record.step] for record in history.kept_steps] == [
        [6 * number, 6 * number + 6] for number in range(elastic["steps"])
    ]
    whole_epochs = 6 * elastic["steps"] // PROMPTS
    lost = 6 * (len(history.lost_steps) + len(history.kills))  # the step in which a machine died was judged too
    assert min(elastic["seen"].values()) >= whole_epochs and len(elastic["seen"]) == PROMPTS
    assert 6 * elastic["steps"] <= sum(elastic["seen"].values()) <= 6 * (elastic["steps"] + 2) + lost
