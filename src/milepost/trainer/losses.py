"""Log-probabilities and the two losses of PPO, as sums over tokens.

Every term is a sum over the real tokens of one micro-batch, never a mean: the mean that PPO asks for runs over all
tokens of the mini-batch, on all processes and in all micro-batches, and only the loop knows their number N. It calls

    (terms.loss * data_size / N).backward()

for each micro-batch; engines average gradients over the `data_size` data-parallel processes, which the factor undoes.
So a short response on one process weighs neither more nor less than a long one on another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.trainer.advantages import masked_sum

_LARGEST_LOG_RATIO = 20.0  # keeps the probability ratio finite, so that 0 * inf cannot make a NaN


@dataclass(frozen=True)
class PolicyTerms:
    """Sums over the real tokens of a micro-batch, each 0-d; only `loss` carries a gradient.

    `clipped / tokens` is the fraction of tokens at which the clipped surrogate ruled, `kl / tokens` the mean of
    old_logprobs - logprobs, an estimate of the KL from the sampling policy.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class ValueTerms:
    """Sums over the real tokens of a micro-batch, each 0-d; only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    tokens: Tensor


def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under softmax(logits / temperature).

    Args:
        logits: [batch, length, vocab_size]; those at position t predict `labels` at t, so the caller shifts.
        labels: [batch, length], token ids.
        temperature: that of the rollout, so that PPO's ratio compares the distributions that are sampled from.

    Returns:
        [batch, length], float32 whatever the dtype of the logits.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats: logsumexp(x) - sum_i p_i x_i.

    Args:
        logits: [..., vocab_size]. A logit of -inf is a token that cannot be drawn, and adds nothing.

    Returns:
        [...], float32.
    """
    scaled = logits.float() / temperature
    probabilities = torch.softmax(scaled, dim=-1)
    expected = torch.where(probabilities > 0, probabilities * scaled, 0).sum(-1)
    return torch.logsumexp(scaled, dim=-1) - expected


def policy_loss(
    old_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyTerms:
    """PPO's clipped surrogate with its sign turned, to be minimised (arXiv:1707.06347, equation 7).

        ratio = exp(logprobs - old_logprobs)
        loss  = sum_t max(-A_t * ratio_t, -A_t * clip(ratio_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

    Args:
        old_logprobs: [batch, response_length], under the policy that sampled; no gradient flows there.
        logprobs: the same under the policy being trained.
        advantages: the same shape, usually whitened.
        mask: the same shape.
        clip_ratio_low, clip_ratio_high: PPO's epsilon, below and above 1.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return PolicyTerms(
        loss=masked_sum(torch.maximum(plain, clipped), mask),
        clipped=masked_sum((clipped > plain).float(), mask).detach(),
        kl=masked_sum(-log_ratio, mask).detach(),
        tokens=mask.sum().detach(),
    )


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float) -> ValueTerms:
    """Squared error of the critic, clipped around its old values (as in OpenAI's ppo2 and in verl and TRL).

        near = old_values + clip(values - old_values, -cliprange_value, +cliprange_value)
        loss = 1/2 sum_t max((values_t - R_t)^2, (near_t - R_t)^2)

    Args:
        values: [batch, response_length], of the critic being trained.
        old_values: the same before the first update of the step.
        returns: R of `gae`, the same shape.
        mask: the same shape.
        cliprange_value: how far a value may move with profit.
    """
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    plain = (values - returns).square()
    clipped = (near - returns).square()
    return ValueTerms(
        loss=masked_sum(torch.maximum(plain, clipped), mask) / 2,
        clipped=masked_sum((clipped > plain).float(), mask).detach(),
        tokens=mask.sum().detach(),
    )
