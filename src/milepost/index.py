"""The one picture of a checkpoint: names of tensors, and where the bytes of each box of them lie.

Read this module first; everything else in milepost is written in its words.

    TensorIndex   name -> TensorEntry, plus the checkpoint's small non-tensor objects
    TensorEntry   dtype, shape, chunks
    Chunk         one box of the tensor, and the source of its bytes; many may be held as columns (`milepost.chunks`)
    Box           offsets and sizes, one number a dimension (torch DCP's terms)
    ByteSource    file, byte offset, element strides

An index holds no tensor data. Layouts make one from files (`milepost.layouts`), edits turn one into another
(`milepost.edits`), and transfers move the bytes that it names (`milepost.transfer`). The module depends on nothing
else here but the error types and the reading of bytes (`milepost.fileio`), and on numpy.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milepost.errors import CallError, DamagedError, IncompleteError
from milepost.fileio import read_exactly, read_strided, strided

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Bits = npt.NDArray[Any]
"""Elements as raw bit patterns: unsigned integers of the element's size, so that no value can change on the way."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: torch's name for it, size in bytes, its name in safetensors, and whether it is a float."""

    name: str
    itemsize: int
    safetensors: str
    floating: bool


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        d.name: d
        for d in (
            DType("float64", 8, "F64", True),
            DType("float32", 4, "F32", True),
            DType("float16", 2, "F16", True),
            DType("bfloat16", 2, "BF16", True),
            DType("float8_e4m3fn", 1, "F8_E4M3", True),
            DType("float8_e5m2", 1, "F8_E5M2", True),
            DType("complex64", 8, "C64", False),
            DType("int64", 8, "I64", False),
            DType("int32", 4, "I32", False),
            DType("int16", 2, "I16", False),
            DType("int8", 1, "I8", False),
            DType("uint64", 8, "U64", False),
            DType("uint32", 4, "U32", False),
            DType("uint16", 2, "U16", False),
            DType("uint8", 1, "U8", False),
            DType("bool", 1, "BOOL", False),
        )
    }
)
_BITS: Mapping[int, np.dtype[Any]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    return DTYPES[dtype].itemsize


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer type that carries the bit patterns of `dtype`."""
    return _BITS[DTYPES[dtype].itemsize]


def contiguous_strides(sizes: Shape) -> Shape:
    """Strides, in elements, of a row-major array of these sizes."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: where it begins and how far it reaches along each dimension. A scalar's is `((), ())`."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        """The box that is all of a tensor of this shape."""
        return Box((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The box that both share, or None where they share no element."""
        offsets = []
        sizes = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = max(a, b)
            size = min(a + n, b + m) - low
            if size <= 0:
                return None
            offsets.append(low)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> Box:
        """The same box, counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """As an index into an array of the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class ByteSource:
    """Where the first element of a box lies, and how to step from it along each dimension.

    file:     path of the file
    offset:   byte offset of the first element; a function where finding it costs a read that may never be needed
    strides:  steps in elements, one a dimension
    data:     the bytes themselves where the file holds no run of them, such as a number in its object graph; `offset`
              then counts from their beginning
    """

    file: str
    offset: int | Callable[[], int]
    strides: Shape
    data: bytes | None = None

    def start(self) -> int:
        """Byte offset of the first element."""
        return self.offset if isinstance(self.offset, int) else self.offset()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor and the source of its bytes."""

    box: Box
    source: ByteSource

    def narrow(self, box: Box, dtype: str) -> Chunk:
        """The part of this chunk that is `box`, which lies inside it."""
        return self.part(box, itemsize(dtype))

    def part(self, box: Box, itemsize: int) -> Chunk:
        """The same, of elements of so many bytes."""
        if box == self.box:
            return self
        skip = sum((a - b) * s for a, b, s in zip(box.offsets, self.box.offsets, self.source.strides, strict=True))
        return Chunk(box, replace(self.source, offset=shifted(self.source, skip * itemsize)))

    @property
    def contiguous(self) -> bool:
        """Whether the bytes are one run in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.box.sizes), reversed(self.source.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def span(self) -> int:
        """Number of elements from the first to the last one of the box, both included: what one read must cover."""
        if not self.box.volume:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.box.sizes, self.source.strides, strict=True))


def shifted(source: ByteSource, by: int) -> int | Callable[[], int]:
    """The offset of `source` moved by that many bytes, still lazy where it was lazy."""
    if isinstance(source.offset, int):
        return source.offset + by
    inner = source.offset
    return lambda: inner() + by


