"""Chunks of one tensor that form a grid, held as columns instead of one by one.

Sharding cuts a tensor along its dimensions, so its parts are the cells of a grid: 1,024 ranks x 100,000 tensors are a
hundred million chunks, and as many numbers here (`Grid.offsets`); whatever else they have is shared between tensors
that are cut alike. What is no grid stays a list of chunks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from milepost.index import Box, ByteSource, Chunk, CompactChunks, Shape

Cuts = tuple[int, ...]
"""Where the cells begin along one dimension, in rising order, and at last where they end."""
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Grid(CompactChunks):
    """Chunks that are the cells of a grid, in row-major order. Arrays are shared and never written to.

    cuts:     for each dimension, where the cells begin and end
    files:    the files that the cells lie in
    file:     number of each cell's file in `files`, shape `[cells of dimension 0, cells of dimension 1, ...]`
    offsets:  byte offset of each cell's first element as a multiple of `unit`; same shape
    strides:  each cell's strides in elements, one more dimension at the end; of length 1 along every other where all
              cells have the same ones
    unit:     bytes
    """

    cuts: tuple[Cuts, ...]
    files: tuple[str, ...]
    file: Numbers
    offsets: Numbers
    strides: Numbers
    unit: int = 1

    def __len__(self) -> int:
        return self.offsets.size

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        cell = np.unravel_index(range(len(self))[index], self.offsets.shape)
        low = tuple(cuts[i] for cuts, i in zip(self.cuts, cell, strict=True))
        sizes = tuple(cuts[i + 1] - cuts[i] for cuts, i in zip(self.cuts, cell, strict=True))
        strides = tuple(self._every_stride()[cell].tolist())
        return Chunk(
            Box(low, sizes), ByteSource(self.files[self.file[cell]], int(self.offsets[cell]) * self.unit, strides)
        )

    def __iter__(self) -> Iterator[Chunk]:
        starts = itertools.product(*(cuts[:-1] for cuts in self.cuts))
        sizes = itertools.product(*([b - a for a, b in itertools.pairwise(cuts)] for cuts in self.cuts))
        files, offsets = self.file.ravel().tolist(), self.offsets.ravel().tolist()
        for start, size, file, offset, strides in zip(
            starts, sizes, files, offsets, self._strides_in_order(), strict=True
        ):
            yield Chunk(Box(start, size), ByteSource(self.files[file], offset * self.unit, strides))

    def _every_stride(self) -> Numbers:
        return np.broadcast_to(self.strides, (*self.offsets.shape, len(self.cuts)))

    def _strides_in_order(self) -> Iterable[Shape]:
        if self.strides.size == len(self.cuts):
            return itertools.repeat(tuple(self.strides.ravel().tolist()), len(self))
        return map(tuple, self._every_stride().reshape(len(self), -1).tolist())

    def pieces(self, box: Box, itemsize: int) -> Iterator[Chunk]:
        """The parts of cells that make up `box`, found by bisection."""
        part: Grid | None = self
        for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if part is not None:
                part = part.crop(dim, low, low + size, itemsize)
        return iter(part or ())

    def tiles(self, shape: Shape) -> bool:
        """Cells of a grid are disjoint and leave no gap, so they tile what lies between their outer cuts."""
        return tuple((cuts[0], cuts[-1]) for cuts in self.cuts) == tuple((0, size) for size in shape)

    def crop(self, dim: int, low: int, high: int, itemsize: int) -> Grid | None:
        """What lies between `low` and `high` along one dimension, in its place; None where nothing does."""
        cuts = self.cuts[dim]
        if low <= cuts[0] and cuts[-1] <= high:
            return self
        if low >= high or low >= cuts[-1] or high <= cuts[0]:
            return None
        first, last = max(0, bisect_right(cuts, low) - 1), min(len(cuts) - 1, bisect_left(cuts, high))
        axis = (slice(None),) * dim
        cells = (*axis, slice(first, last))
        offsets, unit = self.offsets[cells], self.unit
        strides = self.strides if self.strides.shape[dim] == 1 else self.strides[cells]
        if low > cuts[first]:  # the first cells begin later now
            offsets, unit = offsets.astype(np.int64) * unit, 1
            edge = (*axis, slice(0, 1))
            offsets[edge] += (low - cuts[first]) * itemsize * strides[edge][..., dim]
        trimmed = _replaced(self.cuts, dim, _between(cuts, first, last, low, high))
        return replace(self, cuts=trimmed, file=self.file[cells], offsets=offsets, strides=strides, unit=unit)

    def moved(self, dim: int, by: int) -> Grid:
        """All cells moved along one dimension."""
        return replace(self, cuts=_replaced(self.cuts, dim, _moved(self.cuts[dim], by))) if by else self

    def rearranged(self, dims: Sequence[int | None]) -> Grid:
        """The grid with the dimensions `dims` of this one, where None is a new one of size 1. What is left out must be
        of size 1."""
        gone = tuple(dim for dim in range(len(self.cuts)) if dim not in dims)
        kept = [dim for dim in range(len(self.cuts)) if dim in dims]
        order = [kept.index(dim) for dim in dims if dim is not None]
        new = tuple(position for position, dim in enumerate(dims) if dim is None)

        def turned(column: Numbers, rest: tuple[int, ...] = ()) -> Numbers:
            return np.expand_dims(column.squeeze(gone).transpose(*order, *rest), new)

        steps = np.concatenate([self.strides, np.ones((*self.strides.shape[:-1], 1), np.int64)], -1)
        steps = steps[..., [-1 if dim is None else dim for dim in dims]]
        return replace(
            self,
            cuts=tuple((0, 1) if dim is None else self.cuts[dim] for dim in dims),
            file=turned(self.file),
            offsets=turned(self.offsets),
            strides=turned(steps, (len(order),)),
        )


@dataclass(frozen=True, slots=True)
class Lattice:
    """Boxes recognised as a grid: its cuts, and for each cell in row-major order the number of its box."""

    cuts: tuple[Cuts, ...]
    order: tuple[int, ...]


def lattice(boxes: Sequence[Box]) -> Lattice | None:
    """The grid that these boxes, none of them empty, are the cells of; None where they are not."""
    if not boxes or any(len(box.sizes) != len(boxes[0].sizes) for box in boxes):
        return None
    cuts: list[Cuts] = []
    for dim in range(len(boxes[0].sizes)):
        sides = {(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes}
        edges = sorted(sides)
        if any(a[1] != b[0] for a, b in itertools.pairwise(edges)):
            return None
        cuts.append((*(low for low, _ in edges), edges[-1][1]))
    numbers = {box.offsets: number for number, box in enumerate(boxes)}
    cells = list(itertools.product(*(c[:-1] for c in cuts)))
    if len(boxes) != len(cells) or numbers.keys() != set(cells):
        return None
    return Lattice(tuple(cuts), tuple(numbers[cell] for cell in cells))


def compact(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks as a Grid, where they are one and lie at known offsets of files; else as they are."""
    found = lattice([chunk.box for chunk in chunks])
    in_files = all(isinstance(chunk.source.offset, int) and chunk.source.data is None for chunk in chunks)
    if found is None or not in_files:
        return chunks
    ordered = [chunks[number] for number in found.order]
    files = tuple(dict.fromkeys(chunk.source.file for chunk in ordered))
    numbers = {file: number for number, file in enumerate(files)}
    shape = tuple(len(cuts) - 1 for cuts in found.cuts)
    return Grid(
        found.cuts,
        files,
        np.array([numbers[chunk.source.file] for chunk in ordered], np.int32).reshape(shape),
        np.array([chunk.source.start() for chunk in ordered], np.int64).reshape(shape),
        strides_of([chunk.source.strides for chunk in ordered], shape),
    )


