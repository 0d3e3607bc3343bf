"""The course of the learning rate."""

from __future__ import annotations

import math

from milepost.trainer.schema import OptimConfig


def lr_factor(step: int, *, kind: str, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> float:
    """What the learning rate of the config is multiplied with in the step after `step` finished ones.

        step < warmup_steps   (step + 1) / (warmup_steps + 1)      from above 0 to below 1: no step is spent at rate 0
        constant              1
        linear                1 - (1 - min_lr_ratio) * x
        cosine                min_lr_ratio + (1 - min_lr_ratio) * (1 + cos(pi * x)) / 2

    with x = (step - warmup_steps) / (total_steps - warmup_steps), at most 1: after `total_steps` the rate stays.

    Args:
        step: training steps finished, 0 before the first; for `torch.optim.lr_scheduler.LambdaLR`.
        kind: constant, linear or cosine.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    match kind:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - min_lr_ratio) * done
        case "cosine":
            return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2
    raise ValueError(f"unknown learning rate schedule: {kind!r}")


def schedule_steps(optim: OptimConfig, training_steps: int) -> tuple[int, int]:
    """The total and the warm-up steps of a schedule, where the config may leave them to the length of the training."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else training_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
    return total, warmup
