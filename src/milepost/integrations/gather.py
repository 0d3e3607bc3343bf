"""Whole tensors out of sharded ones, a few at a time. All ranks call together; each gets all, and drops it after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from milepost.index import itemsize
from milepost.integrations.live import dtype_name, global_shape


@contextmanager
def whole(tensors: Mapping[str, torch.Tensor], *, masters: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """The same tensors, whole, until the context ends.

    masters:  where the optimizer keeps a float32 copy of a 16-bit parameter, that one
    """
    with torch.no_grad():
        copies = [(name, _master(tensor)) for name, tensor in tensors.items()] if masters else []
        found = {name: copy for name, copy in copies if copy is not None}
        rest = {name: tensor for name, tensor in tensors.items() if name not in found}
        with _gathered([tensor for tensor in rest.values() if hasattr(tensor, "ds_id")]):
            yield found | {name: _full(tensor) for name, tensor in rest.items()}


def batches(tensors: Mapping[str, torch.Tensor], names: Sequence[str], memory_limit: int) -> Iterator[list[str]]:
    """The names in order, cut into groups of at most `memory_limit` bytes; a larger tensor is a group of its own."""
    group: list[str] = []
    size = 0
    for name in names:
        nbytes = torch.Size(global_shape(tensors[name])).numel() * itemsize(dtype_name(tensors[name]))
        if group and size + nbytes > memory_limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    if group:
        yield group


def has_masters(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a DeepSpeed optimizer keeps float32 copies of any of these: ZeRO-3, or ZeRO-1 and 2."""
    return any(hasattr(tensor, "_z3_optimizer") or hasattr(tensor, "_hp_mapping") for tensor in tensors.values())


def _gathered(parameters: list[torch.Tensor]) -> AbstractContextManager[Any]:
    if not parameters:
        return nullcontext()
    import deepspeed  # noqa: PLC0415  parameters that are cut by it come from it

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)
    return gathered


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _master(tensor: torch.Tensor) -> torch.Tensor | None:
    if not hasattr(tensor, "_z3_optimizer") and not hasattr(tensor, "_hp_mapping"):
        return None
    from deepspeed.utils import safe_get_full_fp32_param  # noqa: PLC0415

    copy: torch.Tensor | None = safe_get_full_fp32_param(tensor)
    return copy
