"""Generation: responses to a rank's prompts, by transformers' `generate` on the sharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from milepost.engines.base import PipelinedModel
from milepost.trainer.batch import Sequences
from milepost.trainer.data import PromptBatch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_k` of 0 or less and `top_p` of 1 leave all tokens in."""

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = True


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that end a response, and the one that fills up rows."""

    eos: tuple[int, ...]
    pad: int


def generate(
    model: Any,
    prompts: PromptBatch,
    sampling: Sampling,
    tokens: SpecialTokens,
    *,
    device: torch.device,
    ranks: int = 1,
    turn: Callable[[], None] | None = None,
) -> Sequences:
    """Answer each prompt.

    Every rank calls it together, also one without prompts (it answers a dummy and drops it), and all go on until the
    last response of all ranks has ended: the forwards gather weights from every rank.

    Args:
        model: a causal language model, whose own `generation_config` holds no settings (see `models.load_model`).
        prompts: padded on the left.
        ranks: number of ranks that generate together.
        turn: called in front of every forward, as often on every rank; it may raise, and then the model is as it was.

    Returns:
        As many sequences as prompts, on `device`. The response part is as wide as the longest response here.
    """
    if isinstance(model, PipelinedModel):
        from milepost.trainer.megatron_rollout import decode  # noqa: PLC0415  it needs what is defined here

        return decode(model, prompts, sampling, tokens, device=device, turn=turn)
    count = prompts.input_ids.shape[0]
    input_ids, attention_mask = prompts.input_ids.to(device), prompts.attention_mask.to(device)
    if not count:
        input_ids = torch.full((1, 1), tokens.pad, device=device)
        attention_mask = torch.ones_like(input_ids)
    settings: dict[str, Any] = {"do_sample": sampling.do_sample}
    if sampling.do_sample:
        # transformers spells "all tokens" as top_k=0.
        settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=sampling.max_response_length,
        eos_token_id=list(tokens.eos),
        pad_token_id=tokens.pad,
        use_cache=True,
        **settings,
    )
    was_training = model.training
    model.eval()
    # In front of the engine's own hooks: where it raises, no weight has been gathered yet.
    hook = None if turn is None else model.register_forward_pre_hook(lambda *_: turn(), prepend=True)
    try:
        with torch.no_grad():
            output: Tensor = model.generate(
                input_ids=input_ids, attention_mask=attention_mask, generation_config=config, synced_gpus=ranks > 1
            )
    finally:
        model.train(was_training)
        if hook is not None:
            hook.remove()
    responses = output[:, input_ids.shape[1] :]
    mask = response_mask(responses, tokens.eos)
    return Sequences(output[:count], torch.cat([attention_mask, mask], dim=1)[:count], mask[:count])


def response_mask(responses: Tensor, eos: tuple[int, ...]) -> Tensor:
    """1 for every token up to and including the first that ends a response, [B, T] of the tokens' type."""
    ends = torch.isin(responses, torch.tensor(eos, device=responses.device)).long()
    return (ends.cumsum(-1) - ends == 0).to(responses.dtype)
