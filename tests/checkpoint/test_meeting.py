"""Ranks that meet before a save: a rank that never comes is named within the time limit, and nobody hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny_engine import Run

from milepost.checkpoint.comm import TorchCommunicator
from milepost.errors import CallError


def _meetings(root: Path) -> dict[str, str]:
    """What each rank is told where some ranks make a call and others do not; "" where all went well."""
    rank = dist.get_rank()
    ranks = {"rank": rank, "world_size": dist.get_world_size()}
    told: dict[str, str] = {}

    def tell(case: str, comm: TorchCommunicator, what: str) -> None:
        try:
            comm.meet(what)
            told[case] = ""
        except CallError as error:
            told[case] = str(error)

    comm = TorchCommunicator(patience_seconds=60)
    for number in range(3):
        if rank == number:
            time.sleep(0.2)  # another rank is last each time
        tell(f"all {number}", comm, "save")
    tell("other", comm, "resume" if rank == 2 else "save")

    alone = TorchCommunicator(patience_seconds=1)
    if rank == 0:
        tell("first alone", alone, "save")
    other = TorchCommunicator(patience_seconds=1)
    if rank == 2:
        tell("last alone", other, "save")

    run = Run(root, comm=TorchCommunicator(patience_seconds=2), **ranks)
    run.manager.resume()
    run.train(1)
    run.reach(2)
    if rank != 1:
        try:
            run.manager.save(2)
        except CallError as error:
            told["save"] = str(error)
    dist.barrier()
    told["steps"] = ",".join(sorted(path.name for path in root.glob("*global_step*")))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(_meetings, 3, tmp_path_factory.mktemp("run"))


def test_ranks_that_all_come_go_on_whoever_is_last(told: list[dict[str, str]]) -> None:
    assert all(rank[f"all {number}"] == "" for rank in told for number in range(3))


def test_a_call_of_one_rank_alone_fails_and_names_the_others(told: list[dict[str, str]]) -> None:
    assert told[0]["first alone"].startswith("save: ranks 1-2 of 3 did not come within 1 second; every rank must make")
    assert told[2]["last alone"].startswith("save: ranks 0-1 of 3 did not come within 1 second")


def test_ranks_in_different_calls_are_told_so(told: list[dict[str, str]]) -> None:
    assert all(rank["other"].startswith("save: rank 0 calls save, rank 2 resume") for rank in told[:2])
    assert told[2]["other"].startswith("resume: rank 0 calls save, rank 2 resume")


def test_a_save_that_one_rank_does_not_call_fails_on_the_others_and_leaves_nothing(told: list[dict[str, str]]) -> None:
    for rank in (0, 2):
        assert told[rank]["save"].startswith("save: rank 1 of 3 did not come within 2 seconds")
    assert told[0]["steps"] == "global_step_1"
