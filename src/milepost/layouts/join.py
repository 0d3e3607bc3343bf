"""The files of all ranks, joined: same-named values become one entry each.

A DTensor or ShardedTensor says which box of the tensor its rank holds; boxes of replicas (HSDP, tensor parallelism)
count once, and what remains must tile the shape. A plain tensor is replicated: every rank must hold the same bytes, and
one copy is taken.

Files are looked at one after the other. What stays of each is one number a tensor, where its bytes begin
(`OffsetTable`); the rest is shared by all tensors that every rank cuts alike (`_Placement`).

A file that is a copy of another rank's would give wrong values in right shapes. It is found by the rank that meshes and
process groups name, by the place in the mesh, by boxes that then leave a gap, and at last by its content
(`milepost.layouts.copies`). What cannot be found is a copy among ranks that hold plain tensors alone, or the same
boxes: those files are to be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from milepost.chunks import Cuts, Grid, compact, lattice, strides_of
from milepost.errors import DamagedError
from milepost.index import Box, ByteSource, Chunk, Shape, TensorEntry
from milepost.layouts.copies import refuse_copy
from milepost.layouts.headers import Cut, Header, RankPart, rank_part, sharded_parts
from milepost.layouts.reading import Items, read_headers
from milepost.layouts.torchfile import TorchFile


class RankFiles(Sequence[TorchFile]):
    """The files of all ranks, each opened when it is asked for; only the first stays open."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._first: TorchFile | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> TorchFile: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TorchFile]: ...

    def __getitem__(self, index: int | slice) -> TorchFile | Sequence[TorchFile]:
        if isinstance(index, slice):
            return RankFiles(self.paths[index])
        if index:
            return TorchFile(self.paths[index])
        if self._first is None:
            self._first = TorchFile(self.paths[0])
        return self._first


def state_dict(file: TorchFile) -> Mapping[str, Any]:
    """The names and values of a file. DamagedError where it holds anything else."""
    if not isinstance(file.root, dict) or not all(isinstance(name, str) for name in file.root):
        raise DamagedError(f"{file.path}: holds no state dict")
    return file.root


def join_ranks(files: Sequence[TorchFile], items: Items) -> dict[str, TensorEntry]:
    """Join the values that `items` gives for each rank's file, in rank order, into entries.

    Raises DamagedError or IncompleteError where a rank lacks a name, ranks contradict each other, or a file is a copy
    of another rank's.
    """
    join = Join(len(files))
    for header in read_headers(files, items):
        join.add(header)
    entries = join.entries()
    for left, right in join.same_content():
        _compare(files[left], files[right], items)
    return entries


