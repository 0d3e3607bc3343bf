"""Which box a rank's part of a DTensor is: against cuts made with `torch.chunk`, and against torch's own arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from milepost.errors import DamagedError
from milepost.index import contiguous_strides
from milepost.layouts.dtensor import sharded_ref
from milepost.layouts.pickles import GLOBALS, StorageRef, TensorRef


def record(kind: str, *args: Any, **fields: Any) -> Any:
    """What the pickle of an object of a class of `torch.distributed` becomes."""
    made = GLOBALS[f"torch.distributed.{kind}"](*args)
    if fields:
        made.__setstate__(fields)
    return made


def local(shape: tuple[int, ...]) -> TensorRef:
    """A local tensor of this shape."""
    return TensorRef("float32", shape, contiguous_strides(shape), StorageRef("float32", "0", math.prod(shape)), 0)


def mesh_of(sizes: tuple[int, ...], place: tuple[int, ...]) -> Any:
    """A device mesh as torch 2.13 pickles it."""
    axes = tuple(record("_mesh_layout._FlatLayout", shape=() if n == 1 else (n,), stride=(1,)) for n in sizes)
    layout = record("_mesh_layout._MeshLayout", axes=axes)
    return record("device_mesh.DeviceMesh", _layout=layout, _coordinate_on_dim=place, _rank=0)


def placement(of: Placement) -> Any:
    """The record of a placement."""
    fields = {"dim": of.dim} if isinstance(of, Shard | _StridedShard) else {}
    if isinstance(of, _StridedShard):
        fields["split_factor"] = of.split_factor
    return record(f"tensor.placement_types.{type(of).__name__}", **fields)


def dtensor(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], part: tuple[int, ...], **spec: Any) -> Any:
    """A DTensor of which a rank holds a part of that shape."""
    meta = record("tensor._dtensor_spec.TensorMeta", shape, contiguous_strides(shape), "float32")
    spec = {"mesh": mesh, "placements": placements, "tensor_meta": meta, **spec}
    return record("tensor.DTensor", _local_tensor=local(part), _spec=record("tensor._dtensor_spec.DTensorSpec", **spec))


def cut(length: int, cuts: list[tuple[int, int]]) -> tuple[int, int]:
    """Offset and size of what is left of a dimension after cuts of (parts, which one), by `torch.chunk`."""
    left = torch.arange(length)
    for parts, position in cuts:
        pieces = left.chunk(parts) if len(left) else (left,)
        left = pieces[position] if position < len(pieces) else left[:0]
    return (int(left[0]) if len(left) else -1), len(left)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    place = tuple(draw(st.integers(0, n - 1)) for n in sizes)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, sizes, place, tuple(draw(st.tuples(*[kinds] * len(sizes))))


@given(_cases())
@settings(max_examples=300, deadline=None)
def test_shards_and_replicas_on_any_mesh(case: Any) -> None:
    shape, sizes, place, placements = case
    expected_sizes, expected_offsets = _compute_local_shape_and_global_offset(shape, sizes, list(place), placements)
    records = tuple(map(placement, placements))
    ref = sharded_ref(dtensor(shape, mesh_of(sizes, place), records, tuple(expected_sizes)))
    assert ref is not None
    assert ref.shape == shape
    assert ref.box.sizes == tuple(expected_sizes)
    for dim, size in enumerate(shape):
        cuts = [(n, p) for n, p, kind in zip(sizes, place, placements, strict=True) if kind == Shard(dim)]
        offset, length = cut(size, cuts)
        assert ref.box.sizes[dim] == length
        if math.prod(ref.box.sizes):
            assert ref.box.offsets[dim] == offset == expected_offsets[dim]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_a_strided_shard_is_cut_after_the_dimensions_that_its_factor_covers(
    rows: int, dp: int, tp: int, data: st.DataObject
) -> None:
    # FSDP over tensor parallelism: the weight is cut into tp parts first, and each of these into dp.
    boxes = []
    for place in itertools.product(range(dp), range(tp)):
        offset, length = cut(rows, [(tp, place[1]), (dp, place[0])])
        placements = (placement(_StridedShard(0, split_factor=tp)), placement(Shard(0)))
        ref = sharded_ref(dtensor((rows,), mesh_of((dp, tp), place), placements, (length,)))
        assert ref is not None
        if length:
            assert (ref.box.offsets, ref.box.sizes) == ((offset,), (length,))
            boxes.append(ref.box)
    assert sum(box.volume for box in boxes) == rows


def test_30_rows_on_2x2_are_cut_15_15_and_then_8_7() -> None:
    # From left to right it would be 16 and 14, then 8, 8 and 7, 7: the same four sizes but one, at other offsets.
    expected = {(0, 0): (0, 8), (1, 0): (8, 7), (0, 1): (15, 8), (1, 1): (23, 7)}
    placements = (placement(_StridedShard(0, split_factor=2)), placement(Shard(0)))
    for place, (offset, length) in expected.items():
        ref = sharded_ref(dtensor((30, 4), mesh_of((2, 2), place), placements, (length, 4)))
        assert ref is not None
        assert (ref.box.offsets, ref.box.sizes) == ((offset, 0), (length, 4))


def test_several_strided_shards_nest_by_their_factors() -> None:
    # Mesh 4 x 3 x 2; both factors are 2, the size of the last dimension. Read from right to left: the last one cuts
    # first; the second (factor 2) after it; the first (factor 2) right after it too, so before the second.
    placements = tuple(map(placement, (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0))))
    for place in itertools.product(range(4), range(3), range(2)):
        offset, length = cut(101, [(2, place[2]), (4, place[0]), (3, place[1])])
        ref = sharded_ref(dtensor((101,), mesh_of((4, 3, 2), place), placements, (length,)))
        assert ref is not None
        if length:
            assert ref.box.offsets == (offset,)


def test_the_order_that_the_spec_notes_is_followed() -> None:
    order = (record("tensor._dtensor_spec.ShardOrderEntry", 0, (1, 0)),)
    shards = (placement(Shard(0)), placement(Shard(0)))
    for place in itertools.product(range(2), range(2)):
        offset, length = cut(30, [(2, place[1]), (2, place[0])])
        ref = sharded_ref(dtensor((30,), mesh_of((2, 2), place), shards, (length,), shard_order=order))
        assert ref is not None
        assert (ref.box.offsets, ref.box.sizes) == ((offset,), (length,))
    other = (record("tensor._dtensor_spec.ShardOrderEntry", 0, (1,)),)
    with pytest.raises(DamagedError, match="shard order"):
        sharded_ref(dtensor((30,), mesh_of((2, 2), (0, 0)), shards, (8,), shard_order=other))


@pytest.mark.parametrize("shape", [4, (4,), ((2, 2),)])
def test_a_mesh_that_tells_its_sizes_as_one_shape(shape: Any) -> None:
    # torch 2.10 to 2.12: a number for one dimension, nested where a dimension was made of several.
    layout = record("_mesh_layout._MeshLayout", shape=shape, stride=1)
    mesh = record("device_mesh.DeviceMesh", _layout=layout, _coordinate_on_dim=(3,), _rank=3)
    ref = sharded_ref(dtensor((10,), mesh, (placement(Shard(0)),), (1,)))
    assert ref is not None
    assert ref.box.offsets == (9,)
    assert ref.mesh.rank == 3


def test_what_is_no_dtensor_is_none() -> None:
    assert sharded_ref(None) is None
    assert sharded_ref(local((2,))) is None
    assert sharded_ref(record("tensor.placement_types.Replicate")) is None


SHARD = placement(Shard(0))
MESH = mesh_of((2,), (0,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((5,), MESH, (SHARD,), (2,)), r"shape \[2\] where mesh and placement give \[3\]"),
        (((4,), MESH, (placement(Shard(1)),), (2,)), "1 dimensions sharded along dimension 1"),
        (((4,), MESH, (record("tensor.placement_types.Shard", dim=-1),), (2,)), "along dimension -1"),
        (((4,), MESH, (), (2,)), "do not fit a mesh of 1 dimensions"),
        (((4,), MESH, (record("tensor.placement_types.Partial", reduce_op="sum"),), (4,)), "placement Partial"),
        (((4,), MESH, ("Shard",), (2,)), r"placement \?"),
        (((4,), MESH, (placement(_StridedShard(0, split_factor=3)),), (2,)), "split factor 3 does not match"),
        (((4,), record("device_mesh.DeviceMesh", mesh=1), (SHARD,), (2,)), "without sizes"),
        (((4,), None, (SHARD,), (2,)), "without a mesh"),
        (((4,), mesh_of((2,), (2,)), (SHARD,), (0,)), "where its rank stands"),
        (((4,), mesh_of((2,), (-1,)), (SHARD,), (2,)), "where its rank stands"),
        (((4,), mesh_of((2,), (0, 0)), (SHARD,), (2,)), "where its rank stands"),
        (((4,), mesh_of((0,), (0,)), (SHARD,), (2,)), "where its rank stands"),
        (((4,), MESH, (record("tensor.placement_types.Shard"),), (2,)), r"cannot be read \(KeyError\)"),
        (((4,), mesh_of(("x",), (0,)), (SHARD,), (2,)), r"cannot be read"),  # type: ignore[arg-type]
    ],
)
def test_a_dtensor_that_contradicts_itself(arguments: Any, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        sharded_ref(dtensor(*arguments))


def test_a_dtensor_of_missing_parts() -> None:
    for made in (
        record("tensor.DTensor"),
        record("tensor.DTensor", _local_tensor=None, _spec=None),
        record("tensor.DTensor", _local_tensor=local((2,)), _spec=record("tensor._dtensor_spec.DTensorSpec")),
        record("tensor.DTensor", _local_tensor=local((2,))),
    ):
        with pytest.raises(DamagedError):
            sharded_ref(made)
