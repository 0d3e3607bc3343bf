"""Optimizer state whose file does not name the parameters, given back to them: what such files share.

    buffers     flat buffers of the DistributedOptimizer
    numbered    whole tensors by number, of the optimizer that is not distributed
    flattened   parts of weights in dist checkpoints, flattened
    buckets     flat buckets of the DistributedOptimizer in dist checkpoints

The order of the parameters is the model's, which its file has, changed by rules of Megatron's. That the rules are the
ones by which a file was written is not believed but proved: the optimizer's float32 copy of each parameter, rounded to
the weight's element type, must be the weight. What does not pass is left, with a reason; so is what passes in two ways.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from milepost.cast import cast_bits
from milepost.index import Bits, Box, ByteSource, Chunk, TensorEntry
from milepost.layouts.inert import TensorRef
from milepost.layouts.megatron.files import RankFile
from milepost.layouts.megatron.numbers import is_expert
from milepost.layouts.torchfile import TorchFile

Given = TypeVar("Given")
MASTER = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")
NO_PARAMETERS = ("_extra_state", "expert_bias", "tokens_per_expert")
"""How the names end of what a model holds besides its parameters."""
ALIGNMENT = 64
"""Elements: each parameter begins at a multiple of them in a flat buffer."""
_SAMPLE = 4096  # elements that are compared at a place
FROZEN = "or some of these were frozen, and such have no state"
"""What else may be the reason where no order fits."""

Parameter = tuple[int, str]
"""A chunk of a rank's model, and a name in it."""
States = Mapping[Parameter, Mapping[str, TensorRef]]
"""`MASTER` and `MOMENTS` of each parameter, of its shape."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The optimizer state of all ranks, as far as it could be read.

    states:  by a rank's number: the file, and what of it is each parameter's
    steps:   how many the optimizer has counted
    unread:  why there is none, in words
    """

    states: Mapping[int, tuple[TorchFile, States]] = field(default_factory=dict)
    steps: float = 0.0
    unread: str = ""

    def of(self, rank: int, parameter: Parameter) -> Iterator[tuple[str, TorchFile, TensorRef]]:
        """Kind, file and place of what there is of a rank's parameter."""
        if rank in self.states:
            file, states = self.states[rank]
            for kind, ref in states.get(parameter, {}).items():
                yield kind, file, ref

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that were read."""
        return tuple(dict.fromkeys(file.path for file, _ in self.states.values()))


def counted(states: Mapping[int, tuple[TorchFile, States]], counts: set[float]) -> Recovered:
    """States with the count of steps that all files agree on."""
    steps = agreed(counts)
    return Recovered(unread=steps) if isinstance(steps, str) else Recovered(states, steps)


def agreed(counts: set[float]) -> float | str:
    """The one count of steps, or why there is none."""
    if len(counts) == 1:
        return next(iter(counts))
    said = "different counts" if counts else "no count"
    return f"optimizer state: the files of the ranks have {said} of its steps, which AdamW needs"


def count_entry(path: Path, steps: float) -> TensorEntry:
    """A count of steps as the tensor that others have of it."""
    return TensorEntry("float32", (), (Chunk(Box((), ()), ByteSource(str(path), 0, (), struct.pack("<f", steps))),))


def parameters_of(rank: RankFile, part: int | None) -> list[Parameter]:
    """A rank's parameters, in the order of its model.

    part:  0 for those that are no experts, 1 for experts, which have an optimizer of their own where they are dealt out
           to ranks; None for all
    """
    return [
        (stage, name)
        for stage, chunk in enumerate(rank.chunks)
        for name, value in chunk.items()
        if isinstance(value, TensorRef)
        and not name.endswith(NO_PARAMETERS)
        and (part is None or is_expert(name) == bool(part))
    ]


def optimizers_of(rank: RankFile) -> list[tuple[int | None, Mapping[str, Any]]]:
    """The optimizers in a file of Megatron-LM: of which part of the parameters, and what was saved."""
    root = rank.file.root
    found = root.get("optimizer") if isinstance(root, dict) else None
    several = isinstance(found, list)
    numbered = enumerate(found if isinstance(found, list) else [found])
    return [(number if several else None, saved) for number, saved in numbered if isinstance(saved, dict)]


def aligned(element: int, to: int = ALIGNMENT) -> int:
    """The first element from `element` on at which a parameter may begin: a multiple of `to`."""
    return -(-element // to) * to


def by_type(parameters: Iterable[Given], dtype: Callable[[Given], str]) -> list[list[Given]]:
    """Those of each buffer of a chunk of the model: of one element type, types in the order in which they occur."""
    groups: dict[str, list[Given]] = {}
    for parameter in parameters:
        groups.setdefault(dtype(parameter), []).append(parameter)
    return list(groups.values())


def cut(flat: TensorRef, start: int, like: TensorRef) -> TensorRef:
    """The part of a flat tensor that begins at `start`, of the shape of a parameter."""
    strides = tuple(math.prod(like.shape[dim + 1 :]) for dim in range(len(like.shape)))
    return TensorRef(flat.dtype, like.shape, strides, flat.storage, flat.offset + start)


def is_master(file: TorchFile, master: TensorRef, model: TorchFile, weight: TensorRef) -> bool:
    """Whether a float32 tensor, rounded, is a weight: looked at are both ends."""
    rounded = ROUNDED.get(weight.dtype)
    alike = master.dtype == "float32" and master.shape == weight.shape
    if rounded is None or not alike or any(cut(ref, 0, ref).strides != ref.strides for ref in (master, weight)):
        return False
    size = math.prod(weight.shape)
    for first in {0, max(0, size - _SAMPLE)}:
        count = min(_SAMPLE, size - first)
        if not np.array_equal(rounded(_run(file, master, first, count)), _run(model, weight, first, count)):
            return False
    return True


def _run(file: TorchFile, ref: TensorRef, first: int, count: int) -> Bits:
    return file.entry(TensorRef(ref.dtype, (count,), (1,), ref.storage, ref.offset + first)).bits()


def beginning(box: Box) -> Box:
    """The first elements of a box, as a box."""
    sizes, left = [], _SAMPLE
    for size in reversed(box.sizes):
        sizes.append(min(size, max(1, left)))
        left //= max(1, size)
    return Box(box.offsets, tuple(reversed(sizes)))


ROUNDED: Mapping[str, Callable[[Bits], Bits]] = MappingProxyType(
    {dtype: partial(cast_bits, source="float32", target=dtype) for dtype in ("float32", "bfloat16", "float16")}
)
"""Element type -> what the bits of a float32 become in it."""