class Join:
    """What the headers of all ranks, added in rank order, have in common."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._paths: list[Path] = []
        self._names: dict[str, int] = {}  # position of each tensor
        self._first: Header | None = None
        self._other_names: dict[int, set[str]] = {}
        self._tensors = np.zeros(0, np.int64)
        self._placements = _Placements()
        self._table = OffsetTable(0, world_size)
        self._further: dict[tuple[int, int], tuple[int, ...]] = {}
        self._unlike: dict[int, int] = {}
        self._places: dict[tuple[Shape, Shape], Path] = {}
        self._contents: dict[bytes, int] = {}
        self._same_content: list[tuple[int, int]] = []

    def add(self, header: Header) -> None:
        """Take in the header of the next rank."""
        rank = len(self._paths)
        self._paths.append(header.path)
        for place in header.places:
            other = self._places.setdefault(place, header.path)
            if other is not header.path:
                raise DamagedError(
                    f"{header.path}: stands at the same place of the device mesh as {other.name}; one is a copy of "
                    "the other"
                )
        if self._first is None:
            self._first = header
            self._names = {name: position for position, name in enumerate(header.names)}
            self._tensors = np.zeros(len(header.names), np.int64)
            self._table = OffsetTable(len(header.names), self._world_size)
        elif header.names != self._first.names:
            self._other_names[rank] = set(header.names)
            if self._names.keys() != self._other_names[rank]:
                return  # an error, told when all files have been looked at
            header = _in_order(header, self._names)
        self._tensors = self._placements.refine(self._tensors, header)
        self._table.put(rank, header.offsets)
        for position, starts in header.further.items():
            self._further[position, rank] = starts
        for position, digest in header.digests.items():
            if self._first.digests.get(position, digest) != digest:
                self._unlike.setdefault(position, rank)
        if header.content:
            twin = self._contents.setdefault(header.content, rank)
            if twin != rank:
                self._same_content.append((twin, rank))

    def entries(self) -> dict[str, TensorEntry]:
        """An entry a name, in the order of the first file."""
        if self._first is None:
            return {}
        self._check_names()
        ranks = self._placements.of_ranks()
        files = tuple(str(path) for path in self._paths)
        made: dict[int, _Placement] = {}
        entries: dict[str, TensorEntry] = {}
        names = list(self._names)
        for position, name in enumerate(names):
            number = int(self._tensors[position])
            placement = made.get(number)
            if placement is None:
                placement = made[number] = _placement(name, ranks[number], files)
            if position in self._unlike or placement.unlike is not None:
                found = [r for r in (self._unlike.get(position), placement.unlike) if r is not None]
                raise DamagedError(
                    f"{name}: every rank should hold the same {placement.dtype}{list(placement.shape)}, "
                    f"but rank {min(found)} differs from rank 0"
                )
            chunks = self._chunks(position, placement)
            alias = self._first.aliases.get(position)
            entry = TensorEntry(placement.dtype, placement.shape, chunks, None if alias is None else names[alias])
            entry.check_tiling(name)
            entries[name] = entry
        return entries

    def _check_names(self) -> None:
        """Raise for a name that some file lacks."""
        first = self._names.keys()
        if all(names == first for names in self._other_names.values()):
            return
        for name in dict.fromkeys([*first, *(n for names in self._other_names.values() for n in names)]):
            lacking = [path.name for r, path in enumerate(self._paths) if name not in self._other_names.get(r, first)]
            if lacking:
                raise DamagedError(f"{name}: not in {', '.join(sorted(lacking))}, but in the files of the other ranks")

    def _chunks(self, position: int, placement: _Placement) -> Sequence[Chunk]:
        row = self._table.row(position)
        if placement.cells is not None:
            cells = placement.cells
            offsets = (row if cells.order is None else row[cells.order]).reshape(cells.file.shape)
            return Grid(cells.cuts, placement.files, cells.file, offsets, cells.strides, self._table.unit)
        chunks = []
        for rank, piece, box, strides in placement.pieces:
            start = self._further[position, rank][piece - 1] if piece else int(row[rank]) * self._table.unit
            chunks.append(Chunk(box, ByteSource(placement.files[rank], start, strides)))
        return compact(chunks)

    def same_content(self) -> Iterator[tuple[int, int]]:
        """Pairs of ranks whose sharded tensors have the same checksums."""
        yield from self._same_content


class OffsetTable:
    """Where the bytes of each tensor begin in the file of each rank, 4 bytes a number where they can be.

    torch.save begins every record at a multiple of 64, so offsets are counted in units of that until one is no multiple
    of it, or too large; from then on in bytes, of 8 each.
    """

    def __init__(self, tensors: int, ranks: int) -> None:
        self.unit = 64
        self._numbers: npt.NDArray[Any] = np.zeros((tensors, ranks), np.uint32)

    def put(self, rank: int, offsets: npt.NDArray[np.int64]) -> None:
        """Note the offsets of a rank, in bytes, shape `[tensors]`."""
        if self.unit > 1 and ((offsets % self.unit).any() or (offsets >= self.unit << 32).any()):
            self._numbers = self._numbers.astype(np.int64) * self.unit
            self.unit = 1
        self._numbers[:, rank] = offsets // self.unit

    def row(self, tensor: int) -> npt.NDArray[Any]:
        """The offsets of one tensor in units, shape `[ranks]`."""
        row: npt.NDArray[Any] = self._numbers[tensor]
        return row


class _Placements:
    """Which tensors are cut alike on every rank so far: each such set has a number, and its cut on each rank."""

    def __init__(self) -> None:
        self._levels: list[list[tuple[int, Cut]]] = []  # for each rank: number -> its number one rank before, its cut

    def refine(self, tensors: npt.NDArray[np.int64], header: Header) -> npt.NDArray[np.int64]:
        """The number of each tensor's set, given those before this rank."""
        pairs, numbers = np.unique(tensors * len(header.cuts) + header.cut, return_inverse=True)
        before = [divmod(int(pair), len(header.cuts)) for pair in pairs]
        self._levels.append([(number, header.cuts[cut]) for number, cut in before])
        return np.asarray(numbers, np.int64).reshape(-1)

    def of_ranks(self) -> list[list[Cut]]:
        """For each set, its cut on every rank."""
        found = []
        for last in range(len(self._levels[-1]) if self._levels else 0):
            number, cuts = last, []
            for level in reversed(self._levels):
                number, cut = level[number]
                cuts.append(cut)
            found.append(cuts[::-1])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """A grid without its offsets. order: the rank of each cell, in row-major order; None where that is 0, 1, 2, ..."""

    cuts: tuple[Cuts, ...]
    file: npt.NDArray[np.int32]
    strides: npt.NDArray[Any]
    order: npt.NDArray[np.int64] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Placement:
    """How tensors of one shape lie in the files of all ranks: in cells of a grid, or in pieces, each given as rank,
    number among the rank's pieces, box and strides. unlike: a rank whose plain tensor is of another type or shape."""

    dtype: str
    shape: Shape
    files: tuple[str, ...]
    cells: _Cells | None = None
    pieces: tuple[tuple[int, int, Box, Shape], ...] = ()
    unlike: int | None = None


