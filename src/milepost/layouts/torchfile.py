"""Files of `torch.save` (`.pt`) as byte ranges, read without torch.

Such a file is a zip archive whose records are stored uncompressed: `<name>/data.pkl`, a pickle of the object graph,
and one record `<name>/data/<key>` a storage. A tensor is a view of a storage (offset, sizes, strides), so its bytes
are a range of the file: record start + storage offset x element size. The pickle is read by `milepost.layouts.pickles`
and runs nothing.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milepost.crc import crc32
from milepost.errors import DamagedError, NotFoundError, RefusedError
from milepost.fileio import open_to_read, read_exactly, unreadable
from milepost.index import Box, ByteSource, Chunk, TensorEntry, itemsize
from milepost.layouts import pickles
from milepost.layouts.pickles import TensorRef

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_UTF8_NAME = 0x800  # flag of a record
_BLOCK = 1 << 20  # bytes
_MALFORMED = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    struct.error,
    ArithmeticError,
    LookupError,
    NotImplementedError,
    ValueError,
)
"""What zipfile raises on bytes that are no whole archive."""

_EXPANDED_LIMIT = 1 << 30
"""Largest size in bytes of a tensor that repeats elements (an expanded view), so holds more than its file does."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record of the archive: name, first byte, size in bytes, and its CRC-32."""

    name: str
    start: int
    size: int
    crc32: int


