"""torch.save archives of many tensors, laid out before a byte of them is written, and written from front to back.

What torch.save itself writes: a zip archive of records stored as they are, each with its CRC-32 behind it (a "data
descriptor") and in the directory at the end.

    archive/data.pkl                              the object; its tensors refer to the storages by their numbers
    archive/.format_version, .storage_alignment, byteorder
    archive/data/0, data/1, ...                   the storages, each at a multiple of 64 bytes
    archive/version                               "3"

Where everything lies depends on sizes alone. What stands between two storages depends on the bytes before it by their
CRC-32 only, so one pass over the bytes is enough to write, checksum and hash a file. Sizes and places beyond 4 GiB are
written as zip64, as torch's reader and Python's zipfile know it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from milepost.crc import crc32
from milepost.layouts.archive_writer import ALIGNMENT

_LIMIT = 0xFFFF_FFFF  # a number of 32 bits that says: look at the zip64 field
_MANY = 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_64 = struct.Struct("<4sI2Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_EXTRA = struct.Struct("<2H")
_PADDING, _ZIP64 = 0x4246, 1  # kinds of extra fields; the first reads "FB", as torch's does
_FLAGS = 0x0808  # names in UTF-8, and a data descriptor
_VERSION_64 = 45


@dataclass(frozen=True, slots=True)
class _Record:
    """One record: its name, where its header and its bytes begin, and its bytes' number. content: where it is known."""

    name: bytes
    header: int
    start: int
    size: int
    content: bytes | None = None

    @property
    def large(self) -> bool:
        return self.size >= _LIMIT

    @property
    def end(self) -> int:
        """Where its descriptor ends."""
        return self.start + self.size + (_DESCRIPTOR_64 if self.large else _DESCRIPTOR).size

    def local(self) -> bytes:
        """The header before its bytes, padded."""
        sizes = _LIMIT if self.large else 0
        field = _zip64(0, 0) if self.large else b""
        padding = self.start - self.header - _LOCAL.size - len(self.name) - len(field)
        extra = field + _EXTRA.pack(_PADDING, padding - _EXTRA.size).ljust(padding, b"Z")
        version = _VERSION_64 if self.large else 0
        fixed = _LOCAL.pack(b"PK\x03\x04", version, _FLAGS, 0, 0, 0, 0, sizes, sizes, len(self.name), len(extra))
        return fixed + self.name + extra

    def descriptor(self, crc32: int) -> bytes:
        """What stands behind its bytes."""
        return (_DESCRIPTOR_64 if self.large else _DESCRIPTOR).pack(b"PK\x07\x08", crc32, self.size, self.size)

    def entry(self, crc32: int) -> bytes:
        """Its line in the directory."""
        far = self.header >= _LIMIT
        numbers = [self.size, self.size] * self.large + [self.header] * far
        extra = _zip64(*numbers) if numbers else b""
        version = _VERSION_64 if numbers else 0
        size, header = (_LIMIT if self.large else self.size), (_LIMIT if far else self.header)
        fixed = _CENTRAL.pack(
            b"PK\x01\x02", version, version, _FLAGS, 0, 0, 0, crc32, size, size, len(self.name), len(extra), 0, 0, 0, 0,
            header,
        )  # fmt: skip
        return fixed + self.name + extra


@dataclass(frozen=True, slots=True)
class ArchiveStream:
    """The plan of one archive: storages, and a gap before each and behind the last. Offsets count from its first byte.

    starts:       where each storage begins
    sizes:        bytes of each storage
    gap_lengths:  bytes of each gap; one more than storages
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    gap_lengths: tuple[int, ...]
    _front: tuple[_Record, ...]
    _data: tuple[_Record, ...]
    _back: _Record

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return sum(self.sizes) + sum(self.gap_lengths)

    def gap(self, number: int, crcs: Sequence[int]) -> bytes:
        """What stands before storage `number`, from the CRC-32 of those before it; behind the last, the directory."""
        found = b"".join(_whole(record) for record in self._front) if number == 0 else b""
        if number:
            found += self._data[number - 1].descriptor(crcs[number - 1])
        if number < len(self._data):
            return found + self._data[number].local()
        return found + _whole(self._back) + self._directory(crcs)

    def _directory(self, crcs: Sequence[int]) -> bytes:
        known = [crc32(record.content or b"") for record in self._front]
        records = (*self._front, *self._data, self._back)
        checksums = (*known, *crcs, crc32(self._back.content or b""))
        rows = b"".join(record.entry(crc) for record, crc in zip(records, checksums, strict=True))
        count, at = len(records), self._back.end
        end = _END.pack(
            b"PK\x05\x06", 0, 0, min(count, _MANY), min(count, _MANY), min(len(rows), _LIMIT), min(at, _LIMIT), 0
        )
        if count < _MANY and len(rows) < _LIMIT and at < _LIMIT:
            return rows + end
        size = _END_64.size - 12
        end_64 = _END_64.pack(b"PK\x06\x06", size, _VERSION_64, _VERSION_64, 0, 0, count, count, len(rows), at)
        return rows + end_64 + _LOCATOR_64.pack(b"PK\x06\x07", 0, at + len(rows), 1) + end


def archive_stream(data_pkl: bytes, sizes: Sequence[int]) -> ArchiveStream:
    """The plan of an archive of a pickled object and storages of so many bytes, which it calls "0", "1", ..."""
    front: list[_Record] = []
    data: list[_Record] = []
    at = 0
    for name, content in (
        ("data.pkl", data_pkl),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ):
        front.append(_placed(name, at, len(content), content))
        at = front[-1].end
    for number, size in enumerate(sizes):
        data.append(_placed(f"data/{number}", at, size))
        at = data[-1].end
    back = _placed("version", at, 2, b"3\n")
    plan = ArchiveStream(tuple(record.start for record in data), tuple(sizes), (), tuple(front), tuple(data), back)
    lengths, reached = [], 0
    for record in data:
        lengths.append(record.start - reached)
        reached = record.start + record.size
    lengths.append(back.end - reached + len(plan._directory([0] * len(data))))
    return ArchiveStream(plan.starts, plan.sizes, tuple(lengths), plan._front, plan._data, plan._back)


def _placed(name: str, header: int, size: int, content: bytes | None = None) -> _Record:
    """A record whose header begins at `header`, moved back so that its bytes begin at a multiple of ALIGNMENT."""
    full = f"archive/{name}".encode()
    bare = header + _LOCAL.size + len(full) + _EXTRA.size + (len(_zip64(0, 0)) if size >= _LIMIT else 0)
    return _Record(full, header, bare + -bare % ALIGNMENT, size, content)


def _whole(record: _Record) -> bytes:
    """A record whose bytes are known."""
    content = record.content or b""
    return record.local() + content + record.descriptor(crc32(content))


def _zip64(*numbers: int) -> bytes:
    return struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers)
