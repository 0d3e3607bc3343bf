"""What the policy and the critic say of given sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from milepost.trainer.batch import Sequences
from milepost.trainer.losses import entropy_from_logits, logprobs_from_logits


def policy_forward(
    model: nn.Module, sequences: Sequences, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of every response token under the policy, and, if asked, the entropy in front of it.

    Args:
        model: a causal language model.
        temperature: that of the rollout.

    Returns:
        Two tensors [B, T] in float32; the second is None unless `entropy`.
    """
    responses = sequences.responses
    # The logits at position t predict token t + 1, so those of the last prompt token come first, the last ones not at
    # all. Only these are computed: for a large vocabulary the others would be most of the memory.
    keep = responses.shape[1] + 1
    logits: Tensor = _run(model, sequences, logits_to_keep=keep).logits[:, -keep:-1]
    logprobs = logprobs_from_logits(logits, responses, temperature)
    return logprobs, entropy_from_logits(logits, temperature) if entropy else None


def value_forward(model: nn.Module, sequences: Sequences) -> Tensor:
    """The critic's estimate in front of every response token, [B, T] in float32.

    Args:
        model: a token classifier with one label.
    """
    values: Tensor = _run(model, sequences).logits.squeeze(-1)
    return values[:, -sequences.response_mask.shape[1] - 1 : -1].float()


@torch.no_grad()
def in_micro_batches(
    function: Callable[[Sequences], Tensor],
    sequences: Sequences,
    micro_batches: Sequence[list[int]],
    channels: tuple[int, ...] = (),
) -> Tensor:
    """`function` of all sequences, some at a time and without gradients.

    Args:
        function: gives [b, T, *channels] for b sequences.
        micro_batches: the rows of each round, in order; empty ones are dummies, whose results are dropped.

    Returns:
        [B, T, *channels] in float32.
    """
    results = [function(sequences.select(rows))[: len(rows)] for rows in micro_batches]
    # A rank may have no sequence at all; its result is empty and has the right width all the same.
    empty = torch.zeros((0, sequences.response_mask.shape[1], *channels), device=sequences.input_ids.device)
    return torch.cat([*results, empty])


def _run(model: nn.Module, sequences: Sequences, **kwargs: Any) -> Any:
    return model(
        input_ids=sequences.input_ids,
        attention_mask=sequences.attention_mask,
        position_ids=sequences.position_ids,
        use_cache=False,
        **kwargs,
    )
