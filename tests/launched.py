"""Runs through `milepost train`, for tests: torchrun's agent and its workers, in a group of processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.trainer import launch

LAUNCH = """
import json, sys
from milepost.errors import MilepostError
from milepost.trainer.launch import LaunchOptions, launch
try:
    sys.exit(launch(None, sys.argv[2:], LaunchOptions(**json.loads(sys.argv[1]))))
except MilepostError as error:
    sys.exit(f"launcher: {error}")
"""


def start(directory: Path, model: Path, nproc: int, *overrides: str, **options: Any) -> subprocess.Popen[str]:
    """Begin to train `model` in `directory`; `options` are more of `LaunchOptions`."""
    words = [
        f"trainer.default_local_dir={directory}",
        f"actor_rollout_ref.model.path={model}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.max_response_length=3",
    ]
    # A group of its own, so that a test that fails can end all of it.
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, json.dumps({"nproc": nproc, **options}), *words, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", launch.RUN_ID)},
        start_new_session=True,
    )


def wait_for(seen: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 100.0) -> Any:
    """Look until there is something to see."""
    deadline = time.monotonic() + seconds
    while not (value := seen()):
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            pytest.fail(process.communicate()[0])
        time.sleep(0.05)
    return value


def ended(process: subprocess.Popen[str], seconds: float = 100.0) -> tuple[int, str]:
    """Exit status and output."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(process.communicate()[0])
    return process.returncode, output


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's diary."""
    return [event for event in read_events(directory / EVENTS) if event["event"] == kind]


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
