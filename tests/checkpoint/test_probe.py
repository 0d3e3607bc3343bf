"""Ranks that do not mean the same folder are told so at the start, and who sees what."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest
from faults.places import why_not
from ranks import run_ranks
from tiny_engine import Run

from milepost.checkpoint.comm import SingleProcess, TorchCommunicator
from milepost.checkpoint.probe import probe_root
from milepost.errors import CallError, MilepostError

NEW_NAMESPACE, PRIVATE_BELOW = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE


def as_rank(home: str) -> dict[str, str]:
    """One folder for all; another name on each rank; and one name, at which the last rank has a disk of its own."""
    import torch.distributed as dist

    # Files of others are looked for while ranks still wait for one another, so that it is told what is not seen.
    comm = TorchCommunicator(5.0)
    rank, base = dist.get_rank(), Path(home)
    told = {}
    for name, root in (("shared", base / "shared"), ("named", base / f"run_{rank % 2}"), ("private", base / "private")):
        if name == "private" and rank == 2:
            mount_own(root)
        try:
            probe_root(comm, root)
            told[name] = "good"
        except CallError as error:
            told[name] = str(error)
    run = Run(base / "private", rank=rank, world_size=3, save_timeout=4.0)
    run.manager.resume()
    try:
        run.manager.save(1)
    except MilepostError as error:
        told["save"] = str(error)
    return told


def mount_own(folder: Path) -> None:
    """Mount a disk there that this process alone sees, as a machine that lacks the shared one does."""
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        lambda: libc.unshare(NEW_NAMESPACE),
        lambda: libc.mount(b"none", b"/", None, PRIVATE_BELOW, None),
        lambda: libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m"),
    ):
        assert call() == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_one_folder_for_all_ranks_and_what_else_there_is(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    old = tmp_path / "shared" / ".probe_0123_7"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    told = run_ranks(as_rank, 3, str(tmp_path))
    assert told[0] == told[1] == told[2]
    assert told[0]["shared"] == "good"
    assert "ranks were given different folders for the run" in told[0]["named"]
    assert f"ranks 0, 2 {tmp_path}/run_0; rank 1 {tmp_path}/run_1" in told[0]["named"]
    host = os.uname().nodename
    assert (
        f"ranks 0-1 on {host} see the files of ranks 0-1 only; rank 2 on {host} sees the files of rank 2 only"
        in (told[0]["private"])
    )
    assert "Put the run on a file system that all machines share" in told[0]["private"]
    assert not list(tmp_path.rglob(".probe_*"))
    assert "step 1 was not saved: rank 2: rank 2 does not see" in told[0]["save"]
    assert "the folder is not on a file system that all nodes share" in told[0]["save"]


def test_a_rank_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    probe_root(SingleProcess(), tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
