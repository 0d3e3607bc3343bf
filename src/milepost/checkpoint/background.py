"""A call in a thread of its own, which may take long, or never return."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call that has begun, in another thread.

    Ctrl-C may break off who waits for it. `Thread.join` then takes a thread for ended that is not (CPython before
    3.13), and whoever goes by that would begin anew beside it; an Event may be left locked. So a plain lock is waited
    for.

    Args:
        act: what is called.
        name: of the thread.
        keeps_process: whether the process does not end before it.
    """

    def __init__(self, act: Callable[[], T], name: str, *, keeps_process: bool = False) -> None:
        self._ended = False
        self._running = Lock()
        self._running.acquire()
        self._lock = Lock()
        self._late: Callable[[T], object] | None = None
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._act = act
        Thread(target=self._run, name=name, daemon=not keeps_process).start()

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self._ended

    def wait(self, seconds: float | None) -> bool:
        """Wait for its end so long at most, None: for ever. Whether it has come to it."""
        if not self._ended and self._running.acquire(timeout=-1 if seconds is None else seconds):
            self._running.release()
        return self._ended

    def result(self) -> T:
        """Once it has ended: what it returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def leave(self, late: Callable[[T], object]) -> None:
        """Nobody waits for it any more: `late` gets what it returns, to undo it."""
        with self._lock:
            self._late = late
            late_already = self.ended
        if late_already and self._error is None:
            late(self._results[0])

    def _run(self) -> None:
        try:
            self._results.append(self._act())
        except BaseException as error:  # noqa: BLE001  raised by who asks
            self._error = error
        with self._lock:
            self._ended = True
            late = self._late
        self._running.release()
        if late is not None and self._error is None:
            late(self._results[0])
