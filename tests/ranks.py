"""Real ranks for tests: a function in several processes that share a gloo process group.

The processes are forked from a server that has torch and transformers loaded, so a launch costs a fraction of a second
after the first.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # seconds


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on each of `world_size` ranks and return what each returned, in rank order.

    `function` stands at the top level of a module. An error on any rank is raised here with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "transformers", "milepost.trainer.models"])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        processes = [
            context.Process(target=_rank, args=(function, rank, world_size, store, results, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            outcomes = sorted((results.get(timeout=TIMEOUT) for _ in processes), key=lambda outcome: outcome[0])
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    errors = [f"rank {rank}:\n{error}" for rank, _, error in outcomes if error]
    assert not errors, "\n".join(errors)
    return [value for _, value, _ in outcomes]


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
    )
    try:
        results.put((rank, function(*args), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        # Let every queued result leave before the group goes, or another rank's collective would fail first.
        results.close()
        results.join_thread()
        dist.destroy_process_group()
