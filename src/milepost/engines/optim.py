"""AdamW's settings and schedule, and how an engine takes them over from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from milepost.engines.base import OPTIMIZER, SCHEDULE


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule and its clipping.

    lr, betas, weight_decay:  AdamW's
    lr_factor:                from the number of finished steps to the factor on `lr`
    grad_clip:                largest global norm of the gradient
    """

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    lr_factor: Callable[[int], float]
    grad_clip: float


def schedule_objects(optimizer: torch.optim.Optimizer | None, scheduler: LambdaLR | None) -> dict[str, Any]:
    """What `Engine.objects` tells of both."""
    return {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "param_groups": None if optimizer is None else hyperparameters(optimizer),
    }


def load_schedule_objects(
    optimizer: torch.optim.Optimizer | None, scheduler: LambdaLR | None, objects: Mapping[str, Any]
) -> dict[str, str]:
    """Take both over from a checkpoint's objects, as far as this engine has them; part -> why it is fresh, or ""."""
    remarks: dict[str, str] = {}
    if optimizer is not None:
        remarks[OPTIMIZER] = load_hyperparameters(optimizer, objects.get("param_groups"))
        if scheduler is not None:
            remarks[SCHEDULE] = load_schedule(optimizer, scheduler, objects.get("scheduler"))
    return remarks


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each parameter group, without the parameters."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def load_hyperparameters(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]] | None) -> str:
    """Take over the hyperparameters of the groups, or say why not."""
    if saved is None:
        return "the checkpoint has no hyperparameters; those of the config are used"
    if len(saved) != len(optimizer.param_groups):
        return (
            f"the checkpoint has {len(saved)} parameter groups, this run {len(optimizer.param_groups)}; "
            "the hyperparameters of the config are used"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if key in group and key not in ("params", "param_names"):
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
    return ""


def load_schedule(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, saved: Mapping[str, Any] | None) -> str:
    """Take over the position in the schedule, or say why not; the optimizer gets the rate of that position."""
    remark = ""
    if saved is None or "last_epoch" not in saved:
        remark = "the checkpoint has none; it starts at step 0"
    else:
        own = scheduler.state_dict()
        known = {key: value for key, value in saved.items() if key in own}
        scheduler.load_state_dict({**known, "lr_lambdas": own["lr_lambdas"]})
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    return remark
