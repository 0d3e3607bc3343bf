"""Asked to stop, all ranks stop at the same place: real signals to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import alive
from ranks import run_ranks

from milepost.checkpoint.preemption import (
    FAILED,
    RESIZE,
    Durations,
    Preemption,
    Stop,
    StopSignals,
    Terminated,
    deadline_of,
)
from milepost.errors import CallError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What the tests install here is taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def alone(signals: StopSignals, **settings: Any) -> Preemption:
    return Preemption(signals, list, **settings)


# One process


def test_a_signal_is_noted_and_told_at_the_next_poll() -> None:
    signals = StopSignals(["SIGTERM", "SIGUSR1"])
    signals.install()
    preemption = alone(signals)
    preemption.poll()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
    for _ in range(2):
        with pytest.raises(Stop) as stop:
            preemption.poll()
        assert (stop.value.reason, stop.value.signal, stop.value.words) == ("signal", "SIGUSR1", "SIGUSR1")


def test_a_signal_that_is_not_asked_for_ends_the_process_as_ever() -> None:
    StopSignals(["SIGUSR1"]).install()
    with pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_agents_own_sigterm_is_no_schedulers(tmp_path: Path) -> None:
    closing = tmp_path / "closing"
    signals = StopSignals(["SIGTERM"], closing)
    signals.install()
    closing.write_text(RESIZE)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.noted is None and signals.await_resize(0)
    with pytest.raises(Stop) as stop:
        alone(signals).poll()
    assert stop.value.reason == "resize"
    closing.write_text(FAILED)
    with pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # while the first one unwinds


def test_a_machine_that_is_told_of_no_change_says_so(tmp_path: Path) -> None:
    assert not StopSignals(["SIGTERM"], tmp_path / "closing").await_resize(0.1)


@pytest.mark.parametrize(("needed", "stops"), [(60.0, False), (80.0, True)])
def test_what_does_not_fit_before_the_deadline_is_not_begun(needed: float, stops: bool) -> None:
    preemption = alone(StopSignals(()), deadline=time.time() + 100, margin=30)
    if not stops:
        return preemption.poll(needed)
    with pytest.raises(Stop) as stop:
        preemption.poll(needed)
    assert stop.value.reason == "deadline"
    with pytest.raises(Stop):
        preemption.turn()  # the same need, in the midst of it
    return None


def test_what_is_needed_is_the_longest_of_late() -> None:
    durations = Durations({"step": [9.0, 1.0], "save": [2.0]})
    assert durations.longest("step", "save", "never seen") == 11.0
    for _ in range(20):
        durations.add("step", 3.0)
    assert durations.longest("step") == 3.0


def test_the_deadline_is_read_from_the_environment() -> None:
    assert deadline_of("ENDS", {"ENDS": "1796099644.5"}) == 1796099644.5
    assert deadline_of("ENDS", {}) is deadline_of("ENDS", {"ENDS": ""}) is deadline_of(None, {"ENDS": "1"}) is None
    with pytest.raises(CallError, match=r"trainer\.esi_deadline_env: \$ENDS is 'noon', not unix seconds"):
        deadline_of("ENDS", {"ENDS": "noon"})


ORPHAN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
from milepost.checkpoint.preemption import Preemption, StopSignals
preemption = Preemption(StopSignals(()), list)
print("ready", flush=True)
while True:
    preemption.turn()
    time.sleep(0.01)
'''])
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_process_whose_parent_is_gone_ends_at_its_next_poll() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip(), parent.stdout.readline().strip()]
    assert "ready" in lines
    orphan = int(next(line for line in lines if line != "ready"))
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while alive(orphan) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(orphan)


# Several


def as_rank() -> dict[str, Any]:
    """Rank 1 is signalled between two polls, and later in a loop that turns at another pace on each rank."""
    import torch
    import torch.distributed as dist

    from milepost.checkpoint.comm import SingleProcess
    from milepost.trainer.ranks import Ranks

    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(torch.device("cpu"), type("Comm", (SingleProcess,), {"rank": rank, "world_size": size})())
    told: dict[str, Any] = {"highest": ranks.highest([float(rank), -float(rank)])}
    for kind, name in (("poll", "SIGTERM"), ("turn", "SIGUSR1")):
        signals = StopSignals(["SIGTERM", "SIGUSR1"])
        signals.install()
        preemption = Preemption(signals, ranks.highest)
        for number in range(10_000):
            if number == 5 and rank == 1:
                os.kill(os.getpid(), signal.Signals[name])
            try:
                if kind == "poll":
                    preemption.poll()
                else:
                    time.sleep(0.002 * (rank + 1))
                    preemption.turn()
            except Stop as stop:
                told[kind] = (number, stop.reason, stop.signal)
                break
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    return told


def test_all_ranks_stop_at_the_same_place() -> None:
    first, second = run_ranks(as_rank, 2)
    assert first == second
    assert first["highest"] == [1.0, 0.0]
    assert first["poll"] == (5, "signal", "SIGTERM")
    number, reason, name = first["turn"]
    assert (reason, name) == ("signal", "SIGUSR1")
    assert 5 <= number < 300  # a few times a second, and no more turns than 256 between
