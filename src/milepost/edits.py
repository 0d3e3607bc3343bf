"""Edits of the index: what renaming, slicing, joining and turning tensors mean when no byte has to move.

Each takes entries and returns an entry whose chunks point at the same bytes. A cut that does not fit raises; nothing
is clipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from milepost.chunks import Grid, compact, joined
from milepost.errors import MismatchError
from milepost.index import Box, Chunk, Shape, TensorEntry, TensorIndex, itemsize


def narrow(entry: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
    """Elements `start` to `start + length` along `dim`."""
    _check_dim(dim, len(entry.shape))
    if start < 0 or length < 0 or start + length > entry.shape[dim]:
        raise MismatchError(
            f"cannot take {start}:{start + length} of dimension {dim} of a tensor of shape {list(entry.shape)}"
        )
    shape = _set(entry.shape, dim, length)
    if isinstance(entry.chunks, Grid) and length:
        part = entry.chunks.crop(dim, start, start + length, itemsize(entry.dtype))
        return TensorEntry(entry.dtype, shape, () if part is None else part.moved(dim, -start))
    origin = Box(_set((0,) * len(shape), dim, start), shape)
    chunks = [Chunk(piece.box.within(origin), piece.source) for piece in (entry.pieces(origin) if length else ())]
    return TensorEntry(entry.dtype, shape, chunks)


def select(entry: TensorEntry, dim: int, position: int) -> TensorEntry:
    """The slice at `position` along `dim`, with that dimension gone."""
    one = narrow(entry, dim, position, 1)
    return _rearrange(one, [other for other in range(len(entry.shape)) if other != dim])


def unstack(entry: TensorEntry) -> list[TensorEntry]:
    """The slices at every position along the first dimension, which is gone then. Each chunk is looked at once, so the
    cost is not that of a `select` for each position."""
    _check_dim(0, len(entry.shape))
    if isinstance(entry.chunks, Grid):
        return [select(entry, 0, position) for position in range(entry.shape[0])]
    parts: list[list[Chunk]] = [[] for _ in range(entry.shape[0])]
    for chunk in entry.chunks:
        first = chunk.box.offsets[0]
        for position in range(first, first + chunk.box.sizes[0]):
            box = Box((position, *chunk.box.offsets[1:]), (1, *chunk.box.sizes[1:]))
            source = chunk.narrow(box, entry.dtype).source
            parts[position].append(
                Chunk(Box(box.offsets[1:], box.sizes[1:]), replace(source, strides=source.strides[1:]))
            )
    return [TensorEntry(entry.dtype, entry.shape[1:], chunks) for chunks in parts]


def every(entry: TensorEntry, dim: int, start: int, step: int) -> TensorEntry:
    """Elements `start`, `start + step`, `start + 2 * step`, ... along `dim`, as `values[start::step]`."""
    _check_dim(dim, len(entry.shape))
    if start < 0 or step < 1 or start > entry.shape[dim]:
        raise MismatchError(f"cannot take {start}::{step} of dimension {dim} of a tensor of shape {list(entry.shape)}")
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        low = chunk.box.offsets[dim]
        first = max(0, -((start - low) // step))  # of the elements taken, the first that this chunk holds
        end = max(0, -((start - low - chunk.box.sizes[dim]) // step))
        if end > first:
            begins = start + first * step
            held = Box(
                _set(chunk.box.offsets, dim, begins), _set(chunk.box.sizes, dim, low + chunk.box.sizes[dim] - begins)
            )
            source = chunk.narrow(held, entry.dtype).source
            strides = _set(source.strides, dim, source.strides[dim] * step)
            box = Box(_set(held.offsets, dim, first), _set(held.sizes, dim, end - first))
            chunks.append(Chunk(box, replace(source, strides=strides)))
    taken = compact(chunks) if isinstance(entry.chunks, Grid) else chunks
    return TensorEntry(entry.dtype, _set(entry.shape, dim, -((start - entry.shape[dim]) // step)), taken)


def concat(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Tensors joined one after the other along `dim`."""
    first = entries[0]
    _check_dim(dim, len(first.shape))
    chunks: list[Sequence[Chunk]] = []
    length = 0
    for entry in entries:
        alike = len(entry.shape) == len(first.shape) and _set(entry.shape, dim, 0) == _set(first.shape, dim, 0)
        if entry.dtype != first.dtype or not alike:
            raise MismatchError(
                f"cannot join {first.dtype}{list(first.shape)} and {entry.dtype}{list(entry.shape)} "
                f"along dimension {dim}"
            )
        if entry.chunks:
            chunks.append(_moved(entry.chunks, dim, length))
        length += entry.shape[dim]
    return TensorEntry(first.dtype, _set(first.shape, dim, length), _as_one(chunks, dim))


