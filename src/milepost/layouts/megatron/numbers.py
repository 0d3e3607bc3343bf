"""Which layer and which expert a number in a classic Megatron file means.

Megatron keeps the layers of a stage in a list, so its own files count them from 0 on every stage of the pipeline and
in every chunk of a virtual pipeline; verl's older `model.pt` do the same. Other writers, milepost among them, count
over the whole model. Both kinds are told apart by the numbers alone:

    all stages together hold 0 .. n-1, each once        counted over the model
    every stage holds 0 .. k-1 of its own               counted on the stage; stages follow each other

The order of stages is that of the schedule: all pipeline ranks of virtual stage 0, then all of virtual stage 1. How
many layers a stage has is read off the numbers, so uneven stages need no word of their own. Experts of expert-parallel
ranks are counted in the same two ways.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from milepost.errors import DamagedError
from milepost.wording import ranges

Place = TypeVar("Place")
_EXPERTS = ".mlp.experts."


def is_expert(name: str) -> bool:
    """Whether a tensor is of an expert, by its name in any of Megatron's spellings; shared experts are none."""
    return _EXPERTS in name


def offsets(numbers: Mapping[Place, Collection[int]], order: Sequence[Place], what: str) -> dict[Place, int]:
    """What is added to the numbers of each place to count over the whole model.

    numbers:  the numbers that each place holds
    order:    the places, one after the other as the model runs through them
    what:     "layer" or "expert", for the message

    Raises DamagedError where the numbers are of neither kind.
    """
    held = {place: sorted(set(numbers[place])) for place in order}
    together = sorted(number for of_place in held.values() for number in of_place)
    if together == list(range(len(together))):
        return dict.fromkeys(order, 0)
    found: dict[Place, int] = {}
    before = 0
    for place in order:
        if held[place] != list(range(len(held[place]))):
            each = "; ".join(f"{place} has {ranges(held[place]) or 'none'}" for place in order)
            raise DamagedError(
                f"{what} numbers that are counted neither over the whole model nor anew on every rank: {each}"
            )
        found[place] = before
        before += len(held[place])
    return found
