"""torch.save archives written without torch, with a place for the elements that is filled later.

What `milepost.layouts.torchfile` reads: a zip archive of records stored as they are.

    archive/data.pkl     the object: a tensor, or a small plain value
    archive/byteorder    "little"
    archive/version      "3"
    archive/data/0       the elements of the tensor, at a multiple of 64 bytes

Where everything lies depends on sizes alone, so an archive has its length, and its elements their place, before a
byte of them is there. Their CRC-32, which stands before and behind them, comes last.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from milepost.crc import crc32
from milepost.errors import RefusedError
from milepost.index import Shape, contiguous_strides, itemsize
from milepost.layouts.pickling import Call, Global, Persistent, dumps

ALIGNMENT = 64  # bytes
_LIMIT = 0xFFFF_FFFF  # bytes; beyond it other headers would be needed
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_UTF8 = 0x800
_JANUARY = 0x21  # the first day that a zip archive can be of
_EXTRA = struct.Struct("<2sH")

STORAGES = MappingProxyType(
    {
        "float64": "DoubleStorage",
        "float32": "FloatStorage",
        "float16": "HalfStorage",
        "bfloat16": "BFloat16Storage",
        "int64": "LongStorage",
        "int32": "IntStorage",
        "int16": "ShortStorage",
        "int8": "CharStorage",
        "uint8": "ByteStorage",
        "bool": "BoolStorage",
    }
)
"""Element type -> the storage class that has it in torch's pickles. Younger types have none."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The plan of one archive. Offsets count from its first byte.

    head:    what stands before the elements, their CRC-32 left out
    start:   where the elements begin
    nbytes:  how many bytes they are
    length:  bytes of the whole archive
    """

    head: bytes
    start: int
    nbytes: int
    length: int
    records: tuple[_Record, ...]

    def finished_head(self, crc32: int) -> bytes:
        """`head` with the CRC-32 of the elements."""
        if not self.nbytes:
            return self.head
        at = self.records[-1].header
        return self.head[: at + 14] + struct.pack("<I", crc32) + self.head[at + 18 :]

    def tail(self, crc32: int) -> bytes:
        """What follows the elements: the archive's directory."""
        rows = b"".join(
            _CENTRAL.pack(
                b"PK\x01\x02", 0, 0, _UTF8, 0, 0, _JANUARY, crc32 if record.is_data else record.crc32, record.size,
                record.size, len(record.name), 0, 0, 0, 0, 0, record.header,
            ) + record.name
            for record in self.records
        )  # fmt: skip
        count = len(self.records)
        return rows + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(rows), self.start + self.nbytes, 0)


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    header: int
    size: int
    crc32: int
    is_data: bool = False


def tensor_archive(dtype: str, shape: Shape) -> Archive:
    """The plan of an archive that is one tensor.

    Raises RefusedError for an element type that torch's archives have no name for, or 4 GiB and more.
    """
    if dtype not in STORAGES:
        raise RefusedError(f"a {dtype} tensor: torch's archives have no storage of this type; give another --dtype")
    numel = 1
    for size in shape:
        numel *= size
    storage = Persistent(("storage", Global("torch", STORAGES[dtype]), "0", "cpu", numel))
    made = (storage, 0, shape, contiguous_strides(shape), False, Call(Global("collections", "OrderedDict"), ()))
    nbytes = numel * itemsize(dtype)
    if nbytes >= _LIMIT - (1 << 16):
        raise RefusedError(f"a {dtype} tensor of shape {list(shape)}: too large for one archive")
    return _planned(dumps(Call(Global("torch._utils", "_rebuild_tensor_v2"), made)), nbytes)


def object_archive(value: Any) -> bytes:
    """The bytes of an archive that is a small plain value."""
    archive = _planned(dumps(value), None)
    return archive.head + archive.tail(0)


def _planned(data_pkl: bytes, nbytes: int | None) -> Archive:
    head = b""
    records: list[_Record] = []
    for name, content in (("data.pkl", data_pkl), ("byteorder", b"little"), ("version", b"3\n")):
        record = _Record(f"archive/{name}".encode(), len(head), len(content), crc32(content))
        records.append(record)
        head += _local(record, 0) + content
    if nbytes is not None:
        record = _Record(b"archive/data/0", len(head), nbytes, 0, is_data=True)
        records.append(record)
        bare = len(head) + len(_local(record, 0)) + _EXTRA.size
        head += _local(record, _EXTRA.size + -bare % ALIGNMENT)
    start = len(head)
    size = nbytes or 0
    archive = Archive(head, start, size, 0, tuple(records))
    return Archive(head, start, size, start + size + len(archive.tail(0)), tuple(records))


def _local(record: _Record, padding: int) -> bytes:
    """The header before a record; an extra field of so many bytes moves what follows."""
    extra = _EXTRA.pack(b"FB", padding - _EXTRA.size).ljust(padding, b"Z") if padding else b""
    fixed = _LOCAL.pack(
        b"PK\x03\x04", 0, _UTF8, 0, 0, _JANUARY, record.crc32, record.size, record.size, len(record.name), len(extra)
    )
    return fixed + record.name + extra
