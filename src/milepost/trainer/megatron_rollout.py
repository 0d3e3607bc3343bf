"""Generation by a model that lies on several ranks: the prompts in one forward, then token by token.

Keys and values of all tokens so far are kept where they were computed. Tokens are drawn where the logits are, on one
rank; all others get them. The draws are transformers' own: the same logits and the same random state give the same
tokens as `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from milepost.engines.base import Outputs, PipelinedModel
from milepost.trainer.batch import Sequences
from milepost.trainer.data import PromptBatch
from milepost.trainer.rollout import Sampling, SpecialTokens, response_mask


@torch.no_grad()
def decode(
    model: PipelinedModel,
    prompts: PromptBatch,
    sampling: Sampling,
    tokens: SpecialTokens,
    *,
    device: torch.device,
    turn: Callable[[], None] | None = None,
) -> Sequences:
    """Answer each prompt; see `rollout.generate`. All ranks that hold the model call it with the same prompts."""
    count = prompts.input_ids.shape[0]
    ids, mask = prompts.input_ids.to(device), prompts.attention_mask.to(device)
    if not count:
        ids = torch.full((1, 1), tokens.pad, device=device)
        mask = torch.ones_like(ids)
    width = ids.shape[1]
    warpers = _warpers(sampling)
    ends = torch.tensor(tokens.eos, device=device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=device)
    if not count:
        ended |= True

    def draw(number: int, outputs: Outputs) -> Tensor:
        scores: Tensor = warpers(cast(LongTensor, ids), outputs.logits[:, -1].float())
        if sampling.do_sample:
            drawn = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            drawn = scores.argmax(dim=-1)
        return model.one_of_peers(drawn)

    with model.remembering(len(ids), width, sampling.max_response_length) as memory:
        new = ids
        for _ in range(sampling.max_response_length):
            if turn is not None:
                turn()
            # All ranks take as many turns; those whose responses have ended, and whom nobody needs, only wait.
            if _all_ended(ended, together=model.lockstep or turn is not None):
                break
            if not model.lockstep and bool(ended.all()):
                continue
            drawn = model.forward_next(memory, new, mask, draw)
            drawn = torch.where(ended, torch.full_like(drawn, tokens.pad), drawn)
            new = drawn[:, None]
            ids = torch.cat([ids, new], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            ended = ended | torch.isin(drawn, ends)
    own = response_mask(ids[:, width:], tokens.eos)
    return Sequences(ids[:count], torch.cat([mask[:, :width], own], dim=1)[:count], own[:count])


def _all_ended(ended: Tensor, *, together: bool) -> bool:
    """Whether no response goes on: here, or anywhere, where ranks must go on together."""
    going = (~ended).any().long()
    if together:
        dist.all_reduce(going, op=dist.ReduceOp.MAX)
    return not bool(going)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """What transformers' `generate` does to the logits before it draws, in its order."""
    warpers = LogitsProcessorList()
    if sampling.do_sample:
        if sampling.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
