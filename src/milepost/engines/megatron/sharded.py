"""A Megatron engine's state in Megatron's sharded form, which `megatron.core.dist_checkpointing` writes and reads.

The keys are Megatron-LM's: model (model0, model1, ... of virtual stages), optimizer, opt_param_scheduler, rng_state.

What a distributed optimizer holds is written in the form that Megatron calls `fully_reshardable`: each moment as a
tensor that is laid out like its weight. Megatron gathers all of it on every rank for that, and puts it in the wrong
place where a buffer has several buckets (a tied embedding has one of its own; megatron-core 0.16.1,
`sharded_param_state_fully_reshardable`, which says so itself). Here each rank writes the boxes of its own runs;
Megatron's loader, which asks for whole tensors, finds them by what they cover.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from milepost.engines.megatron.adam import WholeParameters
from milepost.engines.megatron.distributed_optimizer import SharedParameters
from milepost.engines.megatron.state import unwrapped
from milepost.engines.megatron.updates import STEP, Part
from milepost.layouts.flat_runs import boxes_of_run

if TYPE_CHECKING:
    from milepost.engines.megatron.engine import MegatronEngine

_FORM = "fully_reshardable"
_STATE = "optimizer.state"


def sharded_state(engine: MegatronEngine) -> dict[str, Any]:
    """All of the state. All ranks call it together."""
    state = importlib.import_module("megatron.core.parallel_state")
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
    chunks = [unwrapped(chunk) for chunk in engine.model.chunks]
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    found: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    weights = [found[name] for name in names]
    if isinstance(engine.updates, WholeParameters):
        found["optimizer"] = _whole(engine.updates, weights)
    elif isinstance(engine.updates, SharedParameters):
        found["optimizer"] = _shared(engine.updates, weights)
    if engine.scheduler is not None:
        found["opt_param_scheduler"] = engine.scheduler.state_dict()
    generators = {"rank": engine.rank, "rng": engine.generators()}
    found["rng_state"] = mapping.ShardedObject("rng_state", generators, (engine.world_size,), (engine.rank,))
    return found


def _whole(updates: WholeParameters, weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """AdamW's state cut as the weights are. Its counts are one number for all, as Megatron keeps them."""
    tools = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    parameters = list(updates.parameters.values())
    by_number = tools.get_param_id_to_sharded_param_map({str(n): chunk for n, chunk in enumerate(weights)}, parameters)
    found = updates.state_dict()
    steps = {float(state[STEP]) for state in found["state"].values()}
    for state in found["state"].values():
        if "param" in state:  # Megatron's name for what an optimizer of whole parameters has besides them
            state["fp32_param"] = state.pop("param")
    for group in found["param_groups"]:
        del group["param_names"]  # of this rank, and what is common to all is written once
    tools.optim_state_to_sharding_state(found, by_number, exclude_keys=(STEP,))
    return {**found, STEP: max(steps, default=0.0)}


def _shared(updates: SharedParameters, weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The runs of the distributed optimizer, and its hyperparameters where Megatron keeps them."""
    tools = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    parts = updates.parts()
    parameters = [updates.parameters[name] for name in parts]
    by_number = tools.get_param_id_to_sharded_param_map({str(n): chunk for n, chunk in enumerate(weights)}, parameters)
    state = {}
    for number, (name, part) in enumerate(parts.items()):
        kinds = {"param": part.values, **updates.state(name)}
        state[number] = {
            kind: list(_boxes(f"{_STATE}.{kind}", by_number[number], parameters[number], Part(part.start, values)))
            for kind, values in kinds.items()
        }
    count = max((updates.count(name) for name in parts), default=0.0)
    groups = [{**group, STEP: count} for group in updates.groups()]
    return {"optimizer": {"param_groups": groups}, "param_state": state, "param_state_sharding_type": _FORM}


def _boxes(prefix: str, weight: Any, parameter: torch.Tensor, part: Part) -> Iterator[Any]:
    """A run of a parameter as boxes of the tensor that the weight is a part of.

    weight:  Megatron's ShardedTensor, or a factory that makes several of one parameter: the halves of a gated layer
    """
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    tensors = [weight]
    if isinstance(weight, mapping.ShardedTensorFactory):
        # Of a tensor without memory the views still say where in it they begin.
        shadow = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        tensors = replace(weight, data=shadow).build()
    for tensor in tensors:
        first = 0 if tensor is weight else int(tensor.data.storage_offset())
        sizes, lead = tuple(tensor.local_shape), tensor.prepend_axis_num
        start, stop = max(first, part.start), min(first + torch.Size(sizes).numel(), part.stop)
        if start >= stop:
            continue
        run = part.values.view(-1)[start - part.start : stop - part.start]
        for box in boxes_of_run(sizes, start - first, stop - start):
            shape = (1,) * lead + box.sizes
            offset = (0,) * lead + box.offsets
            yield mapping.ShardedTensor(
                key=f"{prefix}.{tensor.key}",
                data=run[: box.volume].view(shape),
                dtype=run.dtype,
                local_shape=shape,
                global_shape=tuple(tensor.global_shape),
                global_offset=tuple(a + b for a, b in zip(tensor.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # boxes of any size
                replica_id=(*tensor.replica_id[:2], 0),  # each data-parallel rank writes its own
                allow_shape_mismatch=tensor.allow_shape_mismatch,
            )
            run = run[box.volume :]
