"""The sequences of one training step on one rank, and how they are cut into mini-batches and micro-batches.

Every rank must enter every forward and backward, since FSDP gathers weights in them. So all cuts are made from the
global picture, `Spread`, which each rank draws for itself from three numbers: all agree on how many micro-batches
there are, and a rank that has no sequence for one of them takes part with a dummy whose mask is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from milepost.trainer.sampler import rank_slice


@dataclass(frozen=True)
class Spread:
    """Which sequences of a global batch lie on which rank.

    Mini-batch i is the positions [i * mini_batch_size, (i + 1) * mini_batch_size) of the global batch, whatever the
    number of ranks; each mini-batch is dealt out evenly, so that no rank is idle during one.
    """

    positions: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(batch_size: int, mini_batch_size: int, world_size: int) -> Spread:
        """Deal out `batch_size` positions."""
        minis = [range(low, min(low + mini_batch_size, batch_size)) for low in range(0, batch_size, mini_batch_size)]
        return Spread(
            tuple(tuple(p for mini in minis for p in rank_slice(mini, rank, world_size)) for rank in range(world_size))
        )

    @property
    def size(self) -> int:
        """Number of sequences of the global batch."""
        return sum(map(len, self.positions))

    def rows(self, rank: int, low: int, high: int) -> list[int]:
        """Which of a rank's own sequences lie at the positions [low, high)."""
        return [row for row, position in enumerate(self.positions[rank]) if low <= position < high]

    def micro_batches(self, rank: int, low: int, high: int, size: int) -> list[list[int]]:
        """A rank's sequences at the positions [low, high), `size` at a time: as many lists on every rank, the last of
        them empty on a rank that has fewer."""
        most = max(len(self.rows(other, low, high)) for other in range(len(self.positions)))
        rows = self.rows(rank, low, high)
        return [rows[start : start + size] for start in range(0, most, size)]


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, on this rank. P = prompt length, T = response length, B = sequences.

    input_ids:       [B, P + T], prompts padded on the left, responses on the right
    attention_mask:  [B, P + T], 1 for real tokens
    response_mask:   [B, T], 1 for the generated tokens up to and including the first end-of-sequence token
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    @property
    def responses(self) -> Tensor:
        """[B, T]"""
        return self.input_ids[:, self.input_ids.shape[1] - self.response_mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """[B, P + T]: real tokens are counted from 0, wherever the padding lies."""
        return (self.attention_mask.cumsum(-1) - 1).clamp(min=0)

    def select(self, rows: list[int]) -> Self:
        """Some of the rows. For none, one dummy row: real tokens for the model to read, none of them counted."""
        tensors: dict[str, Tensor] = {field.name: getattr(self, field.name) for field in fields(self)}
        if rows:
            index = torch.tensor(rows, device=self.input_ids.device)
            return type(self)(**{name: tensor[index] for name, tensor in tensors.items()})
        dummy = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in tensors.items()}
        dummy["attention_mask"] = torch.ones_like(dummy["attention_mask"])
        return type(self)(**dummy)


@dataclass(frozen=True)
class Experience(Sequences):
    """Sequences with all that an update needs, each [B, T] and 0 outside the mask.

    old_logprobs:  under the policy that sampled
    ref_logprobs:  under the reference
    old_values:    the critic's estimates before the first update
    advantages, returns:  of GAE
    """

    old_logprobs: Tensor
    ref_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
