"""Pages: the host memory that a save's bytes are copied into, so that training may go on while they are written.

A file on its way to the disk is a row of pages. Whoever shows its bytes fills them, `checkpoint.saving.writing`
hashes and writes them, and then they are filled again: by the same save where memory is bounded, else by the next. So a
run that saves at every step touches new memory at its first save only.

With a GPU the pages are registered with CUDA (pinned): the copies run beside each other and beside the training's
kernels, on a stream of their own.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

PAGE = 8 << 20
"""Bytes of a page: large enough that a write of it costs little beside its bytes, small enough to share out."""
LEAST = 4
"""Fewest pages that a save can work with: while some are written another is filled."""
_SLAB = 16  # pages that are asked of the system at once


@dataclass(frozen=True)
class Page:
    """A piece of memory that begins at a page of the machine.

    memory:  its bytes
    tensor:  the same bytes, for torch; uint8
    """

    memory: memoryview
    tensor: torch.Tensor


class PagePool:
    """Pages that are used again and again.

    Args:
        limit: most bytes that all of them may have; None: as many as a step needs.
        pinned: whether they are for copies from a GPU.
    """

    def __init__(self, limit: int | None = None, *, pinned: bool = False) -> None:
        self._most = None if limit is None else max(LEAST, limit // PAGE)
        self._pinned = pinned
        self._slabs: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._free: list[Page] = []
        self._made = 0
        # Plain locks: Ctrl-C, which breaks off who waits for a page, may leave a Condition locked.
        self._lock = Lock()
        self._waiting: list[Lock] = []  # held; each is let go once a page is given back

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self._made * PAGE

    def take(
        self, within: int | None = None, *, full: Callable[[], None] = lambda: None, seconds: float | None = None
    ) -> Page | None:
        """A page that nobody uses. Where the bound is reached, it calls `full` once and waits until one is given back.

        within:   a tighter bound for this call: pages that may be in use at once
        seconds:  how long it waits for one; None is returned then
        """
        asked = False
        most = min(bound for bound in (self._most, within, sys.maxsize) if bound is not None)
        while True:
            with self._lock:
                if self._made - len(self._free) < most:
                    if not self._free:
                        self._grow(most)
                    return self._free.pop()
                returned = Lock()
                returned.acquire()
                self._waiting.append(returned)
            if not asked:
                asked = True
                full()
            if not returned.acquire(timeout=-1 if seconds is None else seconds):
                return None

    def give(self, page: Page) -> None:
        """Give a page back. Any thread may."""
        with self._lock:
            self._free.append(page)
            while self._waiting:
                self._waiting.pop().release()

    def close(self) -> None:
        """Give the memory back to the system. No page is in use."""
        with self._lock:
            self._free.clear()
            self._made = 0
            for _, tensor in self._slabs:
                if self._pinned:
                    _cuda("cudaHostUnregister", tensor.data_ptr())
            # The memory itself goes once nothing refers to it any more.
            self._slabs.clear()

    def _grow(self, most: int) -> None:
        count = min(_SLAB, most - self._made)
        # Private: a process that is forked later gets no share of it.
        slab = mmap.mmap(-1, count * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = memoryview(slab)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self._pinned:
            _cuda("cudaHostRegister", tensor.data_ptr(), tensor.nbytes, 0)
        self._slabs.append((slab, tensor))
        cuts = [slice(number * PAGE, (number + 1) * PAGE) for number in range(count)]
        self._free += [Page(memory[cut], tensor[cut]) for cut in reversed(cuts)]
        self._made += count


class DeviceCopies:
    """Copies from devices into pages. CUDA's run on a stream of their own; what they read must stay until `wait`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None] | None:
        """Copy bytes (uint8, one dimension). Returns what waits until they are there; None: they are."""
        if source.device.type != "cuda":
            target.copy_(source)
            return None
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(source.device))  # what makes these bytes comes first
        source.record_stream(stream)  # what was made for the save alone is not given away before it is copied
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        wait: Callable[[], None] = copied.synchronize
        return wait

    def wait(self) -> None:
        """Return once all that was copied is there: from then on training may change what was read."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()


def on_gpu() -> bool:
    """Whether this process uses CUDA."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cuda(call: str, *arguments: int) -> None:
    """A call of CUDA's runtime. That it fails costs speed and nothing else: copies work into any memory."""
    getattr(torch.cuda.cudart(), call)(*arguments)  # type: ignore[no-untyped-call]
