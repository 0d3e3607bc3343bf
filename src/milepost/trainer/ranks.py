"""This process among the ranks: its device, and the two ways in which ranks meet outside of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.checkpoint.comm import Communicator, together

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who this process is.

    device:  where its models live
    comm:    how small objects travel
    """

    device: torch.device
    comm: Communicator

    @property
    def rank(self) -> int:
        """This process, counted from 0."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.comm.world_size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, in place. All call it together."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def each(self, act: Callable[[], T]) -> T:
        """Do on every rank what may fail on one: an error there is raised on all, so that none waits for the others."""
        results: list[T] = []

        def keep() -> None:
            results.append(act())

        together(self.comm, keep)
        return results[0]
