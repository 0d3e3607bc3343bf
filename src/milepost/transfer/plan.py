"""Which byte ranges go where: a plan is a stream of windows, each small enough to pass through memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from milepost.errors import IncompleteError
from milepost.index import Box, Chunk, TensorEntry, TensorIndex, itemsize


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
    if all(piece.box.sizes[1:] == box.sizes[1:] for piece in pieces):
        # Each piece is a run of whole rows, as FSDP cuts: windows are runs of rows of one piece.
        for piece in pieces:
            for part in (piece.box,) if piece.box.volume <= limit else _cut(piece.box, (), limit):
                yield Window(name, entry.dtype, part, (piece.narrow(part, entry.dtype),))
        return
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
