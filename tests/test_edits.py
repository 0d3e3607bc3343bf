"""Edits of the index are numpy's operations, with no byte moved: every composition reads as numpy's own result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, data_file, entry_of, pictures

from milepost import edits
from milepost.errors import MismatchError
from milepost.index import TensorEntry, TensorIndex


def _step(data: st.DataObject, picture: Picture) -> Picture:
    """One random edit, done to both sides."""
    entry, bits = picture.entry, picture.bits
    dims = len(entry.shape)
    kind = data.draw(
        st.sampled_from(("narrow", "every", "select", "permute", "concat", "stack") if dims else ("stack",))
    )
    if kind == "stack":
        other = data.draw(pictures(dtype=entry.dtype, shape=entry.shape))
        dim = data.draw(st.integers(0, dims))
        return Picture(edits.stack([entry, other.entry, entry], dim), np.stack([bits, other.bits, bits], dim))
    dim = data.draw(st.integers(0, dims - 1))
    size = entry.shape[dim]
    if kind == "concat":
        length = data.draw(st.integers(0, 3))
        other = data.draw(pictures(dtype=entry.dtype, shape=(*entry.shape[:dim], length, *entry.shape[dim + 1 :])))
        return Picture(edits.concat([entry, other.entry], dim), np.concatenate([bits, other.bits], dim))
    if kind == "permute":
        order = data.draw(st.permutations(range(dims)))
        return Picture(edits.permute(entry, order), bits.transpose(order))
    if kind == "select" and size:
        position = data.draw(st.integers(0, size - 1))
        return Picture(edits.select(entry, dim, position), bits.take(position, dim))
    start = data.draw(st.integers(0, size))
    if kind == "every":
        step = data.draw(st.integers(1, 4))
        return Picture(edits.every(entry, dim, start, step), bits[(slice(None),) * dim + (slice(start, None, step),)])
    length = data.draw(st.integers(0, size - start))
    return Picture(edits.narrow(entry, dim, start, length), bits.take(range(start, start + length), dim))


@given(st.data(), pictures())
@settings(max_examples=300, deadline=None)
def test_a_chain_of_edits_reads_as_numpys(data: st.DataObject, picture: Picture) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        picture = _step(data, picture)
    picture.entry.check_tiling("edited")
    assert picture.entry.shape == picture.bits.shape
    assert np.array_equal(picture.entry.bits(), picture.bits)


def _entry(*shape: int, dtype: str = "float32") -> TensorEntry:
    return entry_of(data_file()[0], dtype, shape)


@pytest.mark.parametrize(("start", "length"), [(0, 5), (4, 1), (5, 0), (-1, 2), (2, -1)])
def test_narrow_refuses_what_does_not_fit(start: int, length: int) -> None:
    with pytest.raises(MismatchError, match=r"dimension 1 .* shape \[3, 4\]"):
        edits.narrow(_entry(3, 4), 1, start, length)


@pytest.mark.parametrize(("start", "step"), [(-1, 1), (5, 1), (0, 0)])
def test_every_refuses_what_does_not_fit(start: int, step: int) -> None:
    with pytest.raises(MismatchError, match=r"dimension 1 .* shape \[3, 4\]"):
        edits.every(_entry(3, 4), 1, start, step)


@pytest.mark.parametrize("position", [-1, 3])
def test_select_refuses_a_position_outside(position: int) -> None:
    with pytest.raises(MismatchError):
        edits.select(_entry(3, 4), 0, position)


@pytest.mark.parametrize("dim", [-1, 2])
def test_no_edit_takes_a_dimension_that_is_not_there(dim: int) -> None:
    entry = _entry(3, 4)
    for edit in (
        lambda: edits.narrow(entry, dim, 0, 1),
        lambda: edits.select(entry, dim, 0),
        lambda: edits.concat([entry, entry], dim),
        lambda: edits.stack([entry, entry], dim + (dim > 0)),
    ):
        with pytest.raises(MismatchError, match="has no dimension"):
            edit()


@pytest.mark.parametrize(
    "other",
    [_entry(3, 5), _entry(3, 4, 1), _entry(3), _entry(), _entry(3, 4, dtype="int32")],
    ids=lambda entry: f"{entry.dtype}{list(entry.shape)}",
)
def test_concat_refuses_tensors_that_do_not_match(other: TensorEntry) -> None:
    with pytest.raises(MismatchError, match=r"cannot join float32\[3, 4\]"):
        edits.concat([_entry(3, 4), other], 0)


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (0, 1, 2), (1, -2)])
def test_permute_refuses_what_is_no_order(order: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match="no order of the 2 dimensions"):
        edits.permute(_entry(3, 4), order)


def test_rename_carries_aliases_along_and_refuses_a_clash() -> None:
    weight = _entry(2)
    tied = TensorEntry(weight.dtype, weight.shape, weight.chunks, alias_of="module.a")
    index = TensorIndex({"module.a": weight, "module.b": tied}, "fsdp")
    renamed = edits.rename(index, lambda name: name.removeprefix("module."))
    assert list(renamed) == ["a", "b"]
    assert renamed["b"].alias_of == "a"
    assert renamed.layout == "fsdp"
    with pytest.raises(MismatchError, match=r"module\.a and module\.b would both become x"):
        edits.rename(index, lambda _: "x")
