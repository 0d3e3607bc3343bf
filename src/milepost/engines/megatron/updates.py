"""What a Megatron engine's optimizers have in common: who updates which part of which parameter, in float32.

    adam                     AdamW over whole parameters: every data-parallel rank updates all that it holds
    distributed_optimizer    Megatron's DistributedOptimizer: each updates its own run of a flat buffer

Where the model computes in 16 bits, what is updated is a float32 copy, the master, and that is the parameter; what the
model holds is derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True)
class Part:
    """What a rank updates of a parameter, or a moment of that: elements [start, start + numel) of its row-major
    elements.

    values:  these, in one run; of any shape where they are all of them
    """

    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.values.numel()


class Updates(Protocol):
    """An optimizer over the parameters of a Megatron model, which are known by their names in the whole model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer whose groups a schedule sets and a checkpoint keeps."""

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks share out the parameters; else each of them updates all that it holds."""

    def parts(self) -> Mapping[str, Part]:
        """The masters, of those parameters of which this rank updates anything."""

    def state(self, name: str) -> Mapping[str, Tensor]:
        """The moments of such a part, made where they are missing with the values that AdamW gives them."""

    def count(self, name: str) -> float:
        """How many steps AdamW has counted for it."""

    def set_count(self, name: str, steps: float) -> None:
        """Put a count back."""

    def refresh(self) -> None:
        """Derive the model's parameters from the masters. All ranks call it together."""

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients of the parts, in float32, as they will be used; they may be scaled in place."""

    def update(self) -> None:
        """One update with these gradients, then `refresh`. All ranks call it together."""

    def clear(self) -> None:
        """Let go of these gradients."""

    def groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of every group, for a file."""


def fresh_state(values: Tensor) -> dict[str, Tensor]:
    """What AdamW makes at its first step, before it."""
    return {STEP: torch.zeros((), dtype=torch.float32), **{moment: torch.zeros_like(values) for moment in MOMENTS}}