def strides_of(strides: Sequence[Shape], cells: Shape) -> Numbers:
    """Strides of the cells of a grid, in row-major order, as `Grid.strides` has them."""
    if len(set(strides)) == 1:
        return np.array(strides[0], np.int64).reshape(*(1,) * len(cells), -1)
    return np.array(strides, np.int64).reshape(*cells, len(cells))


def joined(grids: Sequence[Grid], dim: int) -> Grid | None:
    """Grids one after the other along `dim`, each at its place already; None where that is no grid."""
    first = grids[0]
    ends = [grid.cuts[dim] for grid in grids]
    alike = all(_replaced(grid.cuts, dim, ()) == _replaced(first.cuts, dim, ()) for grid in grids)
    if not alike or any(a[-1] != b[0] for a, b in itertools.pairwise(ends)):
        return None
    files = first.files if all(grid.files is first.files for grid in grids) else _union(grids)
    numbers = {file: number for number, file in enumerate(files)}
    file = [
        grid.file if grid.files is files else np.array([numbers[f] for f in grid.files], np.int32)[grid.file]
        for grid in grids
    ]
    same_unit = all(grid.unit == first.unit for grid in grids)
    offsets = [grid.offsets if same_unit else grid.offsets.astype(np.int64) * grid.unit for grid in grids]
    same_strides = all(
        grid.strides.shape == first.strides.shape
        and grid.strides.size == len(first.cuts)
        and (grid.strides == first.strides).all()
        for grid in grids
    )
    strides = [grid._every_stride() for grid in grids]
    return Grid(
        _replaced(first.cuts, dim, _one_after_the_other(tuple(ends))),
        files,
        np.concatenate(file, dim),
        np.concatenate(offsets, dim),
        first.strides if same_strides else np.concatenate(strides, dim),
        first.unit if same_unit else 1,
    )


def _union(grids: Sequence[Grid]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(file for grid in grids for file in grid.files))


def _replaced(cuts: tuple[Cuts, ...], dim: int, value: Cuts) -> tuple[Cuts, ...]:
    return (*cuts[:dim], value, *cuts[dim + 1 :])


# Thousands of tensors are cut alike: equal results are one object, or the cuts would outweigh the offsets.
@lru_cache(maxsize=1024)
def _between(cuts: Cuts, first: int, last: int, low: int, high: int) -> Cuts:
    return (max(low, cuts[first]), *cuts[first + 1 : last], min(high, cuts[last]))


@lru_cache(maxsize=1024)
def _moved(cuts: Cuts, by: int) -> Cuts:
    return tuple(cut + by for cut in cuts)


@lru_cache(maxsize=1024)
def _one_after_the_other(ends: tuple[Cuts, ...]) -> Cuts:
    return (*(cut for cuts in ends for cut in cuts[:-1]), ends[-1][-1])
