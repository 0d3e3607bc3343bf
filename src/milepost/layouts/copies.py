"""A rank's file whose content is another rank's, whatever rank it names.

The archive notes a CRC-32 for each storage, so equal content shows without reading it. Two ranks that hold different
boxes and, in every tensor, the same bytes are refused, unless all these bytes repeat one value: moments before the
first step are zeros on every rank, and norms ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

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
    first: dict[bytes, int] = {}
    for rank, file in enumerate(files):
        content = content_of(file, (piece for of_ranks in sharded for piece in of_ranks[rank]))
        other = first.setdefault(content, rank)
        if content and other != rank:
            refuse_copy(files[other], file, [(t[other], t[rank]) for t in sharded])


def content_of(file: TorchFile, pieces: Iterable[tuple[TensorRef, Box]]) -> bytes:
    """A digest of the checksums of pieces of a file that are not empty; empty where there are none."""
    hashed = xxhash.xxh3_128()
    some = False
    for ref, box in pieces:
        if box.volume:
            hashed.update(repr((file.checksum(ref), ref.shape, ref.strides, ref.offset)).encode())
            some = True
    return hashed.digest() if some else b""


def refuse_copy(left: TorchFile, right: TorchFile, pairs: Sequence[tuple[Pieces, Pieces]]) -> None:
    """Raise DamagedError where two files of equal checksums hold equal values in places that are to differ.

    pairs: the pieces of both files, for each sharded tensor
    """
    if _copied(left, right, pairs):
        raise DamagedError(
            f"{right.path}: holds the same values as {left.path.name} in every sharded tensor, though they "
            "are to hold different parts; one was written over the other"
        )


def _copied(left: TorchFile, right: TorchFile, pairs: Sequence[tuple[Pieces, Pieces]]) -> bool:
    """Whether two files hold equal values, not all alike, in places that are to differ."""
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
