"""What the policy and the critic say of given sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from milepost.engines.base import Inputs, Outputs, PipelinedModel
from milepost.trainer.batch import Sequences
from milepost.trainer.losses import entropy_from_logits, logprobs_from_logits

Model = Callable[..., Any]
"""A model, or what is called in its place (`EagerEngine.forward`)."""


def policy_forward(
    model: Model, sequences: Sequences, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of every response token under the policy, and, if asked, the entropy in front of it.

    Args:
        model: a causal language model.
        temperature: that of the rollout.

    Returns:
        Two tensors [B, T] in float32; the second is None unless `entropy`.
    """
    logits = _run(model, sequences, logits_to_keep=_kept(sequences)).logits
    return _of_logits(logits, sequences, temperature, entropy)


def value_forward(model: Model, sequences: Sequences) -> Tensor:
    """The critic's estimate in front of every response token, [B, T] in float32.

    Args:
        model: a token classifier with one label.
    """
    return _of_scores(_run(model, sequences).logits, sequences)


def joint_forward(
    model: Model, sequences: Sequences, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `policy_forward` and `value_forward` say, of a model that holds both (`PolicyAndValueWrapper`)."""
    logits, scores = _run(model, sequences, logits_to_keep=_kept(sequences))
    return *_of_logits(logits, sequences, temperature, entropy), _of_scores(scores, sequences)


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
    results = [function(sequences.select(rows)) for rows in micro_batches]
    return _joined(results, sequences, micro_batches, channels)


def evaluate(
    model: Any,
    function: Callable[[Model, Sequences], Tensor],
    sequences: Sequences,
    micro_batches: Sequence[list[int]],
    channels: tuple[int, ...] = (),
) -> Tensor:
    """`in_micro_batches` for a function of a model and sequences, also where the model lies on several ranks."""
    if not isinstance(model, PipelinedModel):
        return in_micro_batches(lambda micro: function(model, micro), sequences, micro_batches, channels)
    selected = [sequences.select(rows) for rows in micro_batches]
    results = model.forward_only(
        [pipeline_inputs(micro) for micro in selected],
        lambda number, outputs: function(already(outputs), selected[number]),
    )
    return _joined(results, sequences, micro_batches, channels)


def pipeline_inputs(sequences: Sequences) -> Inputs:
    """A micro-batch as a pipeline takes it."""
    return Inputs(sequences.input_ids, sequences.attention_mask, _kept(sequences))


def already(outputs: Outputs) -> Model:
    """In the place of a model whose outputs are there."""
    return lambda **_: outputs


def _joined(
    results: Sequence[Tensor], sequences: Sequences, micro_batches: Sequence[list[int]], channels: tuple[int, ...]
) -> Tensor:
    """What came of all rounds, without that of dummies."""
    kept = [result[: len(rows)] for result, rows in zip(results, micro_batches, strict=True)]
    # A rank may have no sequence at all; its result is empty and has the right width all the same.
    empty = torch.zeros((0, sequences.response_mask.shape[1], *channels), device=sequences.input_ids.device)
    return torch.cat([*kept, empty])


def _kept(sequences: Sequences) -> int:
    """How many of the last logits are needed. Those at position t predict token t + 1, so those of the last prompt
    token come first, the last ones not at all; for a large vocabulary the others would be most of the memory."""
    return sequences.response_mask.shape[1] + 1


def _of_logits(logits: Tensor, sequences: Sequences, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits = logits[:, -_kept(sequences) : -1]
    logprobs = logprobs_from_logits(logits, sequences.responses, temperature)
    return logprobs, entropy_from_logits(logits, temperature) if entropy else None


def _of_scores(scores: Tensor, sequences: Sequences) -> Tensor:
    return scores.squeeze(-1)[:, -_kept(sequences) : -1].float()


def _run(model: Model, sequences: Sequences, **kwargs: Any) -> Any:
    return model(
        input_ids=sequences.input_ids,
        attention_mask=sequences.attention_mask,
        position_ids=sequences.position_ids,
        use_cache=False,
        **kwargs,
    )
