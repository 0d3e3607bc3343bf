"""Plans: every element moved exactly once, in windows of bounded size that are runs of the destination."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, boxes_in, pictures

from milepost.errors import IncompleteError
from milepost.index import Box, ByteSource, Chunk, TensorEntry, TensorIndex, contiguous_strides, itemsize
from milepost.transfer import plan, windows
from milepost.transfer.plan import MOST_PIECES


def _counted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices()] += 1
    return counts


@given(st.data(), pictures(), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_a_wanted_box_is_moved_exactly_once_in_bounded_runs(data: st.DataObject, picture: Picture, limit: int) -> None:
    entry = picture.entry
    wanted = data.draw(boxes_in(entry.shape))
    moved = list(plan(TensorIndex({"w": entry}, "fsdp"), [("w", wanted)], limit))
    expected = _counted(entry.shape, [wanted])
    assert np.array_equal(_counted(entry.shape, [window.box for window in moved]), expected)
    inside = np.arange(math.prod(wanted.sizes)).reshape(wanted.sizes)
    next_element = 0
    for window in moved:
        assert (window.name, window.dtype) == ("w", entry.dtype)
        assert window.nbytes <= max(limit, itemsize(entry.dtype))
        # Windows are runs of the wanted box in row-major order, one after the other.
        places = inside[window.box.within(wanted).slices()].ravel()
        assert places.tolist() == list(range(next_element, next_element + len(places)))
        next_element += len(places)
        pieces = [piece.box for piece in window.pieces]
        assert np.array_equal(_counted(entry.shape, pieces), _counted(entry.shape, [window.box]))
        assert all(piece.volume for piece in pieces)


@given(pictures(), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_windows_cut_a_whole_tensor_into_bounded_runs(picture: Picture, limit: int) -> None:
    entry = picture.entry
    boxes = list(windows(entry, limit))
    assert (_counted(entry.shape, boxes) == 1).all()
    assert all(box.volume * itemsize(entry.dtype) <= max(limit, itemsize(entry.dtype)) for box in boxes)


def _rows(shape: tuple[int, ...], starts: list[int]) -> TensorEntry:
    """A tensor sharded by rows, each shard a file of its own."""
    chunks = []
    for number, (start, end) in enumerate(itertools.pairwise([*starts, shape[0]])):
        sizes = (end - start, *shape[1:])
        source = ByteSource(f"f{number}", 0, contiguous_strides(sizes))
        chunks.append(Chunk(Box((start, *[0] * (len(shape) - 1)), sizes), source))
    return TensorEntry("bfloat16", shape, chunks)


def test_windows_end_where_a_row_shard_ends_so_that_each_is_one_range_of_one_file() -> None:
    index = TensorIndex({"w": _rows((10, 4), [0, 3, 3, 8])}, "fsdp")
    moved = list(plan(index, [("w", Box.whole((10, 4)))], 4 * 8))
    assert [(w.box.offsets[0], w.box.sizes[0]) for w in moved] == [(0, 3), (3, 4), (7, 1), (8, 2)]
    assert [[p.source.file for p in w.pieces] for w in moved] == [["f0"], ["f2"], ["f2"], ["f3"]]
    assert moved[2].pieces[0].source.start() == 4 * 4 * 2
    assert all(piece.contiguous for window in moved for piece in window.pieces)


def test_small_row_shards_that_follow_one_another_share_a_window() -> None:
    index = TensorIndex({"w": _rows((10, 4), [0, 3, 3, 8])}, "fsdp")
    moved = list(plan(index, [("w", Box((1, 0), (9, 4)))], 8 * 8))
    assert [(w.box.offsets[0], w.box.sizes[0]) for w in moved] == [(1, 7), (8, 2)]
    assert [[p.source.file for p in w.pieces] for w in moved] == [["f0", "f2"], ["f3"]]
    # A window of very many would be a list that grows with the number of ranks.
    index = TensorIndex({"w": _rows((1000, 2), list(range(1000)))}, "fsdp")
    assert max(len(w.pieces) for w in plan(index, [("w", Box.whole((1000, 2)))], 1 << 20)) == MOST_PIECES


def test_a_row_longer_than_a_window_is_cut_within() -> None:
    index = TensorIndex({"w": _rows((2, 2, 5), [0, 1])}, "fsdp")
    moved = list(plan(index, [("w", Box.whole((2, 2, 5)))], 2 * 2))
    assert [w.box.sizes for w in moved] == [(1, 1, 2), (1, 1, 2), (1, 1, 1)] * 4


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_window_smaller_than_an_element_moves_one(limit: int) -> None:
    index = TensorIndex({"w": _rows((3,), [0])}, "fsdp")
    assert [w.box.sizes for w in plan(index, [("w", Box((1,), (2,)))], limit)] == [(1,), (1,)]


def test_what_is_not_there_is_named_with_its_box() -> None:
    whole = _rows((10, 4), [0, 3])
    index = TensorIndex({"w": TensorEntry("bfloat16", (10, 4), whole.chunks[:1])}, "fsdp")
    assert list(plan(index, [("w", Box((0, 0), (3, 4)))], 100))
    with pytest.raises(IncompleteError, match=r"^w: 4 of the 8 elements of box \[2:4, 0:4\]"):
        list(plan(index, [("w", Box((2, 0), (2, 4)))], 100))
    with pytest.raises(IncompleteError, match="no tensor lm_head"):
        list(plan(index, [("lm_head", Box((), ()))], 100))
    # Elements outside the shape are no more there than those of a missing chunk.
    with pytest.raises(IncompleteError):
        list(plan(TensorIndex({"w": whole}, "fsdp"), [("w", Box((8, 0), (3, 4)))], 100))


def test_planning_takes_no_time_that_grows_with_the_square_of_the_shards() -> None:
    # 4000 shards a window each; looking at every shard for every window would take 16 million steps, over 10 s.
    index = TensorIndex({"w": _rows((4000, 2), list(range(4000)))}, "fsdp")
    started = time.monotonic()
    assert sum(1 for _ in plan(index, [("w", Box.whole((4000, 2)))], 2 * 2)) == 4000
    assert time.monotonic() - started < 3
