"""A file of a step on its way to the disk: filled from front to back, written by a crew, in memory used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.checkpoint.deadline import NO_DEADLINE, Deadline
from milepost.checkpoint.saving.writing import Crew, Failure, OutFile, Piece, Run
from milepost.errors import MilepostError, WriteError
from milepost.layouts.archive_stream import archive_stream
from milepost.wording import disk_error

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.checkpoint.saving.staging import DeviceCopies, Page, PagePool

_FIRST = 1 << 16  # bytes of a file that take no page: most files are smaller
_PAGES = 12  # in use at once while training waits: what a crew can keep busy with


@dataclass
class Staging:
    """What the files of a step pass through on their way to the disk.

    within:    pages that may be in use at once, where that is less than the pool has
    deadline:  for whatever waits for the file system
    """

    crew: Crew
    pool: PagePool
    copies: DeviceCopies
    within: int | None = None
    deadline: Deadline = NO_DEADLINE

    @staticmethod
    def make(pool: PagePool | None = None, *, blocking: bool = True, deadline: Deadline = NO_DEADLINE) -> Staging:
        """Blocking: the crew begins at once, and some pages are enough. Else it begins when it is waited for, or when
        the pool has no more pages."""
        from milepost.checkpoint.saving.staging import DeviceCopies, PagePool  # noqa: PLC0415  imports torch

        within = _PAGES if blocking else None
        crew = Crew(held=not blocking)
        return Staging(crew, pool or PagePool(), DeviceCopies(), within, deadline)

    def take(self) -> Page:
        """A page to fill."""
        page = self.pool.take(self.within, full=self.crew.release, seconds=self.deadline.left())
        if page is None:
            raise self.deadline.miss(self.crew.unfinished())
        return page

    def wait(self) -> None:
        """Return once everything is on the disk. Raises MilepostError: WriteError where the disk refuses."""
        self.deadline.within(self.crew.unfinished, self.crew.wait)
        if self.crew.failure is not None:
            raise in_words(self.crew.failure) from self.crew.failure.error


class StagedFile:
    """A new file that is filled from front to back: its bytes are copied into pages, and a crew hashes and writes them.

    What it was given may change as soon as a call returns; of tensors on a device once `DeviceCopies.wait` has.
    """

    def __init__(self, path: Path, into: Staging) -> None:
        self._into = into
        self._file = into.crew.open(path)
        self._page: Page | None = None
        self._copies: list[Callable[[], None]] = []
        self._view = memoryview(bytearray(_FIRST))
        self._filled = 0
        self._size = 0
        self._storages = 0

    def write(self, data: Any) -> int:
        """Append bytes, or anything that shows its memory as contiguous bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            room = self._room()
            count = min(room.nbytes, view.nbytes - done)
            room[:count] = view[done : done + count]
            self._took(count)
            done += count
        return view.nbytes

    def archive(self, value: Any, *, alone: bool) -> None:
        """Append an object as torch.save writes it; alone: see `pickled`."""
        from milepost.checkpoint.saving.torch_pickle import pickled  # noqa: PLC0415  imports torch

        data_pkl, storages = pickled(value, alone=alone)
        plan = archive_stream(data_pkl, [storage.nbytes for storage in storages])
        before, self._storages = self._storages, self._storages + len(storages)

        def gap(number: int, crcs: Sequence[int]) -> bytes:
            return plan.gap(number, crcs[before:] if before else crcs)

        for number, storage in enumerate(storages):
            self.later(plan.gap_lengths[number], partial(gap, number))
            self.append(storage)
        self.later(plan.gap_lengths[-1], partial(gap, len(storages)))

    def append(self, source: Tensor) -> None:
        """Append the bytes of a tensor (uint8, one dimension); their CRC-32 is wanted."""
        import torch  # noqa: PLC0415  who has a tensor has it

        length = source.nbytes
        self._file.runs.append(Run(self._size, self._size + length))
        done = 0
        while done < length:
            room = self._room()
            count = min(room.nbytes, length - done)
            if self._page is None:
                target = torch.frombuffer(room[:count], dtype=torch.uint8)
            else:
                target = self._page.tensor[self._filled : self._filled + count]
            copied = self._into.copies.copy(source if count == length else source[done : done + count], target)
            if copied is not None:
                self._copies.append(copied)
            self._took(count)
            done += count

    def later(self, length: int, make: Callable[[Sequence[int]], bytes]) -> None:
        """Append so many bytes that are made of the CRC-32s of what was appended before."""
        self._file.runs.append(Run(self._size, self._size + length, make))
        left = length
        while left:
            count = min(self._room().nbytes, left)
            self._took(count)
            left -= count

    def tell(self) -> int:
        """Bytes appended so far."""
        return self._size

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No: bytes are hashed in the order in which they lie."""
        return False

    def flush(self) -> None:
        """Nothing to do: the crew flushes."""

    def end(self) -> OutFile:
        """All bytes are there."""
        if self._filled:
            self._turn()
        self._drop()
        self._into.crew.end(self._file)
        return self._file

    def abandon(self) -> None:
        """Give back what is held of a file that will be removed."""
        self._drop()

    def _room(self) -> memoryview:
        """Memory for what comes next, not empty."""
        if self._filled == self._view.nbytes:
            self._turn()
        if not self._view.nbytes:
            self._page = self._into.take()
            self._view = self._page.memory
        return self._view[self._filled :]

    def _took(self, count: int) -> None:
        self._filled += count
        self._size += count

    def _turn(self) -> None:
        """Hand over what is filled."""
        page, view, filled = self._page, self._view, self._filled
        ready = partial(_all, self._copies) if self._copies else None
        self._page, self._view, self._filled, self._copies = None, memoryview(b""), 0, []
        if page is None:
            self._into.crew.add(self._file, Piece(view[:filled], ready=ready))
        else:
            give_back = partial(self._into.pool.give, page)
            self._into.crew.add(self._file, Piece(view[:filled], aligned=True, ready=ready, done=give_back))

    def _drop(self) -> None:
        if self._page is not None:
            self._into.pool.give(self._page)
        self._page, self._view, self._filled = None, memoryview(b""), 0


def _all(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def reason(error: OSError) -> str:
    """Why a write of a step failed and what to do, in words."""
    return disk_error(error, room="free some space, or keep fewer steps")


def refused(path: Path, error: OSError) -> WriteError:
    """A disk's refusal of a file, for the user."""
    return WriteError(f"{path}: {reason(error)}")


def in_words(failure: Failure) -> MilepostError:
    """What a crew met, for the user."""
    error = failure.error
    if isinstance(error, MilepostError):
        return error
    if isinstance(error, OSError):
        return refused(failure.path or Path(error.filename or "the step"), error)
    return MilepostError(f"{failure.path or 'the step'}: {type(error).__name__}: {error}")
