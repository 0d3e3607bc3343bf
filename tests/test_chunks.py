"""Chunks held as a grid say and do what the same chunks in a list do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, boxes_in, data_file, pictures

from milepost import edits
from milepost.chunks import Grid, compact, lattice
from milepost.errors import DamagedError, IncompleteError
from milepost.index import Box, ByteSource, Chunk, TensorEntry, contiguous_strides


def _known(picture: Picture) -> TensorEntry:
    """The entry with every offset found, which a grid needs."""
    chunks = [Chunk(c.box, replace(c.source, offset=c.source.start())) for c in picture.entry.chunks if c.box.volume]
    return replace(picture.entry, chunks=chunks)


def _as_grid(entry: TensorEntry) -> TensorEntry:
    return replace(entry, chunks=compact(entry.chunks))


def _set_of(entry: TensorEntry) -> set[tuple[Box, str, int, tuple[int, ...]]]:
    """The chunks, whatever their order; a stride along a dimension of size 1 means nothing."""
    return {_facts(chunk) for chunk in entry.chunks}


def _facts(c: Chunk) -> tuple[Box, str, int, tuple[int, ...]]:
    strides = tuple(s if n > 1 else 0 for s, n in zip(c.source.strides, c.box.sizes, strict=True))
    return c.box, c.source.file, c.source.start(), strides


@given(st.data(), pictures())
@settings(max_examples=200, deadline=None)
def test_a_grid_is_the_same_chunks_and_has_the_same_pieces(data: st.DataObject, picture: Picture) -> None:
    listed = _known(picture)
    entry = _as_grid(listed)
    assert isinstance(entry.chunks, Grid) == bool(listed.chunks)  # every tiling of a picture is a grid
    assert len(entry.chunks) == len(listed.chunks)
    assert _set_of(entry) == _set_of(listed)
    assert [_facts(entry.chunks[i]) for i in range(len(entry.chunks))] == [_facts(c) for c in entry.chunks]
    assert [_facts(c) for c in entry.chunks[::-1]] == [_facts(c) for c in entry.chunks][::-1]
    entry.check_tiling("w")
    box = data.draw(boxes_in(entry.shape))
    assert {_facts(c) for c in entry.pieces(box)} == {_facts(c) for c in listed.pieces(box)}
    assert np.array_equal(entry.bits(box), picture.bits[box.slices()])


Edit = Callable[[TensorEntry, TensorEntry], TensorEntry]


def _edit(data: st.DataObject, shape: tuple[int, ...]) -> Edit:
    dims = len(shape)
    kinds = ("narrow", "select", "permute", "concat", "stack", "every", "unstack") if dims else ("stack",)
    kind = data.draw(st.sampled_from(kinds))
    if kind == "stack":
        at = data.draw(st.integers(0, dims))
        return lambda entry, other: edits.stack([entry, other, entry], at)
    dim = data.draw(st.integers(0, dims - 1))
    if kind == "concat":
        return lambda entry, other: edits.concat([entry, other], dim)
    if kind == "permute":
        order = data.draw(st.permutations(range(dims)))
        return lambda entry, other: edits.permute(entry, order)
    if kind == "select" and shape[dim]:
        position = data.draw(st.integers(0, shape[dim] - 1))
        return lambda entry, other: edits.select(entry, dim, position)
    if kind == "unstack" and shape[0]:
        position = data.draw(st.integers(0, shape[0] - 1))
        return lambda entry, other: edits.unstack(entry)[position]
    start = data.draw(st.integers(0, shape[dim]))
    if kind == "every":
        step = data.draw(st.integers(1, 3))
        return lambda entry, other: edits.every(entry, dim, start, step)
    length = data.draw(st.integers(0, shape[dim] - start))
    return lambda entry, other: edits.narrow(entry, dim, start, length)


@given(st.data(), pictures(dtype="int64"))
@settings(max_examples=300, deadline=None)
def test_edits_of_a_grid_are_those_of_the_list(data: st.DataObject, picture: Picture) -> None:
    listed = _known(picture)
    grid = _as_grid(listed)
    for _ in range(data.draw(st.integers(1, 4))):
        edit = _edit(data, listed.shape)
        # Cut otherwise, or alike: only the second stays a grid where tensors are joined.
        other = _known(data.draw(pictures(dtype="int64", shape=listed.shape))) if data.draw(st.booleans()) else listed
        listed, grid = edit(listed, other), edit(grid, grid if other is listed else _as_grid(other))
        assert (grid.dtype, grid.shape) == (listed.dtype, listed.shape)
        assert _set_of(grid) == _set_of(listed)
        grid.check_tiling("w")
    box = data.draw(boxes_in(listed.shape))
    assert {_facts(c) for c in grid.pieces(box)} == {_facts(c) for c in listed.pieces(box)}


def _rows(*sizes: int, columns: int = 4, file: str = "f", unit: int = 64) -> TensorEntry:
    """A float32 matrix cut along its rows, each part at the next multiple of `unit` in a file of its own."""
    chunks, row = [], 0
    for number, size in enumerate(sizes):
        chunks.append(
            Chunk(Box((row, 0), (size, columns)), ByteSource(f"{file}{number}", (number + 1) * unit, (columns, 1)))
        )
        row += size
    return TensorEntry("float32", (row, columns), compact(chunks))


def test_parts_of_tensors_that_are_cut_alike_stay_grids_and_share_their_cuts() -> None:
    fused = [_rows(2, 2, 2, 2), _rows(2, 2, 2, 2)]
    halves = [edits.narrow(entry, 0, 4, 4) for entry in fused]
    assert all(isinstance(half.chunks, Grid) for half in halves)
    assert halves[0].chunks.cuts[0] is halves[1].chunks.cuts[0]  # type: ignore[attr-defined]
    stacked = edits.stack(halves)
    assert isinstance(stacked.chunks, Grid)
    assert stacked.chunks.cuts == ((0, 1, 2), (0, 2, 4), (0, 4))
    assert [chunk.source.start() for chunk in edits.select(stacked, 0, 1).chunks] == [192, 256]
    # A cut through the second part: 1 row of 4 floats further on in its file.
    assert [c.source.start() for c in edits.narrow(fused[0], 0, 3, 5).chunks] == [128 + 16, 192, 256]
    # Columns cut elsewhere: no grid, and the same chunks in a list.
    mixed = edits.concat([fused[0], edits.concat([_rows(8, columns=1), _rows(8, columns=3)], 1)], 0)
    assert not isinstance(mixed.chunks, Grid)
    mixed.check_tiling("w")
    assert len(mixed.chunks) == 6


def test_a_grid_that_is_not_all_of_a_tensor_is_no_tiling() -> None:
    entry = _rows(2, 2)
    with pytest.raises(IncompleteError, match=r"^w: its parts hold 16 of 20 elements of shape \[5, 4\]"):
        replace(entry, shape=(5, 4)).check_tiling("w")
    with pytest.raises(DamagedError, match=r"box \[2:4, 0:4\] of f1 lies outside shape \[3, 4\]"):
        replace(entry, shape=(3, 4)).check_tiling("w")
    with pytest.raises(DamagedError, match="lies outside shape"):
        replace(entry, shape=(4, 4, 1)).check_tiling("w")


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [Box((0, 0), (2, 4)), Box((3, 0), (1, 4))],  # a gap
        [Box((0, 0), (2, 4)), Box((1, 0), (3, 4))],  # an overlap
        [Box((0, 0), (2, 4)), Box((0, 0), (2, 4))],  # twice
        [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 4))],  # bricks
        [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))],  # two cells of four
        [Box((0, 0), (2, 2)), Box((0,), (2,))],
    ],
)
def test_what_is_no_grid_is_not_taken_for_one(boxes: list[Box]) -> None:
    assert lattice(boxes) is None
    chunks = [Chunk(box, ByteSource("f", 0, contiguous_strides(box.sizes))) for box in boxes]
    assert compact(chunks) is chunks


def test_offsets_that_are_found_late_stay_in_a_list() -> None:
    chunks = [Chunk(Box((0,), (4,)), ByteSource(str(data_file()[0]), lambda: 8, (1,)))]
    assert compact(chunks) is chunks


def test_offsets_in_units_are_the_same_offsets() -> None:
    entry = _rows(2, 2, 2)
    assert isinstance(entry.chunks, Grid)
    in_units = replace(entry.chunks, offsets=np.array([[1], [2], [3]], np.uint32), unit=64)
    one, other = entry, replace(entry, chunks=in_units)
    assert _set_of(one) == _set_of(other)
    for box in (Box((1, 1), (4, 2)), Box((3, 0), (1, 4)), Box((5, 4), (1, 0))):
        assert [_facts(c) for c in one.pieces(box)] == [_facts(c) for c in other.pieces(box)]
    # Beside a grid that counts in bytes, and far beyond what 32 bits of bytes reach.
    far = replace(in_units, offsets=np.array([[1 << 31], [2], [3]], np.uint32))
    both = edits.concat([replace(entry, chunks=far), one], 0)
    assert [c.source.start() for c in both.chunks] == [64 << 31, 128, 192, 64, 128, 192]