class CompactChunks(Sequence[Chunk]):
    """Chunks that are not held one by one (`milepost.chunks`), and what they can say without making each."""

    __slots__ = ()

    @abstractmethod
    def pieces(self, box: Box, itemsize: int) -> Iterator[Chunk]:
        """The parts of chunks that make up `box`."""

    @abstractmethod
    def tiles(self, shape: Shape) -> bool:
        """Whether they are known to cover each element of a tensor of this shape exactly once."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its element type (torch's name), its global shape, the chunks that tile it, and, where it is only
    another name for a tensor, that tensor's name."""

    dtype: str
    shape: Shape
    chunks: Sequence[Chunk]
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * itemsize(self.dtype)

    def pieces(self, box: Box) -> Iterator[Chunk]:
        """The parts of chunks that make up `box`."""
        if isinstance(self.chunks, CompactChunks):
            yield from self.chunks.pieces(box, itemsize(self.dtype))
            return
        for chunk in self.chunks:
            shared = chunk.box.intersect(box)
            if shared is not None:
                yield chunk.narrow(shared, self.dtype)

    def check_tiling(self, name: str) -> None:
        """Raise unless the chunks cover every element exactly once.

        Boxes that together hold as many elements as the tensor, lie inside it, and are pairwise disjoint tile it.
        Disjointness is found by a sweep along one dimension, so only boxes that meet there are compared.
        """
        if isinstance(self.chunks, CompactChunks) and self.chunks.tiles(self.shape):
            return
        whole = Box.whole(self.shape)
        for chunk in self.chunks:
            if len(chunk.box.sizes) != len(self.shape) or (
                chunk.box.volume and whole.intersect(chunk.box) != chunk.box
            ):
                raise DamagedError(
                    f"{name}: box {chunk.box} of {chunk.source.file} lies outside shape {list(self.shape)}"
                )
        covered = sum(chunk.box.volume for chunk in self.chunks)
        if covered < self.numel:
            raise IncompleteError(
                f"{name}: its parts hold {covered} of {self.numel} elements of shape {list(self.shape)}"
            )
        clash = _first_overlap([chunk.box for chunk in self.chunks if chunk.box.volume])
        if clash is not None:
            raise DamagedError(f"{name}: boxes {clash[0]} and {clash[1]} cover the same elements")

    def bits(self, box: Box | None = None) -> Bits:
        """The raw bit patterns of `box` (default: all of it), shape `box.sizes`."""
        box = Box.whole(self.shape) if box is None else box
        out = np.empty(box.sizes, bits_dtype(self.dtype))
        covered = 0
        for piece in self.pieces(box):
            with Path(piece.source.file).open("rb", buffering=0) as file:
                out[piece.box.within(box).slices()] = read_chunk(file.fileno(), piece, self.dtype)
            covered += piece.box.volume
        if covered != box.volume:
            raise IncompleteError(f"box {box}: {covered} of {box.volume} elements are there")
        return out

    def numpy(self) -> npt.NDArray[Any]:
        """The values, shape `shape`. bfloat16, which numpy lacks, comes as float32 of the same values.

        Raises CallError for the 8-bit floats, which numpy lacks too; `read` gives them.
        """
        bits = self.bits()
        if self.dtype == "bfloat16":
            wide = bits.reshape(-1).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(self.shape)
        if self.dtype.startswith("float8"):
            raise CallError(f"numpy has no {self.dtype}; read it as a torch tensor")
        return bits.view(np.dtype(self.dtype))

    def read(self) -> torch.Tensor:
        """The tensor itself, in its own dtype, in host memory."""
        import torch  # noqa: PLC0415  only this verb needs it

        bits = self.bits()
        flat = torch.from_numpy(bits.reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, self.dtype)).reshape(self.shape)


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    dims = range(len(boxes[0].offsets) if boxes else 0)
    # The dimension with the most cuts parts the boxes best.
    dim = max(dims, key=lambda d: len({box.offsets[d] for box in boxes}), default=None)
    live: list[Box] = []
    for box in boxes if dim is None else sorted(boxes, key=lambda box: box.offsets[dim]):
        if dim is not None:
            live = [other for other in live if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in live:
            if other.intersect(box) is not None:
                return other, box
        live.append(box)
    return None


def read_chunk(fd: int, chunk: Chunk, dtype: str) -> Bits:
    """Read the elements of `chunk` from its open file: an array of bit patterns, shape `chunk.box.sizes`.

    The memory used beside the result is small, whatever the strides are (`milepost.fileio`).
    """
    out = np.empty(chunk.box.sizes, bits_dtype(dtype))
    if not out.size:
        return out
    source = chunk.source
    if source.data is not None:
        held = np.frombuffer(source.data, out.dtype, offset=source.start())
        out[...] = strided(held, out.shape, source.strides)
    elif chunk.contiguous:
        read_exactly(fd, out.reshape(-1).data.cast("B"), source.start(), source.file)
    else:
        read_strided(fd, out, source.strides, source.start(), source.file)
    return out


@dataclass(frozen=True)
class TensorIndex(Mapping[str, TensorEntry]):
    """The picture of one checkpoint (of one role): a mapping of tensor names to entries.

    Weights carry Hugging Face's names once they are mapped; optimizer moments are `optim/<weight>/exp_avg`,
    `optim/<weight>/exp_avg_sq` and `optim/<weight>/step`.

    entries:     name -> entry, in the order of the files
    layout:      which layout the files have: "fsdp", "huggingface", ...
    files:       every file that the picture is drawn from
    world_size:  number of ranks that wrote it; 1 where that means nothing
    objects:     small state that is not tensors (schedulers, RNG, hyperparameters); may be read when first asked for
    unread:      tensors that the files hold and the picture lacks, and why, one line each
    skipped:     what else the files hold, which is no tensor of a model, one line each
    """

    entries: Mapping[str, TensorEntry]
    layout: str
    files: tuple[Path, ...] = ()
    world_size: int = 1
    objects: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TensorEntry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def with_entries(self, entries: Mapping[str, TensorEntry]) -> TensorIndex:
        """The same checkpoint with other entries: what an edit returns."""
        return replace(self, entries=entries)

    def weights(self) -> TensorIndex:
        """Only the model's own tensors: no optimizer state."""
        return self.with_entries({n: e for n, e in self.entries.items() if not n.startswith(OPTIMIZER_PREFIX)})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, aliases not counted."""
        return sum(entry.nbytes for entry in self.entries.values() if entry.alias_of is None)

    def check_tiling(self) -> None:
        """Raise unless the chunks of every tensor cover it exactly once."""
        for name, entry in self.entries.items():
            entry.check_tiling(name)


OPTIMIZER_PREFIX = "optim/"


def moment_name(weight: str, moment: str) -> str:
    """Canonical name of an optimizer moment (`exp_avg`, `exp_avg_sq`, `step`) of a weight."""
    return f"{OPTIMIZER_PREFIX}{weight}/{moment}"
