"""The agent of a machine, with workers that save for long or are only just there: no signal leaves one behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launched import alive
from lone_agent import started


def wait_for(path: Path, pattern: str) -> list[int]:
    """The numbers behind the dot of what matches, once there is any."""
    for _ in range(2000):
        if found := [int(one.suffix[1:]) for one in path.glob(pattern)]:
            return found
        time.sleep(0.05)
    pytest.fail(f"no {pattern}: {sorted(one.name for one in path.iterdir())}")


def status(process: Any) -> int:
    process.join(100)
    ended = process.exitcode
    process.kill()
    return -1 if ended is None else int(ended)


def test_a_signal_while_workers_are_being_started_leaves_none_behind(tmp_path: Path) -> None:
    """They know of no death of their parent, as milepost's own do, and a SIGTERM ends none of them."""
    assert status(started(tmp_path, nproc=2, signalled_in_start=True)) == 75
    workers = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert len(workers) == 2 and not any(alive(pid) for pid in workers)


def test_a_signal_while_workers_save_for_machines_that_came_waits_as_long_as_it_may(tmp_path: Path) -> None:
    agent = started(tmp_path, patience=2.0)
    (worker,) = wait_for(tmp_path, "worker.*")
    (tmp_path / "more-machines").touch()
    wait_for(tmp_path, "asked.*")
    os.kill(agent.pid, signal.SIGTERM)
    assert status(agent) == 75
    assert not alive(worker) and not (tmp_path / "outlived").exists()  # torch would have waited 30 seconds
    assert (tmp_path / "rounds").read_text() == "x"


def test_machines_that_come_while_workers_save_for_a_stop_start_nothing_anew(tmp_path: Path) -> None:
    agent = started(tmp_path)
    (worker,) = wait_for(tmp_path, "worker.*")
    os.kill(agent.pid, signal.SIGTERM)
    wait_for(tmp_path, "asked.*")
    (tmp_path / "more-machines").touch()
    time.sleep(1.0)  # some twenty looks of the agent
    (tmp_path / "may-end").touch()
    assert status(agent) == 0
    assert not alive(worker) and (tmp_path / "rounds").read_text() == "x"


@pytest.mark.parametrize(("restarts", "ends"), [(1, 75), (0, 3)])
def test_a_signal_while_the_others_end_after_a_death_is_a_stop_unless_the_run_had_failed(
    tmp_path: Path, restarts: int, ends: int
) -> None:
    agent = started(tmp_path, nproc=2, restarts=restarts)
    while len(workers := wait_for(tmp_path, "worker.*")) < 2:
        time.sleep(0.05)
    (tmp_path / f"die.{workers[0]}").touch()
    assert wait_for(tmp_path, "asked.*") == [workers[1]]  # by the agent, which waits for it now
    os.kill(agent.pid, signal.SIGTERM)
    (tmp_path / "may-end").touch()
    assert status(agent) == ends
    assert not any(alive(pid) for pid in workers) and (tmp_path / "rounds").read_text() == "x"
