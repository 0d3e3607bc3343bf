"""Writing a torch DCP folder, box by box, in any order and from several threads, without torch.

    __0_{i}.distcp   archives one after the other (`milepost.layouts.archive_writer`), each a box of a tensor
    .metadata        the table of contents, written last (`milepost.layouts.dcp.table`)

A reader of DCP takes a box whole into memory before it picks what it needs, so no box is larger than `MAX_BOX` unless
one row is. The same bytes may lie under several keys at no cost: `.metadata` then names one archive twice.
`DcpWriter` is a sink for transfers (`milepost.transfer.Sink`); it takes the bytes as they pass, since each archive
ends with their CRC-32.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from milepost.crc import crc32, crc32_of_both
from milepost.errors import CheckpointError, MismatchError
from milepost.fileio import write_exactly
from milepost.index import Bits, Box, Shape, contiguous_strides, itemsize
from milepost.layouts.archive_writer import ALIGNMENT, Archive, object_archive, tensor_archive
from milepost.layouts.dcp.metadata import DATA_SUFFIX, METADATA
from milepost.layouts.dcp.table import Part, Tensor, table_of_contents
from milepost.layouts.new_files import new_files

MAX_BOX = 64 << 20
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies inside the tensor of a key, which may hold those of all layers.

    at:  its position in the dimensions that stand before its own
    of:  their sizes
    """

    key: str
    at: Shape = ()
    of: Shape = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be written: its element type, its shape, and its places, at least one."""

    dtype: str
    shape: Shape
    places: tuple[Place, ...]

    def boxes(self, max_box: int) -> Iterator[Box]:
        """All of it, cut into runs of rows of at most `max_box` bytes."""
        whole = Box.whole(self.shape)
        if not self.shape or not whole.volume:
            yield whole
            return
        rows = max(1, max_box // (whole.volume // self.shape[0] * itemsize(self.dtype)))
        for first in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - first)
            yield Box((first, *whole.offsets[1:]), (count, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Slot:
    """One box of a tensor, its archive, and that archive's place: number of the file, first byte."""

    name: str
    box: Box
    archive: Archive
    file: str
    start: int


@dataclass(frozen=True)
class Contents:
    """Every file before a byte of it is there.

    tensors:  what is written
    slots:    where each box goes
    objects:  archive of a small value -> the keys that it stands for, and its first byte in the first file
    sizes:    bytes of each file, by its name
    """

    tensors: Mapping[str, Stored]
    slots: tuple[Slot, ...]
    objects: Mapping[bytes, tuple[list[str], int]]
    sizes: Mapping[str, int]

    def wanted(self, files: Container[str]) -> Iterator[tuple[str, Box]]:
        """The boxes that go into these files: what a plan must bring."""
        return ((slot.name, slot.box) for slot in self.slots if slot.file in files)

    def write_table(self, directory: Path) -> None:
        """Write `.metadata`."""
        tensors: dict[str, Tensor] = {}
        for slot in self.slots:
            stored = self.tensors[slot.name]
            for place in stored.places:
                tensor = tensors.setdefault(place.key, Tensor(stored.dtype, place.of + stored.shape))
                box = Box(place.at + slot.box.offsets, (1,) * len(place.at) + slot.box.sizes)
                tensor.parts.append(Part(box, slot.file, slot.start, slot.archive.length))
        first = next(iter(self.sizes))
        objects = ((key, first, start, len(archive)) for archive, (keys, start) in self.objects.items() for key in keys)
        (directory / METADATA).write_bytes(table_of_contents(tensors, objects))


def lay_out(
    tensors: Mapping[str, Stored], objects: Mapping[str, Any], max_file_size: int, max_box: int = MAX_BOX
) -> Contents:
    """Where everything goes; only a single box may make a file pass `max_file_size` bytes.

    objects: key -> a small plain value

    Raises MismatchError where tensors of one key differ in type or shape, RefusedError for a type that torch's
    archives do not have.
    """
    _check_alike(tensors)
    small: dict[bytes, tuple[list[str], int]] = {}
    sizes = {_file(0): 0}
    for key, value in objects.items():
        archive = object_archive(value)
        if archive not in small:
            small[archive] = [], sizes[_file(0)]
            sizes[_file(0)] += _aligned(len(archive))
        small[archive][0].append(key)
    slots = []
    for name, stored in tensors.items():
        for box in stored.boxes(max_box):
            planned = tensor_archive(stored.dtype, (1,) * len(stored.places[0].at) + box.sizes)
            file = _file(len(sizes) - 1)
            if sizes[file] and sizes[file] + planned.length > max_file_size:
                file = _file(len(sizes))
                sizes[file] = 0
            slots.append(Slot(name, box, planned, file, sizes[file]))
            sizes[file] += _aligned(planned.length)
    return Contents(tensors, tuple(slots), small, sizes)


