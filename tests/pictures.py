"""Hypothesis strategies: tensors as chunks over a real file, beside the numpy arrays that they stand for."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from milepost.index import Bits, Box, ByteSource, Chunk, TensorEntry, bits_dtype, contiguous_strides, itemsize

DTYPES = ("uint8", "bfloat16", "float32", "int64")


@dataclass(frozen=True)
class Picture:
    """An entry, and the bit patterns that it must read as."""

    entry: TensorEntry
    bits: Bits

    def __repr__(self) -> str:
        boxes = ", ".join(f"{c.box} strides {c.source.strides}" for c in self.entry.chunks)
        return f"{self.entry.dtype}{list(self.entry.shape)} of {boxes}"


def data_file() -> tuple[Path, bytes]:
    """A file of 16 KiB of random bytes, the same for the whole session."""
    if not _FILES:
        directory = tempfile.mkdtemp(prefix="pictures-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = Path(directory) / "data"
        path.write_bytes(np.random.default_rng(0).bytes(1 << 14))
        _FILES.append((path, path.read_bytes()))
    return _FILES[0]


_FILES: list[tuple[Path, bytes]] = []


def _chunk(draw: st.DrawFn, dtype: str, box: Box) -> tuple[Chunk, Bits]:
    """A chunk with its dimensions in any order in the file, and maybe gaps between its innermost elements."""
    path, data = data_file()
    order = draw(st.permutations(range(len(box.sizes))))
    gap = draw(st.sampled_from((1, 1, 3)))
    dense = contiguous_strides(tuple(box.sizes[dim] for dim in order))
    strides = [0] * len(order)
    for dim, stride in zip(order, dense, strict=True):
        strides[dim] = stride * gap
    start = draw(st.integers(0, 64)) * itemsize(dtype) + draw(st.integers(0, 3))
    offset = (lambda: start) if draw(st.booleans()) else start
    bits = bits_dtype(dtype)
    flat = np.frombuffer(data, bits, offset=start, count=(len(data) - start) // bits.itemsize)
    values = np.lib.stride_tricks.as_strided(flat, box.sizes, [s * bits.itemsize for s in strides])
    return Chunk(box, ByteSource(str(path), offset, tuple(strides))), values.copy()


@st.composite
def pictures(
    draw: st.DrawFn,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    min_dims: int = 0,
    min_side: int = 0,
) -> Picture:
    """A tensor of up to three dimensions, tiled by a grid of chunks in any order."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(min_side, 6), min_size=min_dims, max_size=3)))
    cuts = []
    for size in shape:
        inner = draw(st.sets(st.integers(0, size), max_size=2))
        edges = sorted({0, size} | inner)
        cuts.append(list(itertools.pairwise(edges)) or [(0, 0)])
    bits = np.zeros(shape, bits_dtype(dtype))
    chunks = []
    for cell in itertools.product(*cuts):
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        chunk, values = _chunk(draw, dtype, box)
        bits[box.slices()] = values
        chunks.append(chunk)
    return Picture(TensorEntry(dtype, shape, tuple(draw(st.permutations(chunks)))), bits)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside a tensor of this shape; it may hold nothing."""
    offsets, sizes = [], []
    for size in shape:
        low = draw(st.integers(0, size))
        offsets.append(low)
        sizes.append(draw(st.integers(0, size - low)))
    return Box(tuple(offsets), tuple(sizes))


def entry_of(path: Path, dtype: str, shape: tuple[int, ...], offset: int = 0) -> TensorEntry:
    """A tensor that lies in one run of a file."""
    source = ByteSource(str(path), offset, contiguous_strides(shape))
    return TensorEntry(dtype, shape, (Chunk(Box.whole(shape), source),))
