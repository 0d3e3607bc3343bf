"""Masked means, whitening over all processes, and generalised advantage estimation.

All tensors here are [batch, response_length]; `mask` is 1 for each generated token up to and including the first
end-of-sequence token, and 0 after it. A batch may be empty: another process may hold the sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all processes; may write it in place."""


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` over the real tokens, 0-d. What stands outside the mask does not count, not even a NaN."""
    return torch.where(mask.bool(), values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over the real tokens of this process, 0-d; 0 where there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, all_reduce: AllReduce | None = None, *, shift_mean: bool = True
) -> Tensor:
    """Scale `values` to mean 0 and variance 1 over the real tokens of all processes.

        whitened = (values - mean) / sqrt(variance + 1e-8)        variance with N - 1, as verl and TRL have it

    The sums are in float64 and in two passes (mean, then squared deviations), so that the result does not hang on how
    the tokens are spread over processes.

    Args:
        values, mask: [batch, response_length].
        all_reduce: called exactly twice, also for an empty batch, so that all processes meet in it. None: only the
            tokens at hand count.
        shift_mean: False keeps the mean.

    Returns:
        [batch, response_length] in the dtype of `values`, 0 outside the mask.
    """
    reduce = all_reduce or (lambda tensor: tensor)
    exact = values.double()
    count, total = reduce(torch.stack([mask.sum().double(), masked_sum(exact, mask)]))
    mean = total / count.clamp(min=1)
    squares = reduce(masked_sum((exact - mean).square(), mask).reshape(1)).squeeze(0)
    variance = squares / (count - 1).clamp(min=1)
    whitened = (exact - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0).to(values.dtype)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equations 11 and 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    with V and A zero behind the last real token: a response ends there, whether by an end-of-sequence token or at the
    length limit, and nothing is bootstrapped from the padding.

    Args:
        token_rewards: r_t, what the token at t earned.
        values: V_t, the critic's estimate in front of the token at t.
        mask: the real tokens, a run from the left in each row.
        gamma: discount per token.
        lam: 0 gives one-step differences, 1 the observed return minus the value.

    Returns:
        Advantages A (not whitened) and returns R, [batch, response_length], 0 outside the mask.
    """
    values = torch.where(mask.bool(), values, 0)
    rewards = torch.where(mask.bool(), token_rewards, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, :1]).squeeze(1)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values
