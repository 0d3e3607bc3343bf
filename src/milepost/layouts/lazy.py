"""Chunks of a tensor that are made when first looked at, where making them costs reads that may never be needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from milepost.index import Chunk


class LazyChunks(Sequence[Chunk]):
    """What `make` gives, which is called once.

    count: how many these are, where that is known before
    """

    __slots__ = ("_chunks", "_count", "_make")

    def __init__(self, make: Callable[[], Iterable[Chunk]], count: int | None = None) -> None:
        self._make, self._count = make, count
        self._chunks: tuple[Chunk, ...] | None = None

    def _made(self) -> tuple[Chunk, ...]:
        if self._chunks is None:
            self._chunks = tuple(self._make())
        return self._chunks

    def __len__(self) -> int:
        return len(self._made()) if self._count is None else self._count

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._made()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._made())
