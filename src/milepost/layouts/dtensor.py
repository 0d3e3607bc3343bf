"""DTensors of a pickle as boxes: which part of the global tensor a rank's local tensor is.

A DTensor is cut along mesh dimensions from left to right: `Shard(d)` on a mesh dimension of size n cuts tensor
dimension d by the rule of `torch.chunk` (parts of ceil(size / n), the last ones smaller or empty). `_StridedShard`
(FSDP over tensor parallelism) is cut *after* the later mesh dimensions whose sizes multiply to its split factor; taking
it from left to right would give right sizes at wrong offsets for uneven shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.errors import DamagedError
from milepost.index import Box, Shape
from milepost.layouts.pickles import Record, TensorRef

_DTENSOR = "torch.distributed.tensor.DTensor"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank pickled it: sizes of its dimensions, the rank's own place, and its number, which older
    torch leaves to the tensor of all ranks."""

    sizes: Shape
    coordinate: Shape
    rank: int | None
    ranks: TensorRef | None


@dataclass(frozen=True, slots=True)
class ShardedRef:
    """One rank's part of a DTensor: the part's bytes, the global shape, the box that the part is, and the mesh."""

    local: TensorRef
    shape: Shape
    box: Box
    mesh: Mesh


Shards = tuple[tuple[int, int, int], ...]
"""(mesh dimension, the tensor dimension that it cuts, split factor), for those that cut any."""
Order = tuple[tuple[int, Shape], ...]
"""(tensor dimension, mesh dimensions that cut it in order), where torch notes it."""


@dataclass(frozen=True, slots=True)
class Memo:
    """What was found out already in one object graph: all its tensors share a mesh, and most are cut alike.

    meshes:  by the identity of their records
    boxes:   by mesh, shape, shards and order of cuts
    """

    meshes: dict[int, Mesh]
    boxes: dict[tuple[int, Shape, Shards, Order | None], Box]


def sharded_ref(value: Any, memo: Memo | None = None) -> ShardedRef | None:
    """What a value of a state dict says of its box, or None where it is no DTensor.

    Raises DamagedError where its parts are missing or contradict each other.
    """
    if not isinstance(value, Record) or value.kind != _DTENSOR:
        return None
    try:
        return _sharded_ref(value, memo or Memo({}, {}))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"a DTensor that cannot be read ({type(error).__name__})") from None


def _sharded_ref(value: Record, memo: Memo) -> ShardedRef:
    local, spec = value.field("_local_tensor"), value.field("_spec")
    if not isinstance(local, TensorRef) or not isinstance(spec, Record):
        raise DamagedError("a DTensor without a local tensor")
    record = spec.field("mesh")
    mesh = memo.meshes.get(id(record))
    if mesh is None:
        mesh = memo.meshes[id(record)] = _mesh(record)
    shape = _shape(spec.field("tensor_meta"))
    order = spec.fields().get("shard_order")
    noted = None if order is None else tuple((int(entry.args[0]), tuple(map(int, entry.args[1]))) for entry in order)
    key = (id(record), shape, _shards(spec.field("placements"), mesh.sizes), noted)
    box = memo.boxes.get(key)
    if box is None:
        box = memo.boxes[key] = local_box(shape, _cuts(key[2], mesh.sizes, noted), mesh)
    if box.sizes != local.shape:
        raise DamagedError(
            f"a local tensor of shape {list(local.shape)} where mesh and placement give {list(box.sizes)}"
        )
    return ShardedRef(local, shape, box, mesh)


Cuts = Mapping[int, Sequence[int]]
"""Tensor dimension -> the mesh dimensions that cut it, in order."""