def _check_alike(tensors: Mapping[str, Stored]) -> None:
    first: dict[str, str] = {}
    for name, stored in tensors.items():
        for place in stored.places:
            other = first.setdefault(place.key, name)
            known = tensors[other]
            if (stored.dtype, stored.shape) != (known.dtype, known.shape):
                raise MismatchError(
                    f"{name} is {stored.dtype}{list(stored.shape)}, {other} {known.dtype}{list(known.shape)}: they "
                    "cannot lie in one tensor; --dtype makes their types one"
                )


def _file(number: int) -> str:
    return f"__0_{number}{DATA_SUFFIX}"


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT


@dataclass(slots=True)
class _Filling:
    """What has come of a slot: run of bytes by its begin in the elements -> its length and CRC-32."""

    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    come: int = 0

    def checksum(self) -> int:
        total = 0
        for _, (length, checksum) in sorted(self.runs.items()):
            total = crc32_of_both(total, checksum, length)
        return total


class DcpWriter:
    """The data files of one checkpoint in `directory`, open for writing; a context manager.

    only:     the files that this process writes, where others write the rest; all of them by default
    written:  called with file descriptor, first byte and number of bytes that have just been written

    Leaving the context well flushes the files to disk, and raises CheckpointError where a box has not come.
    `Contents.write_table` is left to the caller: one process writes it, last.
    """

    def __init__(
        self,
        directory: Path,
        contents: Contents,
        only: Container[str] | None = None,
        written: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._written = written
        self._slots: dict[str, list[Slot]] = {}
        self._filling: dict[tuple[str, int], _Filling] = {}
        self._unwritten: set[tuple[str, int]] = set()
        self._lock = Lock()
        self._tensors = contents.tensors
        sizes = {file: size for file, size in contents.sizes.items() if only is None or file in only}
        with ExitStack() as stack:
            self._fds = stack.enter_context(new_files(directory, sizes))
            self._begin(contents)
            stack.push(self._check_all_came)  # before the files are flushed and closed
            self._open = stack.pop_all()

    def _begin(self, contents: Contents) -> None:
        """Note which boxes are to come, and write what needs none."""
        for slot in contents.slots:
            if slot.file in self._fds:
                slots = self._slots.setdefault(slot.name, [])
                slots.append(slot)
                if slot.archive.nbytes:
                    self._unwritten.add((slot.name, len(slots) - 1))
                else:
                    self._finish(slot, 0)
        first = next(iter(contents.sizes))
        if first in self._fds:
            for archive, (_, start) in contents.objects.items():
                write_exactly(self._fds[first], archive, start)

    def _check_all_came(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._unwritten:
            raise CheckpointError(f"{min(self._unwritten)[0]}: a part of it has not come, so it was not written")

    def dtype(self, name: str) -> str:
        """The element type in which the tensor is written."""
        return self._tensors[name].dtype

    def file_range(self, name: str, box: Box) -> None:
        """None: the bytes of every box must pass by."""

    def write(self, name: str, box: Box, bits: Bits) -> None:
        """Take a part of one of the boxes of `Contents.wanted`, one run of it in row-major order."""
        slots = self._slots[name]
        first = box.offsets[0] if box.offsets else 0
        number = bisect_right(slots, first, key=lambda slot: slot.box.offsets[0] if slot.box.offsets else 0) - 1
        slot = slots[number]
        inner = box.within(slot.box)
        strides = contiguous_strides(slot.box.sizes)
        begin = sum(a * b for a, b in zip(inner.offsets, strides, strict=True)) * bits.itemsize
        data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data
        fd, at = self._fds[slot.file], slot.start + slot.archive.start + begin
        write_exactly(fd, data, at)
        if self._written is not None:
            self._written(fd, at, len(data))
        run = len(data), crc32(data)
        with self._lock:
            filling = self._filling.setdefault((name, number), _Filling())
            filling.runs[begin] = run
            filling.come += run[0]
            full = filling.come == slot.archive.nbytes
            if full:
                del self._filling[name, number]
        if full:
            self._finish(slot, filling.checksum())
            with self._lock:
                self._unwritten.remove((name, number))

    def _finish(self, slot: Slot, checksum: int) -> None:
        fd, archive = self._fds[slot.file], slot.archive
        write_exactly(fd, archive.finished_head(checksum), slot.start)
        write_exactly(fd, archive.tail(checksum), slot.start + archive.start + archive.nbytes)

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
