"""The files of all ranks, joined: same-named values become one entry each.

A DTensor or ShardedTensor says which box of the tensor its rank holds; boxes of replicas (HSDP, tensor parallelism)
count once, and what remains must tile the shape. A plain tensor is replicated: every rank must hold the same bytes, and
one copy is taken.

A file that is a copy of another rank's would give wrong values in right shapes. It is found by the rank that meshes and
process groups name, by the place in the mesh, by boxes that then leave a gap, and at last by its content
(`milepost.layouts.copies`). What cannot be found is a copy among ranks that hold plain tensors alone, or the same
boxes: those files are to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from milepost.errors import DamagedError
from milepost.index import Box, Chunk, Shape, TensorEntry
from milepost.layouts.copies import refuse_copies
from milepost.layouts.dtensor import Mesh, sharded_ref
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


def state_dict(file: TorchFile) -> Mapping[str, Any]:
    """The names and values of a file. DamagedError where it holds anything else."""
    if not isinstance(file.root, dict) or not all(isinstance(name, str) for name in file.root):
        raise DamagedError(f"{file.path}: holds no state dict")
    return file.root


def rank_part(value: Any) -> RankPart | None:
    """A DTensor or ShardedTensor of a pickle as its rank's part; None for anything else."""
    ref = sharded_ref(value)
    if ref is not None:
        return RankPart(ref.local.dtype, ref.shape, ((ref.local, ref.box),), mesh=ref.mesh)
    shards = sharded_tensor_ref(value)
    if shards is not None:
        return RankPart(shards.dtype, shards.shape, shards.shards, rank=shards.rank)
    return None


def join_ranks(
    files: list[TorchFile], items: Callable[[TorchFile], Iterable[tuple[str, Any]]]
) -> dict[str, TensorEntry]:
    """Join the values that `items` gives for each rank's file, in rank order, into entries.

    Raises DamagedError or IncompleteError where a rank lacks a name, ranks contradict each other, or a file is a copy
    of another rank's.
    """
    parts: dict[str, list[tuple[TorchFile, Part]]] = {}
    places: dict[tuple[Shape, Shape], TorchFile] = {}
    for rank, file in enumerate(files):
        mesh: Mesh | None = None
        for name, value in items(file):
            part = value if isinstance(value, TensorRef) else _part(value, name, file)
            if isinstance(part, RankPart):
                if part.rank is not None:
                    _check_writer(file, part.rank, rank)
                if part.mesh is not None:
                    if mesh is None:
                        mesh = part.mesh
                        _check_writer(file, _writer(file, mesh), rank)
                    _check_place(file, part.mesh, len(files), places)
            parts.setdefault(name, []).append((file, part))
    for name, of_ranks in parts.items():
        if len(of_ranks) != len(files):
            lacking = sorted({f.path.name for f in files} - {f.path.name for f, _ in of_ranks})
            raise DamagedError(f"{name}: not in {', '.join(lacking)}, but in the files of the other ranks")
    entries: dict[str, TensorEntry] = {}
    first_name: dict[tuple[TensorRef, Shape], str] = {}
    for name, of_ranks in parts.items():
        entry = _join(name, of_ranks)
        # Two names for one storage: tied weights.
        local = _local(of_ranks[0][1])
        if local is not None and local.storage.numel:
            original = first_name.setdefault((local, entry.shape), name)
            if original != name:
                entry = replace(entry, alias_of=original)
        entries[name] = entry
    refuse_copies(
        files, [[part.pieces for _, part in of_ranks if isinstance(part, RankPart)] for of_ranks in parts.values()]
    )
    return entries


def _local(part: Part) -> TensorRef | None:
    if isinstance(part, TensorRef):
        return part
    return part.pieces[0][0] if part.pieces else None


def _part(value: Any, name: str, file: TorchFile) -> RankPart:
    try:
        part = rank_part(value)
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


def _check_place(file: TorchFile, mesh: Mesh, world_size: int, places: dict[tuple[Shape, Shape], TorchFile]) -> None:
    """Raise where two files stand at one place of a mesh of all ranks; some versions of torch note no rank."""
    if math.prod(mesh.sizes) != world_size:
        return
    other = places.setdefault((mesh.sizes, mesh.coordinate), file)
    if other is not file:
        raise DamagedError(
            f"{file.path}: stands at the same place of the device mesh as {other.path.name}; one is a copy of the other"
        )


def _join(name: str, of_ranks: list[tuple[TorchFile, Part]]) -> TensorEntry:
    if all(isinstance(part, TensorRef) for _, part in of_ranks):
        return _replicated(name, [file.entry(part) for file, part in of_ranks if isinstance(part, TensorRef)])
    chunks: dict[Box, Chunk] = {}
    seen: set[tuple[str, Shape]] = set()
    for file, part in of_ranks:
        if isinstance(part, TensorRef):
            raise DamagedError(f"{name}: sharded on some ranks and whole in {file.path.name}")
        seen.add((part.dtype, part.shape))
        for ref, box in part.pieces:
            if box.volume:
                # Replicas (HSDP, tensor parallelism) hold the same box: each box counts once.
                chunks.setdefault(box, file.chunk(ref, box.offsets))
    if len(seen) > 1:
        raise DamagedError(f"{name}: the ranks' files disagree: " + ", ".join(f"{d}{list(s)}" for d, s in sorted(seen)))
    ((dtype, shape),) = seen
    entry = TensorEntry(dtype, shape, tuple(chunks.values()))
    entry.check_tiling(name)
    return entry


def _replicated(name: str, copies: list[TensorEntry]) -> TensorEntry:
    first = copies[0]
    expected = first.bits().tobytes() if len(copies) > 1 else b""
    for rank, copy in enumerate(copies[1:], 1):
        if (copy.dtype, copy.shape) != (first.dtype, first.shape) or copy.bits().tobytes() != expected:
            raise DamagedError(
                f"{name}: every rank should hold the same {first.dtype}{list(first.shape)}, "
                f"but rank {rank} differs from rank 0"
            )
    return first