def _placement(name: str, of_ranks: Sequence[Cut], files: tuple[str, ...]) -> _Placement:
    first = of_ranks[0]
    if all(cut.whole for cut in of_ranks):
        facts = [(cut.dtype, cut.shape) for cut in of_ranks]
        unlike = next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
        of_ranks = of_ranks[:1]
    else:
        unlike = None
        for file, cut in zip(files, of_ranks, strict=True):
            if cut.whole:
                raise DamagedError(f"{name}: sharded on some ranks and whole in {Path(file).name}")
        seen = {(cut.dtype, cut.shape) for cut in of_ranks}
        if len(seen) > 1:
            raise DamagedError(
                f"{name}: the ranks' files disagree: " + ", ".join(f"{d}{list(s)}" for d, s in sorted(seen))
            )
    # Replicas (HSDP, tensor parallelism) hold the same box: each box counts once.
    pieces: dict[Box, tuple[int, int, Box, Shape]] = {}
    for rank, cut in enumerate(of_ranks):
        for piece, (box, strides) in enumerate(zip(cut.boxes, cut.strides, strict=True)):
            pieces.setdefault(box, (rank, piece, box, strides))
    grid = lattice(list(pieces)) if not any(piece for _, piece, _, _ in pieces.values()) else None
    if grid is None:
        return _Placement(first.dtype, first.shape, files, pieces=tuple(pieces.values()), unlike=unlike)
    held = list(pieces.values())
    ordered = [held[number] for number in grid.order]
    cells = tuple(len(cuts) - 1 for cuts in grid.cuts)
    ranks = [rank for rank, _, _, _ in ordered]
    return _Placement(
        first.dtype,
        first.shape,
        files,
        _Cells(
            grid.cuts,
            np.array(ranks, np.int32).reshape(cells),
            strides_of([strides for _, _, _, strides in ordered], cells),
            None if ranks == list(range(len(files))) else np.array(ranks, np.int64),
        ),
        unlike=unlike,
    )


def _compare(left: TorchFile, right: TorchFile, items: Items) -> None:
    ours, theirs = sharded_parts(items(left)), sharded_parts(items(right))
    refuse_copy(left, right, [(part.pieces, theirs[name].pieces) for name, part in ours.items()])


def _in_order(header: Header, names: Mapping[str, int]) -> Header:
    """The same header with its tensors in the order of another file."""
    to = np.array([names[name] for name in header.names], np.int64)
    cut, offsets = np.empty_like(header.cut), np.empty_like(header.offsets)
    cut[to], offsets[to] = header.cut, header.offsets
    return Header(
        header.path,
        tuple(names),
        header.cuts,
        cut,
        offsets,
        {int(to[position]): starts for position, starts in header.further.items()},
        {int(to[position]): digest for position, digest in header.digests.items()},
        {},
        header.places,
        header.content,
    )


__all__ = ["Items", "Join", "RankFiles", "RankPart", "join_ranks", "rank_part", "state_dict"]
