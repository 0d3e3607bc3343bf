"""Real ranks for tests: a function in several processes that share a gloo process group.

The processes are forked from a server that has torch and transformers loaded, so a launch costs a fraction of a second
after the first.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT = 200.0  # seconds
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed guesses, here and in the ranks
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.generation.utils",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.quantizers.auto",
    "milepost.trainer.worker",
    "deepspeed",
    "megatron.core.models.gpt",
    "megatron.core.dist_checkpointing",
]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, lost: int = 0) -> list[Any]:
    """Call `function(*args)` on each of `world_size` ranks and return what each returned, in rank order.

    `function` stands at the top level of a module. An error on any rank is raised here with its traceback. `lost`: how
    many ranks end without a word, as if killed.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results: Any = context.Queue()
    home = (function.__module__, inspect.getfile(function))
    # As under torchrun: ranks find each other at a store of another process.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(home, function.__name__, rank, world_size, store.port, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        outcomes: list[tuple[int, bytes, str]] = []
        while len(outcomes) < world_size - lost and not any(error for _, _, error in outcomes):
            # After an error the other ranks may wait for the failed one in a collective: read no further.
            outcomes.append(results.get(timeout=TIMEOUT))
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    errors = [f"rank {rank}:\n{error}" for rank, _, error in outcomes if error]
    assert not errors, "\n".join(errors)
    return [pickle.loads(value) for _, value, _ in sorted(outcomes, key=lambda outcome: outcome[0])]


def _rank(
    home: tuple[str, str], name: str, rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        function = getattr(_module(*home), name)
        # Pickled here: the queue's own pickling would pass tensors by shared memory of a process that is about to end.
        results.put((rank, pickle.dumps(function(*args)), ""))
    except BaseException:  # noqa: BLE001  whatever it is, the test must hear of it
        results.put((rank, b"", traceback.format_exc()))
    finally:
        # Let every queued result leave before the group goes, or another rank's collective would fail first.
        results.close()
        results.join_thread()
        dist.destroy_process_group()


def _module(name: str, file: str) -> Any:
    """A test's module. pytest gives it a name that cannot be imported, so it is loaded from its file as that."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
