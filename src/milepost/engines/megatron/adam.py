"""torch's AdamW over the whole parameters that a rank of Megatron holds, with float32 masters for those of 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from milepost.engines.megatron.updates import MOMENTS, STEP, Part, fresh_state
from milepost.engines.optim import OptimizerSettings, hyperparameters


class WholeParameters:
    """Satisfies `milepost.engines.megatron.updates.Updates`.

    Args:
        parameters: by their names in the whole model; Megatron's gradient buffers are on them as `main_grad`.
    """

    sharded = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters = dict(parameters)
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for name, p in parameters.items()
        }
        # Named parameters: the names in the file spare a reader guessing them from the model's order.
        self.optimizer = torch.optim.AdamW(
            list(self.masters.items()), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    @property
    def has_copies(self) -> bool:
        """Whether the masters are copies."""
        return any(self.masters[name] is not p for name, p in self.parameters.items())

    def parts(self) -> Mapping[str, Part]:
        """All masters, whole."""
        return {name: Part(0, master.detach()) for name, master in self.masters.items()}

    def state(self, name: str) -> Mapping[str, Tensor]:
        """AdamW's, which for one parameter is whole too."""
        state: dict[str, Tensor] = self.optimizer.state[self.masters[name]]
        if not state:
            state |= fresh_state(self.masters[name].detach())
        return {moment: state[moment] for moment in MOMENTS}

    def count(self, name: str) -> float:
        """AdamW's."""
        return float(self.optimizer.state[self.masters[name]][STEP])

    def set_count(self, name: str, steps: float) -> None:
        """Into AdamW."""
        self.optimizer.state[self.masters[name]][STEP].fill_(steps)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the model's parameters, where they are copies."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def gradients(self) -> Mapping[str, Tensor]:
        """Views of Megatron's buffers."""
        return {name: _main_grad(parameter) for name, parameter in self.parameters.items()}

    def update(self) -> None:
        """AdamW's step."""
        for name, grad in self.gradients().items():
            self.masters[name].grad = grad
        self.optimizer.step()
        self.refresh()

    def clear(self) -> None:
        """The buffers themselves are the engine's to clear."""
        self.optimizer.zero_grad()

    def groups(self) -> list[dict[str, Any]]:
        """One group."""
        return hyperparameters(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, parameters by number with a name for each; masters that are copies among the state, as `param`."""
        for name in self.masters:
            self.state(name)
        found = self.optimizer.state_dict()
        if self.has_copies:
            numbers = [number for group in found["param_groups"] for number in group["params"]]
            for number, master in zip(numbers, self.masters.values(), strict=True):
                found["state"][number] = {**found["state"][number], "param": master.detach()}
        return found


def _main_grad(parameter: Any) -> Tensor:
    grad: Tensor = parameter.main_grad
    return grad
