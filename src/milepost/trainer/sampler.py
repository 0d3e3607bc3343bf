"""Which prompts come next: a position in a seeded order of the whole data set, the same at any world size.

The order of epoch e is a permutation made from (seed, e) alone, and the stream of prompts is epoch 1, epoch 2, ... end
to end: a batch at the end of an epoch takes its rest from the next one. So the whole state is a few integers, and
after a resume on any number of processes every prompt still comes exactly once per epoch. With 1000 prompts and
batches of 128, eight batches end at offset 24 of epoch 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from milepost.errors import CallError

T = TypeVar("T")


@dataclass(frozen=True)
class Fingerprint:
    """What a data set is: its name for people, its length, and the xxh3-128 of its prompts and ground truths.

    Two data sets with the same length and digest are the same, whatever their files are called.
    """

    name: str
    length: int
    digest: str

    def same_data(self, other: Fingerprint) -> bool:
        return (self.length, self.digest) == (other.length, other.digest)

    def __str__(self) -> str:
        return f"{self.name} ({self.length} prompts, {self.digest[:8]})"


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """The order in which epoch `epoch` visits the prompts 0 ... length - 1.

    The prompts are sorted by raw 64-bit words of PCG64, seeded with (seed, epoch). numpy guarantees the words of a bit
    generator for all its versions and platforms; it guarantees that neither for `Generator.permutation` nor does torch
    for `randperm`, and a run may resume on another machine.
    """
    if not shuffle:
        return np.arange(length)
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(words, kind="stable")


def rank_slice(items: Sequence[T], rank: int, world_size: int) -> list[T]:
    """The part of a global batch that is `rank`'s: contiguous, in rank order, sizes differing by at most one.

    With fewer items than processes some get none. Together the parts are the batch, each item once.
    """
    start, stop = rank * len(items) // world_size, (rank + 1) * len(items) // world_size
    return list(items[start:stop])


class GlobalSampler:
    """The position in the stream of prompts. Every process holds the same one and takes its `rank_slice`.

    Attributes:
        epoch: the epoch that the next prompt belongs to, counted from 1.
        offset: how many prompts of that epoch are done, 0 ... length - 1.
    """

    def __init__(self, fingerprint: Fingerprint, seed: int, *, shuffle: bool = True) -> None:
        if fingerprint.length == 0:
            raise CallError(f"data set {fingerprint.name} is empty: there is nothing to train on")
        self.fingerprint = fingerprint
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 1
        self.offset = 0
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    @property
    def position(self) -> int:
        """How many prompts of the stream are done."""
        return (self.epoch - 1) * self.fingerprint.length + self.offset

    def next_batch(self, size: int) -> list[int]:
        """The next `size` prompts of the stream, as indices into the data set; moves on behind them.

        A batch larger than the data set holds prompts of several epochs.
        """
        batch: list[int] = []
        while len(batch) < size:
            part = self._order()[self.offset : self.offset + size - len(batch)]
            batch += part.tolist()
            self.offset += len(part)
            if self.offset == self.fingerprint.length:
                self.epoch, self.offset = self.epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it refers to; plain JSON values."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.fingerprint.length,
            "name": self.fingerprint.name,
            "digest": self.fingerprint.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go to a saved position. Returns a sentence for each thing that is not as the config has it.

        Another data set than the saved one: its first epoch starts at offset 0, since a position in one data set means
        nothing in another. Another seed or `shuffle`: the saved ones stay, or prompts would come twice or never.
        """
        saved = Fingerprint(name=state["name"], length=state["length"], digest=state["digest"])
        self.epoch, self.offset, self._order_of = 1, 0, None
        if not saved.same_data(self.fingerprint):
            return [
                f"the data set is {self.fingerprint}, the checkpoint was made with {saved}: "
                "starting at offset 0 of epoch 1 of the new data"
            ]
        warnings = [
            f"the config sets the data {what} to {here}; the order of the checkpoint goes on with {there}"
            for what, here, there in (
                ("seed", self.seed, state["seed"]),
                ("shuffle", self.shuffle, state["shuffle"]),
            )
            if here != there
        ]
        self.epoch, self.offset = state["epoch"], state["offset"]
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        return warnings

    def _order(self) -> NDArray[np.int64]:
        if self._order_of is None or self._order_of[0] != self.epoch:
            order = epoch_order(self.fingerprint.length, self.seed, self.epoch, shuffle=self.shuffle)
            self._order_of = (self.epoch, order)
        return self._order_of[1]
