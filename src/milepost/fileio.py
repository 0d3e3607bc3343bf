"""Bytes of open files by their position: read and written whole, and elements read that lie apart."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milepost.errors import CallError, DamagedError, MilepostError
from milepost.wording import disk_error

Elements = npt.NDArray[Any]

_BLOCK = 1 << 20  # bytes
_STRIDED_READ = 1 << 17  # elements
_GAP = 1 << 12
"""Bytes. Below that nothing is saved: disks and page caches move whole pages, and a call costs more than the copy."""


def open_to_read(path: Path) -> io.FileIO:
    """An open file, unbuffered. DamagedError where it is none but, say, a pipe, which might never answer.

    Raises OSError as `open` does.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return io.FileIO(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise DamagedError(f"{path}: is no regular file")


def unreadable(file: object, error: OSError) -> MilepostError:
    """What it means that a file of a checkpoint is not read: damage, but for a process or a machine that may open no
    more files."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CallError(f"{file}: cannot be opened: {disk_error(error)}")
    return DamagedError(f"{file}: cannot be read: {error.strerror or error}")


def blocks_of(path: Path) -> Iterator[bytes]:
    """The bytes of a small file, block by block. Raises as `unreadable` says: what a caller writes meanwhile has errors
    of its own."""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise unreadable(path, error) from None


def read_exactly(fd: int, buffer: memoryview, offset: int, file: str) -> None:
    """Fill `buffer` from byte `offset` of an open file, or raise that the file is too short."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise DamagedError(f"{file}: cannot be read at byte {offset + done}: {error.strerror}") from None
        if count == 0:
            raise DamagedError(
                f"{file}: ends at byte {offset + done}, {len(buffer) - done} bytes short; "
                "the file was truncated: copy it again or use another step"
            )
        done += count


def write_exactly(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of an open file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def read_strided(fd: int, out: Elements, strides: tuple[int, ...], offset: int, file: str) -> None:
    """Fill `out`, a row-major array, with elements that lie `strides` elements apart, the first at byte `offset`.

    They are gathered from runs that cover them: a gap of `_GAP` bytes and more between elements is not read, a smaller
    one is. The memory used beside `out` is that of `_STRIDED_READ` elements at most, whatever the strides are.
    """
    several = [dim for dim, size in enumerate(out.shape) if size > 1]
    widest_first = sorted(several, key=lambda dim: -strides[dim])
    order = [several.index(dim) for dim in widest_first]
    turned = out[tuple(slice(None) if size > 1 else 0 for size in out.shape)].transpose(order)
    _read_rows(fd, turned, tuple(strides[dim] for dim in widest_first), offset, file)


def strided(held: Elements, shape: tuple[int, ...], strides: tuple[int, ...]) -> Elements:
    """A view of elements that lie `strides` elements apart in a flat array, which must hold them all."""
    return np.lib.stride_tricks.as_strided(held, shape, [step * held.itemsize for step in strides])


def _read_rows(fd: int, out: Elements, steps: tuple[int, ...], offset: int, file: str) -> None:
    """Read into `out` [rows, ...], whose elements lie `steps` apart along each dimension, the widest first."""
    rows, step, size = len(out), steps[0], out.itemsize
    row = 1 + sum((n - 1) * s for n, s in zip(out.shape[1:], steps[1:], strict=True))  # elements that it spans
    apart = (step - row) * size >= _GAP
    if apart and out.flags.c_contiguous and out.strides[1:] == tuple(s * size for s in steps[1:]):
        target, length = out.reshape(-1).view(np.uint8).data, row * size
        for number in range(rows):
            at = number * length
            read_exactly(fd, target[at : at + length], offset + number * step * size, file)
    elif apart or row > _STRIDED_READ:
        for number in range(rows):
            one, rest = (out[number], steps[1:]) if out.ndim > 1 else (out[number : number + 1], steps)
            _read_rows(fd, one, rest, offset + number * step * size, file)
    else:
        at_once = rows if step == 0 else (_STRIDED_READ - row) // step + 1
        for first in range(0, rows, at_once):
            part = out[first : first + at_once]
            buffer = np.empty((len(part) - 1) * step + row, out.dtype)
            read_exactly(fd, buffer.data.cast("B"), offset + first * step * size, file)
            part[...] = strided(buffer, part.shape, steps)
