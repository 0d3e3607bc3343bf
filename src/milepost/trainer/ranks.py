"""This process among the ranks: its device, and the two ways in which ranks meet outside of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.checkpoint.comm import Communicator, on_all

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Where a model lies on several ranks: which of the sequences are this one's.

    rank, size:  its place among the data-parallel ranks, which have other sequences, and their number
    group:       these ranks
    peers:       the ranks that hold the same model together, and so have the same sequences
    first:       the first of them, counted among all ranks
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    peers: dist.ProcessGroup
    first: int


@dataclass(frozen=True)
class Ranks:
    """Who this process is.

    device:  where its models live
    comm:    how small objects travel
    share:   which sequences are its own, where that is not told by its rank alone
    """

    device: torch.device
    comm: Communicator
    share: Share | None = None

    @property
    def rank(self) -> int:
        """This process, counted from 0."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.comm.world_size

    @property
    def data_rank(self) -> int:
        """This process among those that have other sequences."""
        return self.rank if self.share is None else self.share.rank

    @property
    def data_size(self) -> int:
        """Into how many parts the sequences are dealt out."""
        return self.world_size if self.share is None else self.share.size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all sequences, in place. All ranks call it together; those with the same sequences
        count once."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=None if self.share is None else self.share.group)
        return tensor

    def highest(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum of a few numbers over all ranks, which call it together."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo's, which takes no turn on a GPU
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def agreed(self, tensor: Tensor) -> Tensor:
        """Of ranks with the same sequences the first one's values, in place: a reward may be different each time."""
        if self.share is not None and self.share.peers.size() > 1:
            dist.broadcast(tensor, src=self.share.first, group=self.share.peers)
        return tensor

    def each(self, act: Callable[[], T]) -> T:
        """Do on every rank what may fail on one: an error there is raised on all, so that none waits for the others."""
        return on_all(self.comm, act)
