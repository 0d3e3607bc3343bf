"""Moving a plan's bytes: several workers, a fixed bound on memory, the cast done on the way."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from milepost.errors import DamagedError, NotFoundError
from milepost.index import Bits, Box, bits_dtype, read_chunk
from milepost.transfer.cast import cast_bits
from milepost.transfer.plan import Window

Progress = Callable[[int], None]
"""Called with the number of source bytes just moved."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int] | None", function)


_SYNC_FILE_RANGE = _sync_file_range()

_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}


class Sink(Protocol):
    """Where the bytes go. Calls come from several threads, each for another box."""

    def dtype(self, name: str) -> str:
        """The element type in which this tensor is wanted."""

    def file_range(self, name: str, box: Box) -> tuple[int, int] | None:
        """File descriptor and byte offset where `box` lies as one run of bytes, if it goes to a file; else None, and
        the box comes to `write`."""

    def write(self, name: str, box: Box, bits: Bits) -> None:
        """Take the bit patterns of `box`, shape `box.sizes`, in the wanted element type."""


class Update(Protocol):
    """What is added to a tensor on its way, in float32, before the cast to the wanted element type."""

    def add_to(self, values: npt.NDArray[np.float32], box: Box, files: OpenFiles) -> None:
        """Add the update of `box` to `values`, shape `box.sizes`, in place."""


class OpenFiles:
    """Read-only file descriptors, each file opened once and shared by the workers."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._lock = Lock()

    def fd(self, file: str) -> int:
        """The descriptor of `file`."""
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(file, os.O_RDONLY)
                except FileNotFoundError:
                    raise NotFoundError(f"{file}: gone while it was being read") from None
            return self._fds[file]

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def window_bytes_for(memory_limit: int, workers: int) -> int:
    """The window size with which `workers` stay within `memory_limit` bytes.

    A window lives as what was read, as float32 between two casts, and as what is written: at most 4 times its
    bytes. Beyond 8 MiB a larger window gains nothing.
    """
    return max(1 << 16, min(8 << 20, memory_limit // (4 * workers)))


def execute(
    windows: Iterable[Window],
    sink: Sink,
    *,
    workers: int = 2,
    progress: Progress | None = None,
    updates: Mapping[str, Update] | None = None,
) -> None:
    """Move every window into `sink`. The plan is drawn on only as fast as windows are moved. `updates` are added on the
    way to the tensors that they name.

    The first error stops the work and is raised once the windows in flight have ended.
    """
    with OpenFiles() as files, ThreadPoolExecutor(workers, "milepost-transfer") as pool:
        pending: set[Future[int]] = set()
        try:
            for window in windows:
                if len(pending) >= 2 * workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    _collect(done, progress)
                pending.add(pool.submit(_move, window, sink, files, (updates or {}).get(window.name)))
            _collect(wait(pending).done, progress)
        finally:
            for future in pending:
                future.cancel()


def _collect(done: Iterable[Future[int]], progress: Progress | None) -> None:
    for future in done:
        moved = future.result()
        if progress is not None:
            progress(moved)


def _move(window: Window, sink: Sink, files: OpenFiles, update: Update | None) -> int:
    wanted = sink.dtype(window.name)
    place = sink.file_range(window.name, window.box)
    whole = len(window.pieces) == 1 and window.pieces[0].contiguous
    if place is not None and whole and wanted == window.dtype and update is None:
        piece = window.pieces[0]
        copy_range(
            files.fd(piece.source.file),
            piece.source.start(),
            place[0],
            place[1],
            window.nbytes,
            piece.source.file,
        )
        start_flush(place[0], place[1], window.nbytes)
        return window.nbytes
    bits = read_as(window, wanted, update, files)
    if place is None:
        sink.write(window.name, window.box, bits)
    else:
        data = np.ascontiguousarray(bits).data.cast("B")
        write_exactly(place[0], data, place[1])
        start_flush(place[0], place[1], len(data))
    return window.nbytes


def read_window(window: Window, files: OpenFiles) -> Bits:
    """The bit patterns of a window, shape `window.box.sizes`, gathered from its pieces."""
    if len(window.pieces) == 1:
        piece = window.pieces[0]
        return read_chunk(files.fd(piece.source.file), piece, window.dtype)
    out = np.empty(window.box.sizes, bits_dtype(window.dtype))
    for piece in window.pieces:
        target = out[piece.box.within(window.box).slices()]
        target[...] = read_chunk(files.fd(piece.source.file), piece, window.dtype)
    return out


def read_as(window: Window, wanted: str, update: Update | None, files: OpenFiles) -> Bits:
    """The bit patterns of a window in the wanted element type, with what is added to it on the way."""
    bits = read_window(window, files)
    if update is None:
        return cast_bits(bits, window.dtype, wanted)
    values = cast_bits(bits, window.dtype, "float32").view(np.float32)
    update.add_to(values, window.box, files)
    return cast_bits(values.view(np.uint32), "float32", wanted)


def copy_range(source_fd: int, source_offset: int, fd: int, offset: int, count: int, file: str) -> None:
    """Copy `count` bytes between open files inside the kernel, or through memory where the kernel cannot."""
    while count:
        try:
            copied = os.copy_file_range(source_fd, fd, count, source_offset, offset)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            copied = 0
        if copied == 0:  # the end of the file, or a file system that cannot and says so in this way
            copied = _copy_through_memory(source_fd, source_offset, fd, offset, min(count, 1 << 20))
        if copied == 0:
            raise DamagedError(f"{file}: ends {count} bytes short; the file was truncated: copy it again")
        count -= copied
        source_offset += copied
        offset += copied


def _copy_through_memory(source_fd: int, source_offset: int, fd: int, offset: int, count: int) -> int:
    data = os.pread(source_fd, count, source_offset)
    write_exactly(fd, memoryview(data), offset)
    return len(data)


def start_flush(fd: int, offset: int, count: int) -> None:
    """Ask Linux to begin writing a range to disk, without waiting: the flush at the end then has little left to do.

    A hint: where the kernel or the file system does not take it, the later fsync does all the work.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset, count, _SYNC_FILE_RANGE_WRITE)


def write_exactly(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of an open file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
