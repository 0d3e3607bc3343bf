"""What must happen to gradients between the backward and the update of a Megatron model: sums over ranks, one norm.

Which ranks hold the same parameter, and which of them a part of its gradient:

    parameter                               the same on                    its gradient is summed over
    cut by tensor parallelism               data-parallel ranks            these
    whole on every tensor-parallel rank     these times the former         data-parallel ranks: the parts are equal
    norms of queries and keys               the same                       and tensor-parallel ranks: each has its heads
    experts                                 expert-data-parallel ranks     these
    tied embedding on two stages            both stages                    both, and data-parallel ranks

Source: megatron-core 0.16, `distributed/finalize_model_grads.py`, which does this for its own gradient buffers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

_HEAD_NORMS = (".q_layernorm.weight", ".k_layernorm.weight")
_EXPERTS = ".mlp.experts."


class Gradients:
    """The gradients of this rank's parameters.

    Args:
        parameters: by their names in the whole model.
        cut: those of which this rank holds a part.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], cut: Collection[str]) -> None:
        self._parameters = dict(parameters)
        self._cut = cut
        self._state = importlib.import_module("megatron.core.parallel_state")
        self._copies = {name: self._count_copies(name, p) for name, p in self._parameters.items()}

    def reduce(self) -> None:
        """Sum what ranks hold of one gradient, and divide by the number of data-parallel ranks: the average over
        those, as every engine gives it. All ranks call it together."""
        state = self._state
        ranks = state.get_data_parallel_world_size()
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if name.endswith(_HEAD_NORMS):
                _sum(grad, state.get_tensor_model_parallel_group())
            if getattr(parameter, "shared_embedding", False):
                _sum(grad, state.get_embedding_group())
            _sum(grad, self._data_group(name))
            grad.div_(ranks)

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their global norm is at most `limit`; returns the norm before. The same number on
        every rank, each parameter counted once. All ranks call it together."""
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self._parameters.values())).device)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                total += parameter.grad.detach().float().square().sum().double() / self._copies[name]
        dist.all_reduce(total)
        norm = math.sqrt(float(total)) if math.isfinite(float(total)) else float(total)
        factor = limit / (norm + 1e-6)
        if factor < 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    def _data_group(self, name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = (
            self._state.get_expert_data_parallel_group() if _EXPERTS in name else self._state.get_data_parallel_group()
        )
        return group

    def _count_copies(self, name: str, parameter: nn.Parameter) -> int:
        """How many ranks hold the same elements."""
        copies = self._data_group(name).size()
        if name not in self._cut and _EXPERTS not in name:
            copies *= self._state.get_tensor_model_parallel_world_size()
        if getattr(parameter, "shared_embedding", False):
            copies *= self._state.get_embedding_group().size()
        return copies


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
