"""DoRA's update of a weight: m * (W + U) / |W + U|, with one magnitude m a row or a column, U what LoRA adds, and
|.| the Euclidean norm of that row or column (https://arxiv.org/abs/2402.09353, equation 5).

A norm needs the whole of its row, and a window may hold a part of it. So norms come from a first pass over W + U: made
a band of rows at a time when a window first touches the band, and kept, one number a row. Bands and the blocks in
which they are read lie on a fixed grid, so no bit of a norm depends on the windows.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from milepost.errors import MismatchError
from milepost.index import Box, TensorEntry
from milepost.transfer.execute import OpenFiles
from milepost.transfer.lowrank import Floats, LowRank, grid, read_floats

_BAND = 256  # rows (or columns) whose norms are made at once
_BLOCK = 1 << 20  # elements of W in memory at a time, beside the window


class Dora:
    """The update of one weight of shape [n, m].

    name:       the weight's, for errors
    weight:     W as the files hold it
    added:      U
    magnitude:  [n], or [m] where `dim` is 1
    dim:        the dimension along which the magnitudes lie: 0 for a row each, 1 for a column each
    """

    def __init__(self, name: str, weight: TensorEntry, added: LowRank, magnitude: TensorEntry, dim: int) -> None:
        self._name = name
        self._weight = weight
        self._added = added
        self._magnitude = magnitude
        self._dim = dim
        self._factors: dict[int, Floats] = {}
        self._locks = [Lock() for _ in range(0, weight.shape[dim], _BAND)]

    def apply(self, values: Floats, box: Box, files: OpenFiles) -> None:
        """Change `values`, shape `box.sizes`, in place."""
        self._added.apply(values, box, files)
        low, high = box.offsets[self._dim], box.offsets[self._dim] + box.sizes[self._dim]
        for start, end in grid(low, high, self._weight.shape[self._dim], _BAND):
            a, b = max(start, low), min(end, high)
            factors = self._factors_of(start, end, files)[a - start : b - start]
            if self._dim == 0:
                values[a - low : b - low] *= factors[:, None]
            else:
                values[:, a - low : b - low] *= factors

    def _factors_of(self, start: int, end: int, files: OpenFiles) -> Floats:
        """m / |W + U| of one band, made by the first worker that asks; others of the same band wait for it."""
        with self._locks[start // _BAND]:
            if start not in self._factors:
                self._factors[start] = self._make_factors(start, end, files)
            return self._factors[start]

    def _make_factors(self, start: int, end: int, files: OpenFiles) -> Floats:
        across = self._weight.shape[1 - self._dim]
        squares = np.zeros(end - start, np.float64)
        for left, right in grid(0, across, across, max(1, _BLOCK // _BAND)):
            box = Box((start, left), (end - start, right - left))
            if self._dim == 1:
                box = Box(box.offsets[::-1], box.sizes[::-1])
            values = read_floats(self._weight, box, files)
            self._added.apply(values, box, files)
            squares += np.einsum("ij,ij->i" if self._dim == 0 else "ij,ij->j", values, values, dtype=np.float64)
        norms = np.sqrt(squares).astype(np.float32)
        if not norms.all():
            line = start + int(np.flatnonzero(norms == 0)[0])
            kind = "row" if self._dim == 0 else "column"
            raise MismatchError(
                f"{self._name}: {kind} {line} of the base and its LoRA update is zero, and DoRA divides by its norm, "
                "so no merged weight exists; --lora keep exports the adapter"
            )
        magnitudes = read_floats(self._magnitude, Box((start,), (end - start,)), files)
        return magnitudes / norms