def local_box(shape: Shape, cuts: Cuts, mesh: Mesh) -> Box:
    """The box of the rank at `mesh.coordinate`."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, mesh_dims in cuts.items():
        if not 0 <= dim < len(shape):
            raise DamagedError(f"a tensor of {len(shape)} dimensions sharded along dimension {dim}")
        for mesh_dim in mesh_dims:
            part = -(-sizes[dim] // mesh.sizes[mesh_dim])
            start = min(part * mesh.coordinate[mesh_dim], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(part, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _shards(placements: Any, mesh_sizes: Shape) -> Shards:
    if not isinstance(placements, tuple | list) or len(placements) != len(mesh_sizes):
        raise DamagedError(f"placements that do not fit a mesh of {len(mesh_sizes)} dimensions")
    shards = []
    for mesh_dim, placement in enumerate(placements):
        kind = placement.kind.rpartition(".")[2] if isinstance(placement, Record) else "?"
        if kind in ("Shard", "_StridedShard"):
            fields = placement.fields() or dict(zip(("dim", "split_factor"), placement.args, strict=False))
            factor = int(fields["split_factor"]) if kind == "_StridedShard" else 1
            shards.append((mesh_dim, int(fields["dim"]), factor))
        elif kind != "Replicate":
            raise DamagedError(f"placement {kind} on mesh dimension {mesh_dim}: its values are sums still to be made")
    return tuple(shards)


def _cuts(shards: Shards, mesh_sizes: Shape, noted: Order | None) -> Cuts:
    """Which mesh dimensions cut which tensor dimension. `noted`: their order where torch notes it; None where split
    factors tell it, and in older torch."""
    factors: dict[int, list[tuple[int, int]]] = {}
    for mesh_dim, dim, factor in shards:
        factors.setdefault(dim, []).append((mesh_dim, factor))
    cuts = {dim: _order(of_dim, mesh_sizes) for dim, of_dim in factors.items()}
    if noted is not None:
        order = {dim: list(mesh_dims) for dim, mesh_dims in noted}
        if {dim: sorted(mesh_dims) for dim, mesh_dims in order.items()} != {d: sorted(m) for d, m in cuts.items()}:
            raise DamagedError("a shard order that does not fit the placements")
        return order
    return cuts


def _order(factors: list[tuple[int, int]], mesh_sizes: Shape) -> list[int]:
    """Mesh dimensions in the order in which they cut: each after the later ones that its split factor covers."""
    order: list[int] = []
    for mesh_dim, factor in reversed(factors):
        position, covered = 0, 1
        while covered < factor and position < len(order):
            covered *= mesh_sizes[order[position]]
            position += 1
        if covered != factor:
            raise DamagedError(f"split factor {factor} does not match a mesh of sizes {list(mesh_sizes)}")
        order.insert(position, mesh_dim)
    return order


def _shape(meta: Any) -> Shape:
    if not isinstance(meta, Record):
        raise DamagedError("a DTensor without a global shape")
    shape = meta.args[0] if meta.args else meta.field("shape")
    return tuple(int(size) for size in shape)


def _mesh(record: Any) -> Mesh:
    if not isinstance(record, Record):
        raise DamagedError("a DTensor without a mesh")
    fields = record.fields()
    ranks = fields.get("mesh")  # up to torch 2.9, a tensor of the ranks
    if "_layout" in fields:
        sizes = _layout_sizes(fields["_layout"])
    elif isinstance(ranks, TensorRef):
        sizes = ranks.shape
    else:
        raise DamagedError("a device mesh without sizes")
    place = fields.get("_coordinate_on_dim")
    if place is None or len(place) != len(sizes) or not all(0 <= c < n for c, n in zip(place, sizes, strict=True)):
        raise DamagedError("a device mesh that does not say where its rank stands")
    rank = fields.get("_rank")
    return Mesh(
        sizes,
        tuple(int(c) for c in place),
        rank if isinstance(rank, int) else None,
        ranks if isinstance(ranks, TensorRef) else None,
    )


def _layout_sizes(layout: Record) -> Shape:
    """Sizes of a mesh's dimensions: of each axis (torch 2.13), or of one shape with a number or tuple for each."""
    fields = layout.fields()
    if "axes" in fields:
        return tuple(_size(axis.field("shape")) for axis in fields["axes"])
    shape = layout.field("shape")
    return tuple(_size(size) for size in shape) if isinstance(shape, tuple) else (_size(shape),)


def _size(shape: Any) -> int:
    """Ranks along one mesh dimension, which may itself be made of several."""
    return math.prod(int(size) for size in shape) if isinstance(shape, tuple) else int(shape)
