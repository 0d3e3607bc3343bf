"""Moments as dist checkpoints of Megatron before 0.16 have them: every part of a weight flattened, ranks holding runs.

    optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<weight>    of a weight [X, Y] whose parts are [x, y]:
                                                                [X / x, Y / y, x * y]

Megatron calls that `fully_sharded_model_space`. The first dimensions count the parts, stacked layers among them, the
last one the elements of a part; each data-parallel rank wrote the run of it that it updates. Weights of one dimension
keep their shape. Source: megatron-core 0.16, `dist_checkpointing/strategies/torch.py`, the text of
`sharded_tensor_to_torch_sharded_tensor`. As with other state that does not say what it is, the float32 copies must be
the weights (`recovered`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from milepost.index import Box, Chunk, Shape, TensorEntry, contiguous_strides, itemsize, shifted
from milepost.layouts.flat_runs import boxes_of_run
from milepost.layouts.megatron.recovered import MASTER, ROUNDED, beginning


def unflattened(kinds: Mapping[str, TensorEntry], weight: TensorEntry) -> Mapping[str, TensorEntry] | None:
    """The moments of a weight, of its shape; None where they are in another form, or those of another weight.

    kinds:  `param`, the float32 copy, `exp_avg` and so on -> what lies in the checkpoint
    """
    found = {}
    for kind, entry in kinds.items():
        local = _local(entry.shape, weight.shape)
        chunks = [] if local is None else [part for chunk in entry.chunks for part in _parts(chunk, local, entry.dtype)]
        if local is None or sum(chunk.box.volume for chunk in chunks) != math.prod(weight.shape):
            return None
        found[kind] = TensorEntry(entry.dtype, weight.shape, tuple(chunks))
    return found if MASTER in found and _is_master(found[MASTER], weight) else None


def _local(flat: Shape, whole: Shape) -> Shape | None:
    """The shape of the parts of a weight; None where the flattened shape cannot be of parts of it."""
    if len(flat) != len(whole) + 1 or any(
        not blocks or size % blocks for size, blocks in zip(whole, flat, strict=False)
    ):
        return None
    local = tuple(size // blocks for size, blocks in zip(whole, flat, strict=False))
    return local if math.prod(local) == flat[-1] else None


def _parts(chunk: Chunk, local: Shape, dtype: str) -> Iterator[Chunk]:
    """A chunk of the flattened tensor as boxes of the weight."""
    *blocks, run = chunk.box.sizes
    *first, start = chunk.box.offsets
    *strides, _ = chunk.source.strides
    for block in itertools.product(*map(range, blocks)):
        corner = [(a + b) * n for a, b, n in zip(first, block, local, strict=True)]
        at = sum(index * stride for index, stride in zip(block, strides, strict=True))
        for box in boxes_of_run(local, start, run):
            offsets = tuple(a + b for a, b in zip(corner, box.offsets, strict=True))
            offset = shifted(chunk.source, at * itemsize(dtype))
            source = replace(chunk.source, offset=offset, strides=contiguous_strides(box.sizes))
            yield Chunk(Box(offsets, box.sizes), source)
            at += box.volume


def _is_master(master: TensorEntry, weight: TensorEntry) -> bool:
    """Whether a float32 tensor, rounded, is a weight: looked at is the beginning of a few boxes."""
    rounded = ROUNDED.get(weight.dtype)
    boxes = [chunk.box for chunk in master.chunks if chunk.box.volume]
    if rounded is None or master.dtype != "float32":
        return False
    looked_at = [beginning(boxes[number]) for number in sorted({0, len(boxes) // 2, len(boxes) - 1})] if boxes else []
    return all(np.array_equal(rounded(master.bits(box)), weight.bits(box)) for box in looked_at)
