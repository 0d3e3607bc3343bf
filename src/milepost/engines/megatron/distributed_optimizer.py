"""Megatron's own DistributedOptimizer: data-parallel ranks share out masters and moments, as runs of flat buffers.

Megatron lays the parameters of a model chunk end to end in a buffer, in the order opposite to the model's, and cuts
that into equal shares; a parameter lies on one rank, on some, or not on this one at all. Gradients are summed by a
reduce-scatter of the buffer, and what was updated goes to all ranks by an all-gather. The update is made in the steps
that Megatron's `step` takes: with another norm, the one that all engines here report, and not at all where that is not
finite. Source: megatron-core 0.16, `optimizer/distrib_optimizer.py`.

Experts have an optimizer of their own, whose hyperparameters are the other's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from milepost.engines.megatron.updates import MOMENTS, STEP, Part, fresh_state
from milepost.engines.optim import OptimizerSettings, hyperparameters
from milepost.layouts.megatron.numbers import is_expert


@dataclass(frozen=True)
class _Shard:
    """What this rank updates of a parameter: its elements from `start` on, as `master`, by `optimizer` in `group`."""

    start: int
    master: Tensor
    optimizer: torch.optim.Optimizer
    group: int


class SharedParameters:
    """Satisfies `milepost.engines.megatron.updates.Updates`.

    Args:
        wrapped: the model's chunks inside of Megatron's DistributedDataParallel, which has the buffers.
        parameters: by their names in the whole model.
    """

    sharded = True

    def __init__(
        self, wrapped: Sequence[Any], parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings
    ) -> None:
        tools = importlib.import_module("megatron.core.optimizer")
        dtype = next(iter(parameters.values())).dtype
        config = tools.OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        # Without overrides all parameters decay alike, as they do under every other engine.
        self.megatron = tools.get_megatron_optimizer(
            config, list(wrapped), config_overrides={}, use_gloo_process_groups=False
        )
        self._wrapped = list(wrapped)
        self.parameters = dict(parameters)
        self._shards = {name: shard for name, p in parameters.items() for shard in self._found(p)}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That of all that is no expert; its group speaks for all."""
        inner: torch.optim.Optimizer = self.megatron.chained_optimizers[0].optimizer
        return inner

    def parts(self) -> Mapping[str, Part]:
        """This rank's shares of the masters."""
        return {name: Part(shard.start, shard.master.detach()) for name, shard in self._shards.items()}

    def state(self, name: str) -> Mapping[str, Tensor]:
        """The inner optimizer's."""
        shard = self._shards[name]
        state: dict[str, Tensor] = shard.optimizer.state[shard.master]
        if not state:
            fresh = fresh_state(shard.master.detach())
            if not self._counts_by_parameter(shard):
                del fresh[STEP]
            state |= fresh
        return {moment: state[moment] for moment in MOMENTS}

    def count(self, name: str) -> float:
        """torch's AdamW counts for each parameter; Apex's and Transformer Engine's for a group."""
        shard = self._shards[name]
        if self._counts_by_parameter(shard):
            return float(shard.optimizer.state[shard.master][STEP])
        return float(shard.optimizer.param_groups[shard.group].get(STEP, 0))

    def set_count(self, name: str, steps: float) -> None:
        """Into the inner optimizer."""
        shard = self._shards[name]
        if self._counts_by_parameter(shard):
            shard.optimizer.state[shard.master][STEP].fill_(steps)
        else:
            shard.optimizer.param_groups[shard.group][STEP] = int(steps)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast this rank's shares into the model's parameters, and gather those of the others."""
        for name, shard in self._shards.items():
            place = self.parameters[name].detach().view(-1)[shard.start : shard.start + shard.master.numel()]
            if place.data_ptr() != shard.master.data_ptr():  # in float32 they are one
                place.copy_(shard.master)
        for chunk in self._wrapped:
            chunk.start_param_sync(force_sync=True)

    def gradients(self) -> Mapping[str, Tensor]:
        """Megatron's, of the shares."""
        self.megatron.prepare_grads()
        return {name: shard.master.grad for name, shard in self._shards.items() if shard.master.grad is not None}

    def update(self) -> None:
        """Megatron's step, without its clipping."""
        said = {key: value for key, value in self.optimizer.param_groups[0].items() if key in _HYPERPARAMETERS}
        for inner in self.megatron.chained_optimizers:
            for group in inner.optimizer.param_groups:
                group.update(said)
        self.megatron.step_with_ready_grads()

    def clear(self) -> None:
        """The buffers themselves are the engine's to clear."""
        self.megatron.zero_grad()

    def groups(self) -> list[dict[str, Any]]:
        """The first optimizer's."""
        return hyperparameters(self.optimizer)

    def state_dict(self, tp: int, expert_tp: int) -> dict[str, Any]:
        """This rank's shares in the form of AdamW's own, parameters by number with a name for each, and beside it
        `shares`: by number, of what a share is a part.

        tp, expert_tp:  this rank's place among those that each hold a part of a weight, and of an expert
        """
        state, shares = {}, {}
        for number, (name, part) in enumerate(self.parts().items()):
            parameter = self.parameters[name]
            copy = {} if parameter.dtype == torch.float32 else {"param": part.values}
            state[number] = {**copy, **self.state(name), STEP: torch.tensor(self.count(name))}
            rank = expert_tp if is_expert(name) else tp
            shares[number] = {"shape": tuple(parameter.shape), "start": part.start, "tp": rank}
        (group,) = self.groups()
        named = {"params": list(state), "param_names": list(self.parts())}
        return {"state": state, "param_groups": [{**group, **named}], "shares": shares}

    def _found(self, parameter: nn.Parameter) -> Iterator[_Shard]:
        for inner in self.megatron.chained_optimizers:
            place = getattr(inner, "model_param_gbuf_map", {}).get(parameter)
            if place is not None:
                buffer, dtype, bucket = place
                held = inner.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                group, number = inner.model_param_group_index_map[parameter]
                yield _Shard(held.start, inner.optimizer.param_groups[group]["params"][number], inner.optimizer, group)

    @staticmethod
    def _counts_by_parameter(shard: _Shard) -> bool:
        return isinstance(shard.optimizer, torch.optim.Adam)


_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
