"""A policy that PEFT has put an adapter around: what is saved is the adapter, in PEFT's own form, as PEFT does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from milepost.checkpoint.comm import Communicator, together
from milepost.index import TensorEntry, TensorIndex
from milepost.integrations import gather
from milepost.integrations.live import dtype_name, global_shape, submodule


@dataclass(frozen=True)
class LiveAdapter:
    """An adapter in a live model.

    module:   PEFT's model
    tensors:  name in its state dict -> the parameter itself, perhaps sharded; what the adapter consists of
    index:    the same under the names that PEFT's file gives them
    """

    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    index: TensorIndex


def is_adapter(wrapped: nn.Module, prefix: str) -> bool:
    """Whether the part at `prefix` is a model of PEFT."""
    module = submodule(wrapped, prefix)
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def find_adapter(wrapped: nn.Module, prefix: str) -> LiveAdapter:
    """The adapter of the part at `prefix`."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415  there is a model of it, so it is there

    module: Any = submodule(wrapped, prefix)
    held = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    own = get_peft_model_state_dict(module, state_dict=dict(held))
    ids = {id(tensor) for tensor in own.values()}
    entries = {name: TensorEntry(dtype_name(tensor), global_shape(tensor), ()) for name, tensor in own.items()}
    tensors = {name: tensor for name, tensor in held.items() if id(tensor) in ids}
    return LiveAdapter(module, tensors, TensorIndex(entries, "live"))


def write_adapter(model: LiveAdapter, directory: Path, comm: Communicator) -> TensorIndex:
    """Let PEFT write the adapter into `directory`, from whole tensors; returns what it consists of."""

    def save() -> None:
        with gather.whole(model.tensors) as found:
            if comm.rank == 0:
                module: Any = model.module
                module.save_pretrained(str(directory), state_dict=found)

    together(comm, save)
    return model.index