def stack(entries: Sequence[TensorEntry], dim: int = 0) -> TensorEntry:
    """Tensors of one shape stacked along a new dimension `dim`."""
    _check_dim(dim, len(entries[0].shape) + 1)
    return concat([_unsqueeze(entry, dim) for entry in entries], dim)


def permute(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """The tensor with its dimensions in another order, as `torch.permute`."""
    if sorted(dims) != list(range(len(entry.shape))):
        raise MismatchError(f"{list(dims)} is no order of the {len(entry.shape)} dimensions")
    return _rearrange(entry, dims)


def rename(index: TensorIndex, new_name: Callable[[str], str]) -> TensorIndex:
    """The index with every name put through `new_name`; two tensors may not end up under one name."""
    entries: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for name, entry in index.entries.items():
        new = new_name(name)
        if new in entries:
            raise MismatchError(f"{origin[new]} and {name} would both become {new}")
        origin[new] = name
        alias = None if entry.alias_of is None else new_name(entry.alias_of)
        entries[new] = replace(entry, alias_of=alias)
    return index.with_entries(entries)


def _check_dim(dim: int, dims: int) -> None:
    if not 0 <= dim < dims:
        raise MismatchError(f"a tensor of {dims} dimensions has no dimension {dim}")


def _set(values: Shape, position: int, value: int) -> Shape:
    return (*values[:position], value, *values[position + 1 :])


def _unsqueeze(entry: TensorEntry, dim: int) -> TensorEntry:
    dims: list[int | None] = list(range(len(entry.shape)))
    dims.insert(dim, None)
    return _rearrange(entry, dims)


def _moved(chunks: Sequence[Chunk], dim: int, by: int) -> Sequence[Chunk]:
    if isinstance(chunks, Grid):
        return chunks.moved(dim, by)
    return [
        Chunk(Box(_set(c.box.offsets, dim, c.box.offsets[dim] + by), c.box.sizes), c.source) if by else c
        for c in chunks
    ]


def _as_one(parts: Sequence[Sequence[Chunk]], dim: int) -> Sequence[Chunk]:
    """The chunks of tensors joined along `dim`: a grid of grids that fit together, or a list."""
    grids = [part for part in parts if isinstance(part, Grid)]
    grid = joined(grids, dim) if grids and len(grids) == len(parts) else None
    return [chunk for part in parts for chunk in part] if grid is None else grid


def _rearrange(entry: TensorEntry, dims: Sequence[int | None]) -> TensorEntry:
    """The tensor with the dimensions `dims` of this one, where None is a new one of size 1; any left out has size 1."""

    def change(values: Shape, new: int) -> Shape:
        return tuple(new if dim is None else values[dim] for dim in dims)

    chunks: Sequence[Chunk]
    if isinstance(entry.chunks, Grid):
        chunks = entry.chunks.rearranged(dims)
    else:
        chunks = [
            Chunk(
                Box(change(c.box.offsets, 0), change(c.box.sizes, 1)),
                replace(c.source, strides=change(c.source.strides, 1)),
            )
            for c in entry.chunks
        ]
    return TensorEntry(entry.dtype, change(entry.shape, 1), chunks)
