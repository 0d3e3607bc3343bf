"""Starting DeepSpeed, and turning a model without memory into one of its engines.

No rank holds the whole model under stage 3: parameters get memory one by one, and each is cut before the next is made.
Their values come later, through the index, into the parts that a rank keeps.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from milepost.engines import cpu_compat
from milepost.engines.deepspeed.engine import DeepSpeedEngine
from milepost.engines.optim import OptimizerSettings

_BUCKET = 50_000_000  # elements; DeepSpeed's own is ten times as large, and allocated at once for each engine
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class ZeroSettings:
    """How DeepSpeed lays a model over the ranks.

    stage:              1 cuts moments and float32 weights, 2 gradients too, 3 the 16-bit weights too
    dtype:              of the weights in forward and backward; the optimizer keeps float32 ones
    reduce_dtype:       in which gradients are summed over the ranks, and over micro-batches
    offload_optimizer:  keep optimizer state in host memory and update it there, by DeepSpeedCPUAdam
    config:             further keys of DeepSpeed's own config, merged over what follows from these
    """

    stage: int = 3
    dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    offload_optimizer: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def start(device: torch.device) -> None:
    """Let DeepSpeed join the process group that is there, before its first engine. To call it again is harmless."""
    if device.type == "cpu":
        cpu_compat.choose_cpu()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls torch's collectives by their older names, at every layer.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
    # Where no launcher set it, this is the only process of its machine.
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        cpu_compat.leave_out_shared_memory_collectives()
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False)


def initialize(
    model: nn.Module,
    device: torch.device,
    zero: ZeroSettings,
    groups: Sequence[tuple[str, OptimizerSettings]],
    *,
    seed: int = 0,
    companions: Path | None = None,
    config_text: str | None = None,
) -> DeepSpeedEngine:
    """An engine of a model whose parameters have no memory yet; their values are zeros until they are written.

    Args:
        model: on the meta device, buffers excepted. Parameters that need no gradient are frozen.
        groups: parameter groups: the beginning of the names that belong to each, and its settings. One clipping holds
            for all of them, the first one's.

    All ranks call it together, after `start`.
    """
    config = deepspeed_config(zero, groups[0][1].grad_clip)
    give_memory(model, device, zero, config)
    optimizer = _optimizer(model, zero, groups)
    scheduler = LambdaLR(optimizer, [settings.lr_factor for _, settings in groups])
    engine, *_ = importlib.import_module("deepspeed").initialize(model=model, optimizer=optimizer, config=config)
    return DeepSpeedEngine(engine, scheduler=scheduler, seed=seed, companions=companions, config_text=config_text)


def deepspeed_config(zero: ZeroSettings, grad_clip: float) -> dict[str, Any]:
    """The config that DeepSpeed gets, as its documentation names the keys."""
    # Stage 1 in bf16 with sums in float32 is another optimizer, with files of its own.
    accumulate = zero.dtype if zero.stage == 1 and not zero.offload_optimizer else zero.reduce_dtype
    config = {
        # Bookkeeping: micro-batches are counted by who trains.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if math.isinf(grad_clip) else grad_clip,
        "bf16": {"enabled": zero.dtype == torch.bfloat16, "check_grad_overflow": True},
        "communication_data_type": _NAMES[zero.reduce_dtype],
        "data_types": {"grad_accum_dtype": _NAMES[accumulate]},
        "steps_per_print": None,
        "zero_optimization": {
            "stage": zero.stage,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
            **({"offload_optimizer": {"device": "cpu"}} if zero.offload_optimizer else {}),
        },
    }
    return _merged(config, zero.config)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], over[key]) for key in base if isinstance(base[key], dict) and key in over}
    return {**base, **over, **both}


def give_memory(model: nn.Module, device: torch.device, zero: ZeroSettings, config: Mapping[str, Any]) -> None:
    """Replace the parameters of a model on the meta device by zeros: cut ones under stage 3, whole ones else."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if weight not in fresh:
                    fresh[weight] = _parameter(weight, device, zero.dtype)
                    if zero.stage == 3:
                        _cut(fresh[weight], next(iter(fresh.values())), config)
                module._parameters[name] = fresh[weight]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _parameter(like: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(like.shape, dtype=dtype, device=device), requires_grad=like.requires_grad)


def _cut(weight: nn.Parameter, first: Any, config: Mapping[str, Any]) -> None:
    """Keep this rank's run of a parameter. DeepSpeed reads its config once, for the first of a model."""
    if weight is not first:
        first.convert_to_zero_parameters([weight])
        return
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    importlib.import_module("deepspeed").zero.Init(module=holder, config_dict_or_path=dict(config))


def _optimizer(
    model: nn.Module, zero: ZeroSettings, groups: Sequence[tuple[str, OptimizerSettings]]
) -> torch.optim.Optimizer:
    named = [
        {
            "params": [
                weight for name, weight in model.named_parameters() if name.startswith(prefix) and weight.requires_grad
            ],
            "lr": settings.lr,
            "betas": settings.betas,
            "weight_decay": settings.weight_decay,
        }
        for prefix, settings in groups
    ]
    if zero.offload_optimizer:
        adam: torch.optim.Optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(named)
        return adam
    return torch.optim.AdamW(named)
