"""Threads that hash files and write them to the disk, while they are still being filled or long after.

A file comes in pieces, from front to back. One worker at a time puts its next piece through: CRC-32 of what an archive
wants it of, then what depends on them, then xxh3_128. Any worker then writes it, past the system's cache where the file
system can (O_DIRECT): measured on one local disk, that is twice as fast as writing through it, with a fifth of the
processor time, which belongs to training. At the end the file is flushed to the disk.

What goes wrong in a thread is kept in `Crew.failure`; to add to a crew that has failed raises.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Condition, RLock, Thread

import xxhash

from milepost.crc import crc32

WORKERS = 4
"""Threads of a crew: enough that hashing, writing and flushing overlap."""
_BLOCK = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)
_EARLY = 1 << 20  # bytes; of a write through the cache that long, the flush is begun at once


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file.

    view:     the bytes
    aligned:  whether their memory begins at a page of the machine
    ready:    waits until they are there; None: they are
    done:     called once they are written, or never will be
    """

    view: memoryview
    aligned: bool = False
    ready: Callable[[], None] | None = None
    done: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a file that means something: one whose CRC-32 is wanted, or one that is made from those before it.

    make:  of the CRC-32s of all runs before: the bytes; None where the bytes are in the pieces
    """

    start: int
    end: int
    make: Callable[[Sequence[int]], bytes] | None = None


class OutFile:
    """A new file that a crew writes.

    size, xxh3_128:  once it is on the disk
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.runs: deque[Run] = deque()
        self.size = 0
        self.xxh3_128 = ""
        self._direct_fd: int | None = None
        self._direct = bool(_DIRECT)
        self._digest = xxhash.xxh3_128()
        self._crc = 0
        self._crcs: list[int] = []
        self._made = b""
        # The crew's, under its lock:
        self.pieces: deque[Piece] = deque()
        self.busy = False
        self.writing = 0
        self.ended = False

    def put_through(self, piece: Piece) -> int:
        """Checksums and hash of the next piece; returns where in the file it belongs."""
        if piece.ready is not None:
            piece.ready()
        view, start = piece.view, self.size
        end = start + view.nbytes
        while self.runs and self.runs[0].start < end:
            run = self.runs[0]
            part = view[max(run.start, start) - start : min(run.end, end) - start]
            if run.make is None:
                self._crc = crc32(part, self._crc)
            else:
                if run.start >= start:
                    self._made = run.make(self._crcs)
                skipped = max(start - run.start, 0)
                part[:] = self._made[skipped : skipped + part.nbytes]
            if run.end > end:
                break
            if run.make is None:
                self._crcs.append(self._crc)
                self._crc = 0
            self.runs.popleft()
        self._digest.update(view)
        self.size = end
        return start

    def write(self, piece: Piece, offset: int) -> None:
        """Write a piece to its place."""
        view = piece.view
        done = 0
        if self._direct and piece.aligned and offset % _BLOCK == 0 and view.nbytes >= _BLOCK:
            done = self._write_direct(view[: view.nbytes - view.nbytes % _BLOCK], offset)
        through_cache = view.nbytes - done
        while done < view.nbytes:
            done += _some(os.pwrite(self.fd, view[done:], offset + done))
        if through_cache >= _EARLY and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, view.nbytes, os.POSIX_FADV_DONTNEED)

    def _write_direct(self, view: memoryview, offset: int) -> int:
        """Bytes written past the cache. What is left goes through it: there a full disk has its name."""
        done = 0
        try:
            if self._direct_fd is None:
                self._direct_fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
            while done < view.nbytes and done % _BLOCK == 0:
                done += _some(os.pwrite(self._direct_fd, view[done:], offset + done))
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._direct = False
        return done

    def flush(self) -> None:
        """The end: to the disk itself."""
        os.fsync(self.fd)
        self.xxh3_128 = self._digest.hexdigest()
        self.close()

    def close(self) -> None:
        """Close it."""
        for fd in (self.fd, self._direct_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.fd, self._direct_fd = -1, None


@dataclass(frozen=True)
class Failure:
    """What went wrong first, and with which file."""

    path: Path | None
    error: BaseException


class CrewFailedError(Exception):
    """Something was added to a crew that has failed. `Crew.failure` says why."""


class Crew:
    """Writes the files of one step.

    Args:
        workers: threads.
        held: begin only when `release` is called, so that they take no time from who fills the pieces.
    """

    def __init__(self, workers: int = WORKERS, *, held: bool = False) -> None:
        self._workers = workers
        self._held = held
        self._threads: list[Thread] = []
        # By `with self._news`, in Python, Ctrl-C could come between the lock and the block, and leave it locked.
        self._lock = RLock()
        self._news = Condition(self._lock)  # only workers, to whom no signal comes, wait for it
        self._files: list[OutFile] = []
        self._writes: deque[tuple[OutFile, Piece, int]] = deque()
        self._flushes: deque[OutFile] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._unfinished = 0
        self._all_added = False
        self._stopped = False
        self.failure: Failure | None = None

    def open(self, path: Path) -> OutFile:
        """A new file. Raises OSError."""
        file = OutFile(path)
        with self._lock:
            self._files.append(file)
            self._unfinished += 1
        return file

    def add(self, file: OutFile, piece: Piece) -> None:
        """The next piece of a file. Raises CrewFailedError where it would never be written."""
        with self._lock:
            if self._stopped:
                piece.done()
                raise CrewFailedError
            file.pieces.append(piece)
            self._news.notify()
        if not self._held:
            self.release()

    def end(self, file: OutFile) -> None:
        """All pieces of a file have been added."""
        with self._lock:
            file.ended = True
            self._end_if_written(file)

    def call(self, act: Callable[[], None]) -> None:
        """Something else that must be done before the step is written: called by one of the workers."""
        with self._lock:
            if self._stopped:
                raise CrewFailedError
            self._calls.append(act)
            self._unfinished += 1
            self._news.notify()

    def release(self) -> None:
        """Begin, if that was not done yet."""
        self._held = False
        while len(self._threads) < self._workers:
            thread = Thread(target=self._work, name=f"milepost-write-{len(self._threads)}", daemon=True)
            thread.start()  # first: Ctrl-C in it would leave one that nobody can join
            self._threads.append(thread)

    def wait(self) -> None:
        """Return once all that was added is done. Nothing more is added. `failure` says whether it went well."""
        self.release()
        with self._lock:
            self._all_added = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

    def unfinished(self) -> Path | None:
        """The file, of those that are not on the disk yet, that was begun first."""
        with self._lock:
            return self._files[0].path if self._files else None

    def abandon(self, seconds: float = 3.0) -> None:
        """Stop: what was not written yet will not be, and all files are closed. A thread that the file system does not
        answer so long is left to itself."""
        with self._lock:
            self._stop()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for file in self._files:
            file.close()

    # The workers

    def _work(self) -> None:
        while (task := self._next()) is not None:
            path, act = task
            try:
                act()
            except BaseException as error:  # noqa: BLE001  raised by who waits
                with self._lock:
                    self.failure = self.failure or Failure(path, error)
                    self._stop()

    def _next(self) -> tuple[Path | None, Callable[[], None]] | None:
        """What to do now; waits until there is something. None: nothing ever again."""
        with self._lock:
            while True:
                if self._stopped or (self._all_added and not self._unfinished):
                    self._news.notify_all()
                    return None
                if self._writes:
                    file, piece, offset = self._writes.popleft()
                    return file.path, partial(self._write, file, piece, offset)
                if self._flushes:
                    file = self._flushes.popleft()
                    return file.path, partial(self._flush, file)
                for file in self._files:
                    if file.pieces and not file.busy:
                        file.busy = True
                        return file.path, partial(self._put_through, file, file.pieces.popleft())
                if self._calls:
                    return None, partial(self._call, self._calls.popleft())
                self._news.wait()

    def _put_through(self, file: OutFile, piece: Piece) -> None:
        try:
            offset = file.put_through(piece)
        except BaseException:
            piece.done()
            raise
        with self._lock:
            file.busy = False
            file.writing += 1
            if self._stopped:
                piece.done()
            else:
                self._writes.append((file, piece, offset))
            self._news.notify_all()

    def _write(self, file: OutFile, piece: Piece, offset: int) -> None:
        try:
            file.write(piece, offset)
        finally:
            piece.done()
        with self._lock:
            file.writing -= 1
            self._end_if_written(file)

    def _end_if_written(self, file: OutFile) -> None:
        if file.ended and not (file.pieces or file.busy or file.writing):
            self._flushes.append(file)
            self._news.notify()

    def _flush(self, file: OutFile) -> None:
        file.flush()
        with self._lock:
            self._files.remove(file)
        self._finished()

    def _call(self, act: Callable[[], None]) -> None:
        act()
        self._finished()

    def _finished(self) -> None:
        with self._lock:
            self._unfinished -= 1
            self._news.notify_all()

    def _stop(self) -> None:
        """Under the lock: drop what is left, so that who waits for memory gets it."""
        self._stopped = True
        for file in self._files:
            while file.pieces:
                file.pieces.popleft().done()
        while self._writes:
            self._writes.popleft()[1].done()
        self._news.notify_all()


def _some(count: int) -> int:
    """Bytes that a write took: at least one, or it would be tried for ever."""
    if count <= 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return count
