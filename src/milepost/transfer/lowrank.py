"""What a LoRA adapter adds to a model's tensors on their way: to a weight a product of two small factors, W + scale *
rows @ columns (https://arxiv.org/abs/2106.09685, section 4.1), to a bias a small vector.

The product is computed in float32 in tiles of one fixed grid over the whole weight, whatever window asks for it, so the
result does not depend on the memory limit or the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milepost.cast import cast_bits
from milepost.edits import narrow
from milepost.index import Box, TensorEntry
from milepost.transfer.execute import OpenFiles, read_window
from milepost.transfer.plan import Window

_TILE_ROWS = 32
_TILE_PRODUCTS = 1 << 17
"""Multiplications of a tile. OpenBLAS, numpy's usual library, works on so few in the calling thread; above 2**18 it
wakes threads for each product, which on a busy machine took 200 times as long."""
_FACTOR_ELEMENTS = 1 << 20  # of each factor, and of the product, in memory at a time, unless one tile needs more

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """What is added to a weight of shape [n, m].

    rows:     [n, r], in the files' element type
    columns:  [r, m]
    scale:    factor of their product
    """

    rows: TensorEntry
    columns: TensorEntry
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight that it fits."""
        return self.rows.shape[0], self.columns.shape[1]

    def rows_from(self, start: int, length: int) -> LowRank:
        """The update of these rows of the weight alone."""
        return replace(self, rows=narrow(self.rows, 0, start, length))

    def apply(self, values: Floats, box: Box, files: OpenFiles) -> None:
        """Add the update of `box` to `values`, shape `box.sizes`, in place."""
        rank = self.columns.shape[0]
        (top, left), (height, width) = box.offsets, box.sizes
        tile_columns = max(8, _TILE_PRODUCTS // (_TILE_ROWS * rank))
        tall = max(1, _FACTOR_ELEMENTS // (rank * _TILE_ROWS)) * _TILE_ROWS
        wide = max(1, _FACTOR_ELEMENTS // (max(rank, _TILE_ROWS) * tile_columns)) * tile_columns
        for x, right in grid(left, left + width, self.shape[1], wide):
            columns = read_floats(self.columns, Box((0, x), (rank, right - x)), files)
            touched = list(grid(max(left, x), min(left + width, right), right, tile_columns))
            tiles = [np.ascontiguousarray(columns[:, a - x : b - x]) for a, b in touched]
            first, last = touched[0][0], touched[-1][1]
            for y, bottom in grid(top, top + height, self.shape[0], tall):
                rows = read_floats(self.rows, Box((y, 0), (bottom - y, rank)), files)
                for a, b in grid(max(top, y), min(top + height, bottom), bottom, _TILE_ROWS):
                    strip = Box((a, first), (b - a, last - first))
                    product = _product(rows[a - y : b - y], tiles)
                    product *= np.float32(self.scale)
                    shared = strip.intersect(box)
                    if shared is not None:
                        values[shared.within(box).slices()] += product[shared.within(strip).slices()]


@dataclass(frozen=True)
class Stacked:
    """What is added to a stack of weights of one shape: [experts, n, m], to each its own."""

    parts: tuple[LowRank, ...]

    def apply(self, values: Floats, box: Box, files: OpenFiles) -> None:
        """Add the update of `box` to `values`, shape `box.sizes`, in place."""
        inner = Box(box.offsets[1:], box.sizes[1:])
        for place, part in enumerate(self.parts[box.offsets[0] : box.offsets[0] + box.sizes[0]]):
            part.apply(values[place], inner, files)


@dataclass(frozen=True)
class Scaled:
    """What is added to a bias: `scale` times a vector of its shape."""

    vector: TensorEntry
    scale: float

    def apply(self, values: Floats, box: Box, files: OpenFiles) -> None:
        """Add the update of `box` to `values`, shape `box.sizes`, in place."""
        values += np.float32(self.scale) * read_floats(self.vector, box, files)


def _product(rows: Floats, tiles: list[Floats]) -> Floats:
    """rows @ columns, tile by tile."""
    out = np.empty((len(rows), sum(tile.shape[1] for tile in tiles)), np.float32)
    done = 0
    for tile in tiles:
        out[:, done : done + tile.shape[1]] = rows @ tile
        done += tile.shape[1]
    return out


def grid(start: int, end: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """The intervals of a grid of `step` over `size` that `start:end` touches."""
    for low in range(start - start % step, end, step):
        yield low, min(low + step, size)


def read_floats(entry: TensorEntry, box: Box, files: OpenFiles) -> Floats:
    """The values of a box as float32."""
    window = Window("", entry.dtype, box, tuple(entry.pieces(box)))
    return cast_bits(read_window(window, files), entry.dtype, "float32").view(np.float32)
