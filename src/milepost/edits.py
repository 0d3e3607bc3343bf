"""Edits of the index: what renaming, slicing, joining and turning tensors mean when no byte has to move.

Each takes entries and returns an entry whose chunks point at the same bytes. A cut that does not fit raises; nothing
is clipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from milepost.errors import MismatchError
from milepost.index import Box, ByteSource, Chunk, Shape, TensorEntry, TensorIndex


def narrow(entry: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
    """Elements `start` to `start + length` along `dim`."""
    _check_dim(dim, len(entry.shape))
    if start < 0 or length < 0 or start + length > entry.shape[dim]:
        raise MismatchError(
            f"cannot take {start}:{start + length} of dimension {dim} of a tensor of shape {list(entry.shape)}"
        )
    shape = _set(entry.shape, dim, length)
    origin = Box(_set((0,) * len(shape), dim, start), shape)
    chunks = [Chunk(piece.box.within(origin), piece.source) for piece in (entry.pieces(origin) if length else ())]
    return TensorEntry(entry.dtype, shape, chunks)


def select(entry: TensorEntry, dim: int, position: int) -> TensorEntry:
    """The slice at `position` along `dim`, with that dimension gone."""
    one = narrow(entry, dim, position, 1)
    return _reshape(one, lambda values: values[:dim] + values[dim + 1 :])


def concat(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Tensors joined one after the other along `dim`."""
    first = entries[0]
    _check_dim(dim, len(first.shape))
    chunks: list[Chunk] = []
    length = 0
    for entry in entries:
        alike = len(entry.shape) == len(first.shape) and _set(entry.shape, dim, 0) == _set(first.shape, dim, 0)
        if entry.dtype != first.dtype or not alike:
            raise MismatchError(
                f"cannot join {first.dtype}{list(first.shape)} and {entry.dtype}{list(entry.shape)} "
                f"along dimension {dim}"
            )
        for chunk in entry.chunks:
            offsets = _set(chunk.box.offsets, dim, chunk.box.offsets[dim] + length)
            chunks.append(Chunk(Box(offsets, chunk.box.sizes), chunk.source))
        length += entry.shape[dim]
    return TensorEntry(first.dtype, _set(first.shape, dim, length), chunks)


def stack(entries: Sequence[TensorEntry], dim: int = 0) -> TensorEntry:
    """Tensors of one shape stacked along a new dimension `dim`."""
    _check_dim(dim, len(entries[0].shape) + 1)
    return concat([_unsqueeze(entry, dim) for entry in entries], dim)


def permute(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """The tensor with its dimensions in another order, as `torch.permute`."""
    if sorted(dims) != list(range(len(entry.shape))):
        raise MismatchError(f"{list(dims)} is no order of the {len(entry.shape)} dimensions")
    return _reshape(entry, lambda values: tuple(values[dim] for dim in dims))


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
    def insert(values: Shape, value: int) -> Shape:
        return (*values[:dim], value, *values[dim:])

    chunks = [
        Chunk(
            Box(insert(c.box.offsets, 0), insert(c.box.sizes, 1)),
            replace(c.source, strides=insert(c.source.strides, 1)),
        )
        for c in entry.chunks
    ]
    return TensorEntry(entry.dtype, insert(entry.shape, 1), chunks)


def _reshape(entry: TensorEntry, change: Callable[[Shape], Shape]) -> TensorEntry:
    """Put the shape, and every chunk's offsets, sizes and strides, through one change of dimensions."""
    chunks = [
        Chunk(
            Box(change(c.box.offsets), change(c.box.sizes)),
            ByteSource(c.source.file, c.source.offset, change(c.source.strides)),
        )
        for c in entry.chunks
    ]
    return TensorEntry(entry.dtype, change(entry.shape), chunks)
