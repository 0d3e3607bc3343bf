"""The KL to the reference policy: estimators per token, its place in the reward, and controllers of its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from milepost.trainer.schema import KLControlConfig

_LARGEST_LOG_RATIO = 20.0  # exp of it is 5e8: far outside any trust region, and still finite in float32


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token.

    With d = logprobs - ref_logprobs (J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html):

        kl          d                    k1: unbiased, may be negative
        abs         |d|
        mse         d^2 / 2              k2: biased, never negative
        low_var_kl  exp(-d) - 1 + d      k3: unbiased, never negative

    In `low_var_kl`, d is clamped to [-20, 20] and the result to at most 10, as verl does, so that one token of
    vanishing probability cannot overflow a sum.

    Args:
        logprobs: log-probability of each token under the policy, any shape.
        ref_logprobs: the same under the reference.
        kind: one of the names above.
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "kl":
            return difference
        case "abs":
            return difference.abs()
        case "mse":
            return difference.square() / 2
        case "low_var_kl":
            bounded = difference.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
            return (torch.expm1(-bounded) + bounded).clamp(max=10.0)
    raise ValueError(f"unknown estimator of the KL: {kind!r}")


def apply_kl_penalty(
    scores: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float, kind: str = "kl"
) -> tuple[Tensor, Tensor]:
    """Turn one score per response into a reward per token (arXiv:1909.08593, section 2; InstructGPT, arXiv:2203.02155).

        r_t = -kl_coef * KL_t  +  (score, if t is the last real token)

    Args:
        scores: [batch], what the reward function said of each response.
        old_logprobs, ref_logprobs: [batch, response_length], under the policy that sampled and under the reference.
        mask: [batch, response_length].
        kl_coef: weight of the KL; 0 leaves the score alone.
        kind: estimator, see `kl_estimate`.

    Returns:
        Token rewards and the KL per token, both [batch, response_length] and 0 outside the mask. A row without a real
        token gets no score.
    """
    real = mask.bool()
    kl = torch.where(real, kl_estimate(old_logprobs, ref_logprobs, kind), 0)
    following = torch.nn.functional.pad(real[:, 1:], (0, 1))
    last = real & ~following
    return torch.where(last, scores.to(kl.dtype).unsqueeze(1), 0) - kl_coef * kl, kl


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over the real tokens of each response, [batch]; 0 for a response without any.

    Averaged over the sequences of all processes, the KL in this form is what `target_kl` is compared with (verl's
    meaning of it: nats per token).
    """
    return torch.where(mask.bool(), values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


class KLController(Protocol):
    """Holds the coefficient of the KL in the reward, `value`, and what of it must survive a restart."""

    value: float

    def update(self, current_kl: float, sequences: int) -> None:
        """Take in the mean KL per token over the `sequences` responses of one step, on all processes alike."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the controller has learnt: its kind and its coefficient."""

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Take up a saved state. Returns a sentence where it could not be taken as it is, else None."""


class FixedKLController:
    """A coefficient that stays what the config says. A config changed between two runs wins over the saved state."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, sequences: int) -> None:
        """Nothing follows from the KL here."""

    def state_dict(self) -> dict[str, Any]:
        return {"type": "fixed", "kl_coef": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        if state["type"] == "fixed" and state["kl_coef"] == self.value:
            return None
        return (
            f"KL coefficient {self.value} from the config, not {state['kl_coef']} ({state['type']}) from the checkpoint"
        )


class AdaptiveKLController:
    """A coefficient that follows the KL towards a target (arXiv:1909.08593, section 2.2).

    error = clip(KL / target - 1, -0.2, 0.2)
    coef *= 1 + error * sequences / horizon
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, sequences: int) -> None:
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * sequences / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"type": "adaptive", "kl_coef": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        self.value = float(state["kl_coef"])
        if state["type"] == "adaptive":
            return None
        return f"the adaptive KL controller starts from the fixed coefficient {self.value} of the checkpoint"


def make_kl_controller(config: KLControlConfig) -> KLController:
    """The controller that `algorithm.kl_ctrl` asks for."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)
