"""What must happen to gradients between the backward and the update of a Megatron model: sums over ranks, one norm.

They are gathered in Megatron's own buffers, in float32 whatever the model computes in, one for all parameters of a
chunk (and one for its experts), so a sum over ranks is one call for a buffer. Which ranks hold the same parameter, and
which of them a part of its gradient:

    parameter                               the same on                    its gradient is summed over
    cut by tensor parallelism               data-parallel ranks            these
    whole on every tensor-parallel rank     these times the former         data-parallel ranks: the parts are equal
    norms of queries and keys               the same                       and tensor-parallel ranks: each has its heads
    experts                                 expert-data-parallel ranks     these
    tied embedding on two stages            both stages                    both, and data-parallel ranks

Source: megatron-core 0.16, `distributed/finalize_model_grads.py`, which does it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from milepost.layouts.megatron.numbers import is_expert


class Gradients:
    """The gradients of this rank's parameters.

    Args:
        chunks: the model's; their parameters are led into Megatron's buffers.
        parameters: by their names in the whole model.
        cut: those of which this rank holds a part.
        sharded: whether each data-parallel rank needs its share of them only.
    """

    def __init__(
        self, chunks: Sequence[Any], parameters: Mapping[str, nn.Parameter], cut: Collection[str], *, sharded: bool
    ) -> None:
        self._parameters = dict(parameters)
        self._cut = cut
        self._sharded = sharded
        self._state = importlib.import_module("megatron.core.parallel_state")
        self._tools = importlib.import_module("megatron.core.distributed")
        config = self._tools.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, overlap_grad_reduce=False
        )
        self.wrapped = [self._tools.DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
        self._copies = {name: self._count_copies(name, p) for name, p in self._parameters.items()}

    def reduce(self) -> None:
        """Sum what ranks hold of one gradient, and divide by the number of data-parallel ranks: the average over
        those, as every engine gives it. All ranks call it together."""
        self._tools.finalize_model_grads(self.wrapped)
        for chunk in self.wrapped:
            chunk.scale_gradients(1 / self._state.get_data_parallel_world_size())

    def clip(self, gradients: Mapping[str, Tensor], limit: float) -> float:
        """Scale gradients so that their global norm is at most `limit`; returns the norm before. The same number on
        every rank, each element counted once. All ranks call it together.

        gradients: those of this rank, by the parameters' names; with `sharded`, of its shares
        """
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self._parameters.values())).device)
        for name, gradient in gradients.items():
            total += gradient.detach().float().square().sum().double() / self._copies[name]
        dist.all_reduce(total)
        norm = math.sqrt(float(total)) if math.isfinite(float(total)) else float(total)
        factor = limit / (norm + 1e-6)
        if factor < 1:
            for gradient in gradients.values():
                gradient.mul_(factor)
        return norm

    def clear(self) -> None:
        """Zero, for the next update."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()

    def _count_copies(self, name: str, parameter: nn.Parameter) -> int:
        """How many ranks hold the same elements of a gradient."""
        copies = 1 if self._sharded else self._data_group(name).size()
        if name not in self._cut and not is_expert(name):
            copies *= self._state.get_tensor_model_parallel_world_size()
        if getattr(parameter, "shared_embedding", False):
            copies *= self._state.get_embedding_group().size()
        return copies

    def _data_group(self, name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = (
            self._state.get_expert_data_parallel_group() if is_expert(name) else self._state.get_data_parallel_group()
        )
        return group
