"""Which byte ranges go where: a plan is a stream of windows, each small enough to pass through memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from milepost.errors import IncompleteError
from milepost.index import Box, Chunk, TensorEntry, TensorIndex, itemsize

GATHERED = 1 << 20
"""Bytes of a window that is gathered from pieces beside each other: it goes through memory, and what is used again
while it is still in a core's cache is moved in half the time."""

MOST_PIECES = 64
"""Pieces of a window whose pieces are runs of whole rows."""


@dataclass(frozen=True, slots=True)
class Window:
    """One box to move: its tensor, its element type in the source, and the pieces of chunks that make it up.

    A window is a run of whole rows of the wanted box (or part of one row), so that it is contiguous in a destination
    that holds the box row by row.
    """

    name: str
    dtype: str
    box: Box
    pieces: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the window in the source's element type."""
        return self.box.volume * itemsize(self.dtype)


def plan(index: TensorIndex, wanted: Iterable[tuple[str, Box]], window_bytes: int) -> Iterator[Window]:
    """Windows that together move each wanted box once, none larger than `window_bytes` unless one element is.

    Raises IncompleteError, naming tensor and box, where the index does not hold all of a wanted box.
    """
    for name, box in wanted:
        entry = index.get(name)
        if entry is None:
            raise IncompleteError(f"the checkpoint holds no tensor {name}")
        yield from _plan_box(name, entry, box, window_bytes)


def windows(entry: TensorEntry, window_bytes: int) -> Iterator[Box]:
    """All of a tensor cut into boxes of at most `window_bytes`, in row-major order."""
    yield from _cut(Box.whole(entry.shape), (), max(1, window_bytes // itemsize(entry.dtype)))


def _plan_box(name: str, entry: TensorEntry, box: Box, window_bytes: int) -> Iterator[Window]:
    pieces = list(entry.pieces(box))
    covered = sum(piece.box.volume for piece in pieces)
    if covered != box.volume:
        raise IncompleteError(f"{name}: {covered} of the {box.volume} elements of box {box} are in the checkpoint")
    pieces.sort(key=lambda piece: piece.box.offsets)
    limit = max(1, window_bytes // itemsize(entry.dtype))
    if all(piece.box.sizes[1:] == box.sizes[1:] for piece in pieces):  # runs of whole rows, as FSDP cuts
        yield from _rows_together(name, entry.dtype, pieces, limit)
        return
    limit = max(1, min(window_bytes, GATHERED) // itemsize(entry.dtype))
    # Rows at which a chunk begins: cutting there lets most windows be one contiguous range of one file.
    edges = tuple(sorted({piece.box.offsets[0] for piece in pieces})) if box.sizes else ()
    waiting = deque(pieces)
    near: list[Chunk] = []
    for part in _cut(box, edges, limit):
        # Parts come row after row, so each piece is looked at only while the rows that it reaches pass by.
        start, end = _rows(part)
        while waiting and _rows(waiting[0].box)[0] < end:
            near.append(waiting.popleft())
        near = [piece for piece in near if _rows(piece.box)[1] > start]
        inside = tuple(
            piece.narrow(shared, entry.dtype) for piece in near if (shared := piece.box.intersect(part)) is not None
        )
        yield Window(name, entry.dtype, part, inside)


def _rows_together(name: str, dtype: str, pieces: list[Chunk], limit: int) -> Iterator[Window]:
    """Windows of pieces that are runs of whole rows, in their order: large ones cut, small neighbours together, since
    each window costs as much as the move of some hundred kilobytes."""
    together: list[Chunk] = []
    volume = 0
    for piece in pieces:
        size = piece.box.volume
        if together and (
            volume + size > limit or len(together) == MOST_PIECES or _rows(together[-1].box)[1] != _rows(piece.box)[0]
        ):
            yield _joined(name, dtype, together)
            together, volume = [], 0
        if size > limit:
            for part in _cut(piece.box, (), limit):
                yield Window(name, dtype, part, (piece.narrow(part, dtype),))
        else:
            together.append(piece)
            volume += size
    if together:
        yield _joined(name, dtype, together)


def _joined(name: str, dtype: str, pieces: list[Chunk]) -> Window:
    first = pieces[0].box
    if len(pieces) == 1:
        return Window(name, dtype, first, (pieces[0],))
    rows = _rows(pieces[-1].box)[1] - first.offsets[0]
    return Window(name, dtype, Box(first.offsets, (rows, *first.sizes[1:])), tuple(pieces))


def _rows(box: Box) -> tuple[int, int]:
    """Where a box begins and ends along its first dimension; a scalar is one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _cut(box: Box, edges: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a box into runs of rows of at most `limit` elements, and never across an edge of the first dimension."""
    if not box.volume:
        return
    if not box.sizes:
        yield box
        return
    row = box.volume // box.sizes[0]
    start, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    if row > limit and len(box.sizes) > 1:
        for position in range(start, end):
            inner = Box(box.offsets[1:], box.sizes[1:])
            for part in _cut(inner, (), limit):
                yield Box((position, *part.offsets), (1, *part.sizes))
        return
    step = max(1, limit // row)
    stops = [edge for edge in edges if start < edge < end] + [end]
    for stop in stops:
        while start < stop:
            rows = min(step, stop - start)
            yield Box((start, *box.offsets[1:]), (rows, *box.sizes[1:]))
            start += rows
