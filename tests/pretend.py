"""One process that pretends to be each rank of a run in turn: torch's own sharded tensors and pickles, no launch.

torch's fake process group communicates with nobody, which is enough to build tensors from local parts and save them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_rank(rank: int, world_size: int) -> Iterator[None]:
    """In the body, this process is that rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_ranks(
    directory: Path, world_size: int, state: Callable[[int], Mapping[str, Any]], kind: str = "model"
) -> None:
    """Save what `state` gives for each rank, called as that rank."""
    for rank in range(world_size):
        with pretended_rank(rank, world_size):
            torch.save(dict(state(rank)), directory / f"{kind}_world_size_{world_size}_rank_{rank}.pt")


def mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    """A device mesh of all ranks, its dimensions named after letters."""
    count = int(torch.Size(sizes).numel())
    return DeviceMesh("cpu", torch.arange(count).reshape(sizes), mesh_dim_names=tuple("abc"[: len(sizes)]))


def dtensor(local: torch.Tensor, of: DeviceMesh, placements: tuple[Placement, ...], whole: torch.Tensor) -> DTensor:
    """A DTensor of the shape of `whole` of which this rank holds `local`."""
    made = DTensor.from_local(
        local.clone(), of, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    # torch cannot save a DTensor that it made of a view with an offset; one that got the view later it can.
    made._local_tensor = local
    return made


def sharded_tensor(whole: torch.Tensor) -> Any:
    """This rank's part of a tensor as FSDP1 makes it of a weight."""
    size = dist.get_world_size()
    group: Any = dist.group.WORLD
    return _create_chunk_sharded_tensor(whole.contiguous(), dist.get_rank(), size, size, group, torch.device("cpu"))
