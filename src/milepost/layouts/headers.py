"""What the file of one rank says of its tensors, as columns.

A file's object graph is some kilobytes a tensor, and a thousand ranks have a thousand graphs of the same names. So a
file is opened, what matters is noted in a few numbers a tensor, and the graph is let go before the next one is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from milepost.errors import DamagedError
from milepost.index import Box, Shape
from milepost.layouts.copies import content_of
from milepost.layouts.dtensor import Memo, Mesh, sharded_ref
from milepost.layouts.pickles import TensorRef
from milepost.layouts.sharded_tensor import sharded_tensor_ref
from milepost.layouts.torchfile import TorchFile


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank's file holds of a sharded tensor: pieces, each the box that it is; none, or empty ones, where the
    rank has nothing. `mesh` or `rank` say who wrote it."""

    dtype: str
    shape: Shape
    pieces: tuple[tuple[TensorRef, Box], ...]
    mesh: Mesh | None = None
    rank: int | None = None


Part = RankPart | TensorRef


def rank_part(value: Any, memo: Memo | None = None) -> RankPart | None:
    """A DTensor or ShardedTensor of a pickle as its rank's part; None for anything else."""
    ref = sharded_ref(value, memo)
    if ref is not None:
        return RankPart(ref.local.dtype, ref.shape, ((ref.local, ref.box),), mesh=ref.mesh)
    shards = sharded_tensor_ref(value)
    if shards is not None:
        return RankPart(shards.dtype, shards.shape, shards.shards, rank=shards.rank)
    return None


@dataclass(frozen=True, slots=True)
class Cut:
    """What the parts that a rank has of many tensors have in common.

    shape:    of the whole tensor
    boxes:    of the rank's pieces, in order, none of them empty
    strides:  of each piece, in elements
    whole:    whether the rank holds a plain tensor: then every rank is to hold the same one
    """

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    strides: tuple[Shape, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one rank's file, in its order.

    cuts:     the distinct cuts
    cut:      number of each tensor's in `cuts`, shape `[tensors]`
    offsets:  byte offset of each tensor's first piece, or 0, shape `[tensors]`
    further:  byte offsets of further pieces, by the tensor's position
    digests:  of the bytes of plain tensors, by the tensor's position; none in a world of one rank
    aliases:  position -> position of the first tensor with the same bytes
    places:   sizes of each mesh of all ranks, and the rank's coordinate there
    content:  digest of all sharded tensors' checksums; empty where the rank holds none
    """

    path: Path
    names: tuple[str, ...]
    cuts: tuple[Cut, ...]
    cut: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    further: Mapping[int, tuple[int, ...]]
    digests: Mapping[int, bytes]
    aliases: Mapping[int, int]
    places: tuple[tuple[Shape, Shape], ...]
    content: bytes


def read_header(file: TorchFile, items: Iterable[tuple[str, Any]], rank: int, world_size: int) -> Header:
    """The header of a rank's file; `items`: the names and values that count.

    Raises DamagedError for a value that is no tensor, and where the file says that another rank wrote it.
    """
    names: list[str] = []
    cuts: dict[Cut, int] = {}
    cut: list[int] = []
    offsets: list[int] = []
    further: dict[int, tuple[int, ...]] = {}
    digests: dict[int, bytes] = {}
    aliases: dict[int, int] = {}
    places: set[tuple[Shape, Shape]] = set()
    memo = Memo({}, {})
    first: dict[tuple[TensorRef, Shape], int] = {}
    sharded: list[tuple[TensorRef, Box]] = []
    for position, (name, value) in enumerate(items):
        part = value if isinstance(value, TensorRef) else _part(value, name, file, memo)
        if isinstance(part, TensorRef):
            local: TensorRef | None = part
            shape, held = part.shape, [(part, Box.whole(part.shape))]
            if world_size > 1:
                digests[position] = xxhash.xxh3_128_digest(np.ascontiguousarray(file.entry(part).bits()).data)
        else:
            local = part.pieces[0][0] if part.pieces else None
            shape, held = part.shape, list(part.pieces)
            if part.rank is not None:
                _check_writer(file, part.rank, rank)
            if part.mesh is not None:
                if not places:
                    _check_writer(file, _writer(file, part.mesh), rank)
                places.add((part.mesh.sizes, part.mesh.coordinate))
            sharded.extend(held)
        pieces = [(ref, box) for ref, box in held if box.volume]
        kind = Cut(
            part.dtype,
            shape,
            tuple(box for _, box in pieces),
            tuple(ref.strides for ref, _ in pieces),
            isinstance(part, TensorRef),
        )
        starts = [file.start(ref) for ref, _ in pieces]
        if len(starts) > 1:
            further[position] = tuple(starts[1:])
        # Two names for one storage: tied weights.
        if local is not None and local.storage.numel:
            original = first.setdefault((local, shape), position)
            if original != position:
                aliases[position] = original
        names.append(name)
        cut.append(cuts.setdefault(kind, len(cuts)))
        offsets.append(starts[0] if starts else 0)
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise DamagedError(f"{file.path}: holds {twice} twice")
    return Header(
        file.path,
        tuple(names),
        tuple(cuts),
        np.array(cut, np.int64),
        np.array(offsets, np.int64),
        further,
        digests,
        aliases,
        tuple(sorted(place for place in places if math.prod(place[0]) == world_size)),
        content_of(file, sharded),
    )


def sharded_parts(items: Iterable[tuple[str, Any]]) -> dict[str, RankPart]:
    """Only the sharded tensors of a file, by name."""
    parts = ((name, rank_part(value)) for name, value in items)
    return {name: part for name, part in parts if part is not None}


def _part(value: Any, name: str, file: TorchFile, memo: Memo) -> RankPart:
    try:
        part = rank_part(value, memo)
    except DamagedError as error:
        raise DamagedError(f"{file.path}: {name}: {error}") from None
    if part is None:
        kind = getattr(value, "kind", type(value).__name__)
        raise DamagedError(f"{file.path}: {name} is a {kind}, which is no tensor that milepost knows")
    return part


def _writer(file: TorchFile, mesh: Mesh) -> int | None:
    if mesh.rank is None and mesh.ranks is not None and mesh.ranks.shape == mesh.sizes:
        return int(file.entry(mesh.ranks).numpy()[mesh.coordinate])
    return mesh.rank


def _check_writer(file: TorchFile, writer: int | None, rank: int) -> None:
    """Raise where a file was written by another rank than its name says."""
    if writer is not None and writer != rank:
        raise DamagedError(f"{file.path}: was written by rank {writer}; it is a copy of another rank's file")
