"""A rank's `.distcp` file that is a copy of another rank's: the table of contents cannot tell, as it names both.

Two files are to hold different boxes of the same tensors; if all their bytes are equal, one was written over the other,
unless these bytes repeat one value in each tensor: norms are ones on every rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milepost.errors import DamagedError
from milepost.index import Box, bits_dtype, itemsize
from milepost.layouts.dcp.metadata import Contents, Span
from milepost.layouts.inert import TensorRef
from milepost.layouts.torchfile import TorchFile

_SAMPLES = 16
_SAMPLE = 4096  # bytes
_BLOCK = 1 << 20  # bytes
_VALUES = 1 << 16  # bytes of a part in which a second value is looked for

Held = list[tuple[str, Box, Span]]


def refuse_copies(contents: Contents) -> None:
    """Raise DamagedError where one file holds what another one holds. Reads 64 KiB of each, all of equal ones."""
    held: dict[Path, Held] = {}
    for key, stored in contents.tensors.items():
        for box, span in zip(stored.boxes, stored.spans, strict=True):
            held.setdefault(span.file, []).append((key, box, span))
    first: dict[tuple[int, bytes, tuple[str, ...]], Path] = {}
    varies: dict[Path, bool] = {}
    for path, parts in held.items():
        if all(stored.boxes == (box,) for key, box, _ in parts if (stored := contents.tensors[key])):
            continue  # whole tensors: no other file holds a part of them
        content = path.stat().st_size, _digest(path), tuple(key for key, _, _ in parts)
        other = first.setdefault(content, path)
        if other == path or not _equal(path, other):
            continue
        if other not in varies:
            varies[other] = any(_varies(span) for _, _, span in held[other])
        if varies[other]:
            raise DamagedError(
                f"{path}: holds the same bytes as {other.name}, though they are to hold different parts of "
                f"{parts[0][0]}; one was written over the other"
            )


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b()
    with path.open("rb", buffering=0) as file:
        for number in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE, size * number // _SAMPLES))
    return digest.digest()


def _equal(left: Path, right: Path) -> bool:
    with left.open("rb", buffering=0) as one, right.open("rb", buffering=0) as two:
        return all(a == b for a, b in zip(_blocks(one.fileno()), _blocks(two.fileno()), strict=True))


def _blocks(fd: int) -> Iterator[bytes]:
    position = 0
    while block := os.pread(fd, _BLOCK, position):
        position += len(block)
        yield block


def _varies(span: Span) -> bool:
    """Whether a part holds more than one value, as far as its beginning tells; a part that cannot be read tells nothing
    here, and is an error when it is read."""
    try:
        file = TorchFile(span.file, (span.start, span.length))
        ref = file.root
        if not isinstance(ref, TensorRef):
            return False
        chunk = file.chunk(ref)
    except DamagedError:
        return False
    size = itemsize(ref.dtype)
    with span.file.open("rb", buffering=0) as opened:
        data = os.pread(opened.fileno(), min(chunk.span() * size, _VALUES), chunk.source.start())
    values = np.frombuffer(data[: len(data) // size * size], bits_dtype(ref.dtype))
    return bool((values != values[:1]).any())
