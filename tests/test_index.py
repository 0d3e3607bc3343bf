"""The index: boxes, tilings and reads, against numpy and torch."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, boxes_in, data_file, entry_of, pictures

from milepost.errors import CallError, DamagedError, IncompleteError
from milepost.index import (
    DTYPES,
    Box,
    ByteSource,
    Chunk,
    TensorEntry,
    TensorIndex,
    contiguous_strides,
    moment_name,
    read_chunk,
)


@given(st.data())
def test_intersection_holds_what_both_boxes_hold(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    counts = np.zeros(shape, int)
    counts[one.slices()] += 1
    counts[other.slices()] += 1
    shared = one.intersect(other)
    if shared is None:
        assert not (counts == 2).any()
    else:
        expected = np.zeros(shape, bool)
        expected[shared.slices()] = True
        assert np.array_equal(counts == 2, expected)
        assert shared == other.intersect(one)


def test_a_scalars_box_is_one_element() -> None:
    box = Box.whole(())
    assert box.volume == 1
    assert box.intersect(box) == box
    assert str(Box((2, 0), (3, 4))) == "[2:5, 0:4]"


@given(st.data(), pictures())
@settings(max_examples=200, deadline=None)
def test_any_box_of_any_tiling_reads_as_numpys(data: st.DataObject, picture: Picture) -> None:
    picture.entry.check_tiling("it")
    box = data.draw(boxes_in(picture.entry.shape))
    assert np.array_equal(picture.entry.bits(box), picture.bits[box.slices()])
    assert np.array_equal(picture.entry.bits(), picture.bits)


@given(pictures(min_dims=1, min_side=1), st.data())
@settings(max_examples=100, deadline=None)
def test_a_tiling_with_a_part_gone_is_incomplete(picture: Picture, data: st.DataObject) -> None:
    chunks = [chunk for chunk in picture.entry.chunks if chunk.box.volume]
    lost = data.draw(st.sampled_from(chunks))
    entry = TensorEntry(picture.entry.dtype, picture.entry.shape, [c for c in chunks if c is not lost])
    held = picture.entry.numel - lost.box.volume
    with pytest.raises(IncompleteError, match=rf"^w: its parts hold {held} of {picture.entry.numel} elements"):
        entry.check_tiling("w")
    with pytest.raises(IncompleteError):
        entry.bits()


@given(pictures(min_dims=1, min_side=1), st.data())
@settings(max_examples=100, deadline=None)
def test_a_tiling_with_a_box_moved_or_doubled_is_damaged(picture: Picture, data: st.DataObject) -> None:
    chunks = [chunk for chunk in picture.entry.chunks if chunk.box.volume]
    number = data.draw(st.integers(0, len(chunks) - 1))
    moved = chunks[number]
    dim = data.draw(st.integers(0, len(moved.box.sizes) - 1))
    offset = moved.box.offsets[dim] + data.draw(st.sampled_from((-1, 1)))
    offsets = (*moved.box.offsets[:dim], offset, *moved.box.offsets[dim + 1 :])
    shifted = [*chunks[:number], Chunk(Box(offsets, moved.box.sizes), moved.source), *chunks[number + 1 :]]
    with pytest.raises(DamagedError, match=r"^w: box"):
        TensorEntry(picture.entry.dtype, picture.entry.shape, shifted).check_tiling("w")
    with pytest.raises(DamagedError, match="cover the same elements"):
        TensorEntry(picture.entry.dtype, picture.entry.shape, [*chunks, moved]).check_tiling("w")


def _tiling(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    source = ByteSource("f", 0, contiguous_strides(shape))
    return TensorEntry("float32", shape, [Chunk(Box(*box), source) for box in boxes])


def test_a_gap_that_an_overlap_makes_up_for_is_found() -> None:
    # 4 + 4 of 8 elements, rows 1-2 twice and rows 3 never: the count alone looks whole.
    with pytest.raises(DamagedError, match=r"boxes \[0:2, 0:2\] and \[1:3, 0:2\] cover the same elements"):
        _tiling((4, 2), ((0, 0), (2, 2)), ((1, 0), (2, 2))).check_tiling("w")


@pytest.mark.parametrize(
    "box", [((3,), (2,)), ((-1,), (2,)), ((0, 0), (4, 1)), ((), ())], ids=["end", "start", "too many", "too few"]
)
def test_a_box_outside_the_shape_names_its_file(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(DamagedError, match=r"^w: box .* of f lies outside shape \[4\]"):
        _tiling((4,), box).check_tiling("w")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors_are_tiled(shape: tuple[int, ...]) -> None:
    whole = Box.whole(shape)
    _tiling(shape, (whole.offsets, whole.sizes)).check_tiling("w")
    if math.prod(shape) == 0:
        _tiling(shape).check_tiling("w")
    else:
        with pytest.raises(IncompleteError):
            _tiling(shape).check_tiling("w")


def test_many_column_shards_are_checked_in_less_than_quadratic_time() -> None:
    # All boxes begin at row 0, so a sweep over rows alone would compare 8 million pairs (about 10 s).
    shards = 4000
    started = time.monotonic()
    _tiling((2, shards), *(((0, column), (2, 1)) for column in range(shards))).check_tiling("w")
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_values_are_torchs_for_every_dtype(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(1)
    count = math.prod(shape)
    expected = torch.randint(0, 2 if name == "bool" else 120, (count * DTYPES[name].itemsize,), generator=generator)
    expected = expected.to(torch.uint8).view(dtype).reshape(shape)
    path = tmp_path / "f"
    path.write_bytes(b"-" + expected.reshape(-1).view(torch.uint8).numpy().tobytes())
    entry = entry_of(path, name, shape, offset=1)
    read = entry.read()
    assert read.dtype == dtype
    assert read.shape == expected.shape
    assert torch.equal(read.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    assert entry.nbytes == expected.nbytes
    if name.startswith("float8"):
        with pytest.raises(CallError, match=name):
            entry.numpy()
    else:
        values = entry.numpy()
        wanted = (expected.float() if name == "bfloat16" else expected).numpy()
        assert isinstance(values, np.ndarray)
        assert values.dtype == wanted.dtype
        assert values.shape == wanted.shape
        assert values.tobytes() == wanted.tobytes()


def test_a_strided_read_uses_little_memory_whatever_the_strides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Rows and columns of a transposed matrix; the range that covers a few of its rows is all of it.
    rows, columns = 400, 2500
    stored = np.arange(rows * columns, dtype=np.uint32).reshape(columns, rows)
    path = tmp_path / "f"
    stored.tofile(path)
    buffers: list[int] = []
    preadv = os.preadv

    def counting(fd: int, parts: list[memoryview], offset: int) -> int:
        buffers.append(sum(len(part) for part in parts))
        return preadv(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", counting)
    for box in (Box((7, 0), (2, columns)), Box((0, 0), (rows, 3)), Box((0, 0), (rows, columns))):
        buffers.clear()
        source = ByteSource(str(path), 0, (1, rows))
        chunk = Chunk(Box.whole((rows, columns)), source).narrow(box, "uint32")
        with path.open("rb") as file:
            bits = read_chunk(file.fileno(), chunk, "uint32")
        assert np.array_equal(bits, stored.T[box.slices()])
        assert max(buffers) <= 1 << 19
        # Close elements are read at most four times over; for far ones, never more than the range that covers them.
        assert sum(buffers) <= (stored.nbytes if box.sizes[0] < rows else 4 * bits.nbytes)


@pytest.mark.parametrize(
    ("columns", "taken", "read"),
    [
        pytest.param(4096, 2048, 2048, id="a gap of a page and more is left out"),
        pytest.param(4094, 2047, 4094, id="a smaller one is read with its rows"),
        pytest.param(1 << 18, 1 << 17, 1 << 17, id="rows longer than what is read at once"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_a_matrix_cut_by_columns_no_more_is_read_than_its_part(
    columns: int, taken: int, read: int, turned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Elements of 2 bytes; `read`: elements of each row but the last, of which nothing behind the part is read."""
    rows = 5
    stored = np.random.default_rng(0).integers(1 << 16, size=(rows, columns), dtype=np.uint16)
    path = tmp_path / "f"
    stored.tofile(path)
    asked: list[int] = []
    preadv = os.preadv

    def counting(fd: int, parts: list[memoryview], offset: int) -> int:
        asked.append(sum(len(part) for part in parts))
        return preadv(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", counting)
    whole = Chunk(Box.whole((rows, columns)), ByteSource(str(path), 0, (columns, 1)))
    chunk = whole.narrow(Box((0, columns - taken), (rows, taken)), "bfloat16")
    if turned:
        chunk = Chunk(Box((0, 0), (taken, rows)), ByteSource(str(path), chunk.source.offset, (1, columns)))
    with path.open("rb") as file:
        bits = read_chunk(file.fileno(), chunk, "bfloat16")
    assert np.array_equal(bits.T if turned else bits, stored[:, columns - taken :])
    assert sum(asked) == 2 * ((rows - 1) * read + taken)


def test_an_expanded_view_reads_its_one_element_many_times(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(np.array([1.0, 2.0], np.float32).tobytes())
    chunk = Chunk(Box.whole((3, 2, 4)), ByteSource(str(path), 0, (0, 1, 0)))
    expected = np.broadcast_to(np.array([1.0, 2.0], np.float32)[None, :, None], (3, 2, 4))
    assert np.array_equal(TensorEntry("float32", (3, 2, 4), (chunk,)).numpy(), expected)


def test_a_file_that_ends_early_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    with pytest.raises(DamagedError, match=r"short: ends at byte 10, 6 bytes short; .*truncated"):
        entry_of(path, "float32", (4,)).bits()


def test_an_offset_found_late_is_asked_for_only_when_bytes_are_read() -> None:
    asked: list[int] = []
    path, data = data_file()

    def offset() -> int:
        asked.append(1)
        return 8

    chunk = Chunk(Box.whole((4, 2)), ByteSource(str(path), offset, (2, 1)))
    part = chunk.narrow(Box((1, 0), (2, 2)), "uint8")
    assert not asked
    assert TensorEntry("uint8", (4, 2), (part,)).bits(part.box).tobytes() == data[10:14]
    assert asked


def test_an_index_is_a_mapping_in_the_order_of_the_files_and_counts_a_tied_weight_once() -> None:
    weight = entry_of(Path("f"), "bfloat16", (3, 4))
    tied = TensorEntry(weight.dtype, weight.shape, weight.chunks, alias_of="b")
    index = TensorIndex({"b": weight, "a": tied, moment_name("b", "exp_avg"): weight}, "fsdp", world_size=2)
    assert list(index) == ["b", "a", "optim/b/exp_avg"]
    assert len(index) == 3
    assert index["b"] is weight
    assert list(index.weights()) == ["b", "a"]
    assert index.weights().world_size == 2
    assert index.nbytes == 2 * 24
    with pytest.raises(IncompleteError, match=r"^a: "):
        index.with_entries({"a": TensorEntry("int8", (2,), ())}).check_tiling()


def test_bytes_that_lie_in_no_file_are_read_from_the_source_itself(tmp_path: Path) -> None:
    # A number in an object graph, such as an optimizer's step count. The file named with it is never read.
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    source = ByteSource(str(tmp_path / "file"), 0, (3, 1), values.tobytes())
    (tmp_path / "file").touch()
    entry = TensorEntry("float32", (2, 3), (Chunk(Box.whole((2, 3)), source),))
    assert np.array_equal(entry.numpy(), values)
    box = Box((1, 1), (1, 2))
    assert np.array_equal(entry.bits(box).view("<f4"), values[box.slices()])
    assert np.array_equal(entry.bits(Box((0, 2), (2, 1))).view("<f4"), values[:, 2:])
