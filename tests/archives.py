"""Archives in the form of `torch.save`, made by hand: with any pickle, any storages and any fault."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_archive(
    path: Path,
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
    byteorder: bytes = b"little",
) -> Path:
    """An archive of a pickle and the storages by their keys."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", byteorder)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def tensor_pickle(
    key: str = "0",
    count: int = 4,
    offset: int = 0,
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    storage: str = "FloatStorage",
) -> bytes:
    """The pickle of a dictionary {"w": a tensor}, written instruction by instruction (protocol 2)."""
    return (
        b"\x80\x02}"
        + text("w")
        + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + text("storage")
        + b"ctorch\n%s\n" % storage.encode()
        + text(key)
        + text("cpu")
        + number(count)
        + b"tQ"
        + number(offset)
        + numbers(shape)
        + numbers(strides)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


def text(value: str) -> bytes:
    """Push a text (BINUNICODE)."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    """Push an integer (LONG1)."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values: tuple[int, ...]) -> bytes:
    """Push a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"
