"""The chunks of a tensor that ZeRO flattened and cut into runs, held as a few numbers instead of one by one.

Run after run of the tensor's row-major elements lies in one file after the other; what a run is in the words of the
index is decided when it is looked at (`layouts.flat_runs`). A thousand ranks cost a tensor no memory of its own: where
their files and flat tensors begin is shared between all tensors of one flat tensor.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy.typing as npt

from milepost.index import Box, ByteSource, Chunk, CompactChunks, Shape, contiguous_strides
from milepost.layouts.flat_runs import boxes_of_run


@dataclass(frozen=True, slots=True, eq=False)
class Runs(CompactChunks):
    """Chunks of a tensor of `shape`, run after run.

    starts:    the element at which each run begins, in rising order; the last run ends with the tensor
    files:     the file of each run
    offsets:   the byte at which each run's flat tensor begins, shape `[runs]`; shared, never written to
    shift:     bytes from there to the run
    itemsize:  bytes of an element
    """

    shape: Shape
    starts: Sequence[int]
    files: Sequence[str]
    offsets: npt.NDArray[Any]
    shift: int
    itemsize: int

    def __len__(self) -> int:
        return sum(len(self._boxes(run)) for run in range(len(self.starts)))

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Chunk]:
        for run in range(len(self.starts)):
            yield from self._chunks(run)

    def pieces(self, box: Box, itemsize: int) -> Iterator[Chunk]:
        """The parts of chunks that make up `box`: only runs that it reaches are looked at."""
        if not box.volume:
            return
        strides = contiguous_strides(self.shape)
        first = sum(a * s for a, s in zip(box.offsets, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
        for run in range(bisect_right(self.starts, first) - 1, bisect_right(self.starts, last)):
            for chunk in self._chunks(run):
                shared = chunk.box.intersect(box)
                if shared is not None:
                    yield chunk.part(shared, itemsize)

    def tiles(self, shape: Shape) -> bool:
        """Runs that begin with the tensor and rise leave no gap."""
        starts = self.starts
        rising = isinstance(starts, range) or all(a < b for a, b in itertools.pairwise(starts))
        return shape == self.shape and rising and (starts[0] == 0 if starts else not math.prod(shape))

    def _boxes(self, run: int) -> list[Box]:
        end = self.starts[run + 1] if run + 1 < len(self.starts) else math.prod(self.shape)
        return boxes_of_run(self.shape, self.starts[run], end - self.starts[run])

    def _chunks(self, run: int) -> Iterator[Chunk]:
        position = int(self.offsets[run]) + self.shift
        for box in self._boxes(run):
            yield Chunk(box, ByteSource(self.files[run], position, contiguous_strides(box.sizes)))
            position += box.volume * self.itemsize


def even_starts(numel: int, world_size: int) -> range:
    """Where the ranks' runs begin under ZeRO-3: every ceil(numel / world_size) elements; a rank that gets nothing has
    no run."""
    return range(0, numel, -(-numel // world_size)) if numel else range(0)
