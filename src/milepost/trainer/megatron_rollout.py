"""Generation by a model that lies on several ranks: token by token, each a forward of the whole sequences.

Nothing of a forward is kept for the next one (there is no KV cache), so the cost of T tokens grows with T squared:
right for short responses and small models, and the same numbers as in training. Tokens are drawn where the logits are,
on one rank; all others get them. The draws are transformers' own: the same logits and the same random state give the
same tokens as `generate`.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from milepost.engines.base import Inputs, Outputs, PipelinedModel
from milepost.trainer.batch import Sequences
from milepost.trainer.data import PromptBatch
from milepost.trainer.rollout import Sampling, SpecialTokens, response_mask


@torch.no_grad()
def decode(
    model: PipelinedModel, prompts: PromptBatch, sampling: Sampling, tokens: SpecialTokens, *, device: torch.device
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

    for _ in range(sampling.max_response_length):
        if _all_ended(ended, model):
            break
        (drawn,) = model.forward_only([Inputs(ids, mask, 1)], draw)
        drawn = torch.where(ended, torch.full_like(drawn, tokens.pad), drawn)
        ids = torch.cat([ids, drawn[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        ended = ended | torch.isin(drawn, ends)
    own = response_mask(ids[:, width:], tokens.eos)
    return Sequences(ids[:count], torch.cat([mask[:, :width], own], dim=1)[:count], own[:count])


def _all_ended(ended: Tensor, model: PipelinedModel) -> bool:
    """Whether no response goes on: here, or anywhere, where ranks must go on together."""
    going = (~ended).any().long()
    if model.lockstep:
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
