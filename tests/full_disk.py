"""A program for tests: two ranks save on a file system that fills up at every page, and at every file.

Run it as root in a mount namespace of its own (`unshare -m`), with an empty directory, where it mounts a tmpfs. It
prints, as JSON, for each rank and each save what the rank was told, and what was found on the disk afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny_engine import Run, disk_is_at, names

from milepost.checkpoint.steps import read_tracker
from milepost.errors import MilepostError

PAGE = 4096
SIZE = 1 << 20


def clear(root: Path) -> None:
    for path in root.glob("ballast*"):
        path.unlink()


def leave(free: int, root: Path, kind: str) -> None:
    """Fill the file system but for so many pages, or so many files."""
    clear(root)
    ballast = root / "ballast"
    stats = os.statvfs(root)
    if kind != "files":
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (stats.f_bavail - free) * PAGE)
    else:
        for number in range(stats.f_favail - free):
            (root / f"ballast{number}").touch()


def told(run: Run, step: int, blocking: bool) -> str:
    """What the save says, or, where it does not block, the call after it."""
    try:
        run.manager.save(step, blocking=blocking)
        run.manager.wait()
    except MilepostError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sweep(root: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    run = Run(root / kind, rank=rank, world_size=2)
    run.manager.resume()
    run.train(1)
    run.reach(2)
    outcomes: list[dict[str, Any]] = []
    blocking = kind != "background"
    for free in range(0, 200, 1 if blocking else 3):
        dist.barrier()
        if rank == 0:
            leave(free, root, kind)
        dist.barrier()
        text = told(run, 2, blocking)
        dist.barrier()
        whole = disk_is_at(root / kind / "global_step_1", 1)
        outcomes.append({"told": text, "left": sorted(names(root / kind)), "whole": whole})
        outcomes[-1]["tracker"] = read_tracker(root / kind)
        if not text:
            break
    dist.barrier()
    if rank == 0:
        clear(root)
    dist.barrier()
    return outcomes


def main() -> None:
    root = Path(sys.argv[1])
    options = f"size={SIZE},nr_inodes=200"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "milepost-test", str(root)], check=True)
    assert os.path.ismount(root)
    assert os.statvfs(root).f_blocks * os.statvfs(root).f_frsize <= SIZE
    read, write = os.pipe()
    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", init_method=f"file://{root}/../store", rank=rank, world_size=2)
    outcomes = {kind: sweep(root, rank, kind) for kind in ("pages", "files", "background")}
    if rank == 1:
        with os.fdopen(write, "w") as pipe:
            json.dump(outcomes, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(json.dumps([outcomes, json.load(pipe)]))
    os.wait()


if __name__ == "__main__":
    main()
