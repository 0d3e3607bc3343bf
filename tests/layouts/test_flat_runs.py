"""A flat run of a tensor as boxes: every run of small tensors of every rank, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milepost.index import Box
from milepost.layouts.flat_runs import boxes_of_run, rank_run

SHAPES = [(), (1,), (7,), (4, 5), (1, 6), (6, 1), (3, 2, 4), (2, 1, 3), (2, 3, 2, 2), (0, 4), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_run_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = np.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for length in range(numel - start + 1):
            boxes = boxes_of_run(shape, start, length)
            parts = [whole[box.slices()].reshape(-1) for box in boxes]
            assert np.array_equal(np.concatenate([*parts, np.zeros(0, int)]), np.arange(start, start + length))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            assert all(box.volume for box in boxes)


def test_the_example_of_the_docstring() -> None:
    assert boxes_of_run((4, 5), 3, 9) == [Box((0, 3), (1, 2)), Box((1, 0), (1, 5)), Box((2, 0), (1, 2))]


def test_whole_rows_are_one_box() -> None:
    assert boxes_of_run((4, 5, 2), 10, 20) == [Box((1, 0, 0), (2, 5, 2))]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, -1), (3, 18)])
def test_a_run_outside_of_the_tensor_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="lie outside shape"):
        boxes_of_run((4, 5), start, length)


def test_runs_of_the_ranks_tile_the_tensor_and_leave_the_padding_out() -> None:
    # Case 23: parameters of 7, 10 and 1 elements on 2 ranks, and more ranks than elements.
    assert [rank_run(7, 2, rank) for rank in range(2)] == [(0, 4), (4, 3)]
    assert [rank_run(10, 2, rank) for rank in range(2)] == [(0, 5), (5, 5)]
    assert [rank_run(1, 3, rank) for rank in range(3)] == [(0, 1), (1, 0), (1, 0)]
    assert [rank_run(9, 4, rank) for rank in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 0)]
