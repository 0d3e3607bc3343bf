"""Whole runs of the real loop, for tests that compare them: what a rank does, how it ends, and what a run measured."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ranks import PRELOADED, TIMEOUT

from milepost.checkpoint.diary.events import EVENTS

_CLOCK = ("timing_s/", "perf/time", "perf/th")


def train(overrides: list[str]) -> None:
    """Train as one rank of the process group."""
    from milepost.trainer.config import load_config
    from milepost.trainer.worker import choose_device
    from milepost.trainer.worker import train as train_as_rank

    config = load_config(None, overrides)
    train_as_rank(config, choose_device(config))


def measured(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The metrics of each step of a run's diary, but for the clock's."""
    return {
        event["step"]: {name: value for name, value in event["metrics"].items() if not name.startswith(_CLOCK)}
        for event in events
        if event["event"] == "step"
    }


def stopping_reward(directory: Path, step: int) -> str:
    """A module with a reward, by which rank 1 of the run in `directory` gets a SIGTERM in the rollout after `step`."""
    return f"""
import os, pathlib, signal
SENT = []
def variety(prompt, response, ground_truth):
    told = '"event": "step", "step": {step},' in pathlib.Path({str(directory / EVENTS)!r}).read_text()
    if os.environ["RANK"] == "1" and told and not SENT:
        SENT.append(prompt)
        os.kill(os.getpid(), signal.SIGTERM)
    return len(set(response)) / 4
"""


def exit_statuses(world_size: int, overrides: list[str]) -> list[int | None]:
    """Train as a launcher has it: each rank is a process of its own from its first to its last call. How they ended."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_worker, args=(rank, world_size, store.port, overrides)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


def _worker(rank: int, world_size: int, port: int, overrides: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    import torch

    from milepost.trainer import worker

    torch.set_num_threads(1)
    status = worker.main(["--", *overrides])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as `milepost.trainer.entry` does
