"""Flat runs: a part of a tensor that is one run of its row-major elements, as ZeRO cuts tensors over ranks.

ZeRO flattens a tensor and gives each rank the next run of elements, wherever that begins and ends. In the words of the
index such a run is a few boxes: part of a row, whole rows, part of a row, and so on for each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from milepost.index import Box, Shape


def boxes_of_run(shape: Shape, start: int, length: int) -> list[Box]:
    """The boxes that the elements [start, start + length) of a row-major tensor make up, in the order of the run.

    Each box is itself one run, so the first holds the first `volume` elements of the run, the second the next ones. At
    most 2 * ndim - 1 boxes come back; none for a run of no elements.

        boxes_of_run((4, 5), 3, 9) == [Box((0, 3), (1, 2)), Box((1, 0), (1, 5)), Box((2, 0), (1, 2))]

    Raises ValueError where the run does not lie inside the tensor.
    """
    if start < 0 or length < 0 or start + length > math.prod(shape):
        raise ValueError(f"elements {start} to {start + length} lie outside shape {list(shape)}")
    return list(_boxes(shape, start, length)) if length else []


def rank_run(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Start and length of a rank's run of a tensor under ZeRO-3: ceil(numel / world_size) elements each, the last
    ranks with fewer or none. What a file holds beyond `length` is padding."""
    part = -(-numel // world_size)
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def _boxes(shape: Shape, start: int, length: int) -> Iterator[Box]:
    if len(shape) < 2:
        yield Box((start,), (length,)) if shape else Box((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    stop = start + length
    first, skip = divmod(start, row)
    if skip:
        # The run begins inside a row: that row's part by itself.
        taken = min(row - skip, length)
        yield from _in_row(first, _boxes(inner, skip, taken))
        first += 1
    last, rest = divmod(stop, row)
    if last > first:
        yield Box((first,) + (0,) * len(inner), (last - first, *inner))
    if rest and last >= first:
        yield from _in_row(last, _boxes(inner, 0, rest))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in boxes)