class TorchFile:
    """An opened `.pt` archive: its object graph, with tensors as references to byte ranges.

    span:  first byte and length of the archive where it is a part of a file; None for the whole file

    Raises DamagedError where the file is truncated or is no such archive, RefusedError where its pickle names a global
    that no checkpoint needs.
    """

    def __init__(self, path: Path, span: tuple[int, int] | None = None) -> None:
        self.path = path
        self._records: dict[str, ZipRecord] = {}
        where = str(path) if span is None else f"{path}, bytes {span[0]} to {sum(span)}"
        try:
            with open_to_read(path) as file:
                start, length = span or (0, os.fstat(file.fileno()).st_size)
                with zipfile.ZipFile(_Part(file.fileno(), start, length)) as archive:
                    # records end where the directory begins
                    self._read_directory(file.fileno(), archive.infolist(), start, min(length, archive.start_dir))
                self.root = pickles.load(self._read_record(file.fileno(), "data.pkl"), where)
        except FileNotFoundError:
            raise NotFoundError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise NotFoundError(f"{path}: is a directory, not a file") from None
        except OSError as error:
            raise unreadable(where, error) from None
        except _MALFORMED as error:
            raise DamagedError(f"{where}: not a whole torch.save archive ({error}){_hint(path)}") from None

    def _read_directory(self, fd: int, infos: list[zipfile.ZipInfo], base: int, length: int) -> None:
        end = base + length
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"{self.path}: record {info.filename} is compressed; torch.save never does that")
            header = base + info.header_offset
            if not base <= header <= end:
                raise DamagedError(f"{self.path}: record {info.filename} begins outside the file")
            written = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_NAME else "cp437")
            head = os.pread(fd, 30 + len(written), header)
            magic, name_length, extra_length = _LOCAL_HEADER.unpack(head[:30])
            start = header + 30 + name_length + extra_length
            if magic != b"PK\x03\x04" or start + info.file_size > end:
                raise DamagedError(f"{self.path}: record {info.filename} reaches outside the file")
            if name_length != len(written) or head[30:] != written:  # readers differ in which of the two they believe
                raise DamagedError(f"{self.path}: record {info.filename} has another name before its bytes")
            # Names are `<archive name>/<record>`; the archive's own name means nothing.
            name = info.filename.partition("/")[2]
            if name in self._records:
                raise DamagedError(f"{self.path}: holds record {info.filename} twice")
            self._records[name] = ZipRecord(name, start, info.file_size, info.CRC)
        reached = 0
        for record in sorted(self._records.values(), key=lambda record: (record.start, record.size)):
            if record.start < reached:
                raise DamagedError(f"{self.path}: record {record.name} begins inside another")
            reached = record.start + record.size
        byteorder = self._records.get("byteorder")
        if byteorder is not None and os.pread(fd, min(byteorder.size, 16), byteorder.start) != b"little":
            raise DamagedError(f"{self.path}: written on a big-endian machine, which milepost does not read")

    def _read_record(self, fd: int, name: str) -> bytes:
        record = self._records.get(name)
        if record is None:
            raise DamagedError(f"{self.path}: has no record {name}, so torch.save did not write it whole")
        buffer = bytearray(record.size)
        read_exactly(fd, memoryview(buffer), record.start, str(self.path))
        if self.has_checksums and crc32(buffer) != record.crc32:
            raise DamagedError(f"{self.path}: record {name} was altered: its CRC-32 differs")
        return bytes(buffer)

    def records(self) -> Iterator[ZipRecord]:
        """Every record of the archive, for checks of their CRC-32."""
        yield from self._records.values()

    @property
    def has_checksums(self) -> bool:
        """Whether the archive notes CRC-32s; `torch.serialization.set_crc32_options(False)` leaves zeros instead."""
        return any(record.crc32 for record in self._records.values())

    def bad_records(self, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Names of records whose bytes do not have the CRC-32 that the archive notes; none where it notes none. Reads
        the whole file; `progress` is called with the number of bytes just read."""
        if not self.has_checksums:
            return
        with self.path.open("rb", buffering=0) as file:
            for record in self._records.values():
                crc = 0
                for start in range(0, record.size, _BLOCK):
                    data = os.pread(file.fileno(), min(_BLOCK, record.size - start), record.start + start)
                    crc = crc32(data, crc)
                    if progress is not None:
                        progress(len(data))
                if crc != record.crc32:
                    yield record.name

    def checksum(self, ref: TensorRef) -> tuple[int, int] | None:
        """CRC-32 and size in bytes of the record that a tensor lies in, as the archive notes them."""
        record = self._records.get(f"data/{ref.storage.key}")
        return None if record is None else (record.crc32, record.size)

    def chunk(self, ref: TensorRef, offsets: tuple[int, ...] | None = None) -> Chunk:
        """The bytes of a tensor as the chunk of a larger one that begins at `offsets` (default: its corner)."""
        box = Box(offsets or (0,) * len(ref.shape), ref.shape)
        return Chunk(box, ByteSource(str(self.path), self.start(ref), ref.strides))

    def start(self, ref: TensorRef) -> int:
        """Byte offset of a tensor's first element, 0 for an empty tensor. DamagedError where it is not all there."""
        volume, last = 1, 0
        for length, stride in zip(ref.shape, ref.strides, strict=True):
            volume *= length
            last += (length - 1) * stride
        if not volume:
            return 0
        size = itemsize(ref.dtype)
        record = self._records.get(f"data/{ref.storage.key}")
        if record is None or (ref.offset + last + 1) * size > record.size:
            raise DamagedError(
                f"{self.path}: a tensor of shape {list(ref.shape)} reaches outside storage {ref.storage.key}"
            )
        if volume * size > max(record.size, _EXPANDED_LIMIT):
            raise RefusedError(f"{self.path}: a tensor of shape {list(ref.shape)} made of {record.size} bytes")
        return record.start + ref.offset * size

    def entry(self, ref: TensorRef) -> TensorEntry:
        """A tensor of its own."""
        return TensorEntry(ref.dtype, ref.shape, (self.chunk(ref),))

    def plain(self, value: Any) -> Any:
        """A part of the object graph as plain containers, numbers and numpy arrays; a tensor that occurs twice is read
        once."""
        arrays: dict[TensorRef, np.ndarray[Any, Any]] = {}

        def read(ref: TensorRef) -> np.ndarray[Any, Any]:
            if ref not in arrays:
                arrays[ref] = self.entry(ref).numpy()
            return arrays[ref]

        try:
            return pickles.plain(value, read)
        except DamagedError as error:
            raise DamagedError(f"{self.path}: {error}") from None


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own, for zipfile."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise ValueError("a position before the archive")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._fd, [view], self._start + self._position)
        self._position += count
        return count


def _hint(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(2)
    if head[:1] == b"\x80":
        return "; it is a pickle of torch older than 1.6: load and save it once with a newer torch"
    return "; it was truncated or is another kind of file: copy it again or use another step"
