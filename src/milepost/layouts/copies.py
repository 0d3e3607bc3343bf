"""A rank's file whose content is another rank's, whatever rank it names.

The archive notes a CRC-32 for each storage, so equal content shows without reading it. Two ranks that hold different
boxes and, in every tensor, the same bytes are refused, unless all these bytes repeat one value: moments before the
first step are zeros on every rank, and norms ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from milepost.errors import DamagedError
from milepost.index import Box, bits_dtype, itemsize
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile

Pieces = Sequence[tuple[TensorRef, Box]]
_SAMPLE = (
    1 << 16
)  # bytes of a shard that are read to tell a repeated value, and to tell that equal CRC-32s are no chance


def refuse_copies(files: Sequence[TorchFile], tensors: Sequence[Sequence[Pieces]]) -> None:
    """Raise DamagedError where a file holds what another one holds, though their boxes differ.

    tensors: for each sharded tensor the pieces of every rank, in rank order; others may be empty or left out
    """
    sharded = [of_ranks for of_ranks in tensors if len(of_ranks) == len(files)]
    first: dict[tuple[Any, ...], int] = {}
    for rank, file in enumerate(files):
        checksums = {record.name: (record.crc32, record.size) for record in file.records()}
        content = tuple(
            (checksums.get(f"data/{ref.storage.key}"), ref.shape, ref.strides, ref.offset)
            for of_ranks in sharded
            for ref, box in of_ranks[rank]
            if box.volume
        )
        other = first.setdefault(content, rank)
        if content and other != rank and _copied(files[other], file, [(t[other], t[rank]) for t in sharded]):
            raise DamagedError(
                f"{file.path}: holds the same values as {files[other].path.name} in every sharded tensor, though they "
                "are to hold different parts; one was written over the other"
            )


def _copied(left: TorchFile, right: TorchFile, pairs: list[tuple[Pieces, Pieces]]) -> bool:
    """Whether two files of equal checksums hold equal values, not all alike, in places that are to differ."""
    if all([box for _, box in ours] == [box for _, box in theirs] for ours, theirs in pairs):
        return False  # replicas
    telling = False
    with left.path.open("rb", buffering=0) as one, right.path.open("rb", buffering=0) as two:
        for ours, theirs in pairs:
            for (ref, box), (twin, other_box) in zip(ours, theirs, strict=True):
                sample = _sample(one.fileno(), left, ref)
                if sample != _sample(two.fileno(), right, twin):
                    return False
                values = np.frombuffer(sample, bits_dtype(ref.dtype))
                telling |= box != other_box and bool((values != values[:1]).any())
    return telling


def _sample(fd: int, file: TorchFile, ref: TensorRef) -> bytes:
    chunk = file.chunk(ref)
    size = itemsize(ref.dtype)
    return os.pread(fd, min(chunk.span() * size, _SAMPLE), chunk.source.start())
