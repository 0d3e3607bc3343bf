"""Moving a plan's bytes: several workers, a fixed bound on memory, the cast done on the way."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from milepost.cast import BLOCK, Cast, cast_bits, no_warnings
from milepost.errors import NotFoundError
from milepost.fileio import read_exactly, unreadable, write_exactly
from milepost.index import Bits, Box, Chunk, bits_dtype, itemsize, read_chunk
from milepost.transfer.crew import in_threads
from milepost.transfer.plan import MOST_PIECES, Window

Progress = Callable[[int], None]
"""Called with the number of source bytes just moved."""

MOST_OPEN = 256
"""Files that all threads together keep open to read, where a process may open four times as many."""

FLUSH_BYTES = 8 << 20
"""How much a thread writes before it asks for write-back."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int] | None", function)


_SYNC_FILE_RANGE = _sync_file_range()


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
    """How a tensor's values change on their way, in float32, before the cast to the wanted element type."""

    def apply(self, values: npt.NDArray[np.float32], box: Box, files: OpenFiles) -> None:
        """Change `values`, which are those of `box`, shape `box.sizes`, in place. The new values must not depend on
        which box of the tensor was asked for."""


class OpenFiles:
    """Read-only file descriptors of one of `threads` threads, its share of `MOST_OPEN` at most: a checkpoint of a
    thousand ranks has more files than a process may open."""

    def __init__(self, threads: int = 1) -> None:
        self._fds: dict[str, int] = {}
        # More than a window has pieces are of no use to a thread.
        self._most = max(1, min(MOST_PIECES, _most_open() // threads))

    def fd(self, file: str) -> int:
        """The descriptor of `file`, good until the next one is asked for.

        Raises NotFoundError where it is gone, CallError where the process or the machine may open no more files,
        DamagedError where it cannot be read.
        """
        fd = self._fds.get(file)
        if fd is None:
            if len(self._fds) >= self._most:
                os.close(self._fds.pop(next(iter(self._fds))))
            try:
                fd = self._fds[file] = os.open(file, os.O_RDONLY)
            except FileNotFoundError:
                raise NotFoundError(f"{file}: gone while it was being read") from None
            except OSError as error:
                raise unreadable(file, error) from None
        return fd

    def close(self) -> None:
        """Close them all."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _most_open() -> int:
    """Files to keep open at a time: three quarters of what `ulimit -n` allows are left to the caller and to what is
    written."""
    allowed = os.sysconf("SC_OPEN_MAX")  # -1: no limit
    return MOST_OPEN if allowed < 0 else min(MOST_OPEN, allowed // 4)


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
    """Move every window into `sink`. The plan is drawn on only as fast as windows are moved. `updates` change the
    tensors that they name on the way.

    The first error stops the work and is raised once the windows in flight have ended.
    """
    with ExitStack() as stack:
        in_threads(
            windows,
            lambda: _Mover(sink, stack.enter_context(OpenFiles(workers)), updates or {}).move,
            workers,
            (lambda _: None) if progress is None else progress,
        )


class _Mover:
    """Moves one window after the other, in one thread, through memory that it uses again."""

    def __init__(self, sink: Sink, files: OpenFiles, updates: Mapping[str, Update]) -> None:
        self._sink = sink
        self._files = files
        self._updates = updates
        self._streams: dict[tuple[str, str], _CastStream] = {}
        self._flush = _EarlyFlush()

    def move(self, window: Window) -> int:
        """Move a window; returns the number of source bytes."""
        wanted = self._sink.dtype(window.name)
        place = self._sink.file_range(window.name, window.box)
        update = self._updates.get(window.name)
        if place is None:
            self._sink.write(window.name, window.box, read_as(window, wanted, update, self._files))
            return window.nbytes
        runs = _runs(window) if update is None else None
        if runs is None:
            data = np.ascontiguousarray(read_as(window, wanted, update, self._files)).data.cast("B")
            write_exactly(place[0], data, place[1])
        elif wanted == window.dtype:
            self._copy(runs, *place, itemsize(wanted))
        else:
            key = window.dtype, wanted
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = _CastStream(*key)
            stream.move(runs, self._files, *place)
        self._flush.wrote(*place, window.box.volume * itemsize(wanted))
        return window.nbytes

    def _copy(self, runs: tuple[Chunk, ...], fd: int, offset: int, size: int) -> None:
        """Elements of `size` bytes, unchanged, to byte `offset` of a file."""
        for run in runs:
            file, count = run.source.file, run.box.volume * size
            copy_range(self._files.fd(file), run.source.start(), fd, offset, count, file)
            offset += count


def _runs(window: Window) -> tuple[Chunk, ...] | None:
    """The runs of bytes of files that, one after the other, are a window; None where it is none such."""
    if not all(piece.contiguous and piece.source.data is None for piece in window.pieces):
        return None
    if len(window.pieces) > 1:
        row = window.box.offsets[0]
        for piece in window.pieces:
            if piece.box.offsets[0] != row or piece.box.sizes[1:] != window.box.sizes[1:]:
                return None
            row += piece.box.sizes[0]
    return window.pieces


class _EarlyFlush:
    """Has the kernel begin to write back what one thread wrote, some megabytes at a time: a call costs much more than
    a small window."""

    def __init__(self) -> None:
        self._fd = -1
        self._start = self._end = self._waiting = 0

    def wrote(self, fd: int, offset: int, count: int) -> None:
        """The thread wrote this range of bytes."""
        if fd != self._fd:
            self._begin()
            self._fd, self._start, self._end = fd, offset, offset
        self._start, self._end = min(self._start, offset), max(self._end, offset + count)
        self._waiting += count
        if self._waiting >= FLUSH_BYTES:
            self._begin()

    def _begin(self) -> None:
        if self._waiting:
            start_flush(self._fd, self._start, self._end - self._start)
        self._fd, self._waiting = -1, 0


class _CastStream:
    """Runs of bytes read, cast and written in blocks so small that they never leave the core's cache."""

    def __init__(self, source: str, target: str) -> None:
        self._cast = Cast(source, target)
        self._source = np.empty(BLOCK, bits_dtype(source))
        self._target = np.empty(BLOCK, bits_dtype(target))

    def move(self, runs: Iterable[Chunk], files: OpenFiles, fd: int, offset: int) -> None:
        """One run after the other, from its file to byte `offset` of another one."""
        filled = 0
        with no_warnings():
            for run in runs:
                source_fd, file = files.fd(run.source.file), run.source.file
                start, left = run.source.start(), run.box.volume
                while left:
                    block = self._source[filled : filled + left]
                    read_exactly(source_fd, block.data.cast("B"), start, file)
                    start += block.nbytes
                    left -= block.size
                    filled += block.size
                    if filled == self._source.size:
                        offset += self._write(filled, fd, offset)
                        filled = 0
            if filled:
                self._write(filled, fd, offset)

    def _write(self, count: int, fd: int, offset: int) -> int:
        """The first `count` elements that were read; returns the bytes written."""
        target = self._target[:count]
        self._cast(self._source[:count], target)
        write_exactly(fd, target.data.cast("B"), offset)
        return target.nbytes


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
    """The bit patterns of a window in the wanted element type, changed on the way by `update`."""
    bits = read_window(window, files)
    if update is None:
        return cast_bits(bits, window.dtype, wanted)
    values = cast_bits(bits, window.dtype, "float32").view(np.float32)
    update.apply(values, window.box, files)
    return cast_bits(values.view(np.uint32), "float32", wanted)


def copy_range(source_fd: int, source_offset: int, fd: int, offset: int, count: int, file: str) -> None:
    """Copy `count` bytes between open files inside the kernel, or through memory where the kernel cannot.

    Raises DamagedError where the source cannot be read or ends too early, OSError where the other cannot be written.
    """
    while count:
        try:
            copied = os.copy_file_range(source_fd, fd, count, source_offset, offset)
        except OSError:
            copied = 0
        if copied == 0:
            # File systems that cannot, the end of the source, or a disk that fails: memory works, or shows which it is.
            data = bytearray(min(count, 1 << 20))
            read_exactly(source_fd, memoryview(data), source_offset, file)
            write_exactly(fd, data, offset)
            copied = len(data)
        count -= copied
        source_offset += copied
        offset += copied


def start_flush(fd: int, offset: int, count: int) -> None:
    """Ask Linux to begin writing a range to disk, without waiting: the flush at the end then has little left to do.

    A hint: where the kernel or the file system does not take it, the later fsync does all the work.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset, count, _SYNC_FILE_RANGE_WRITE)
