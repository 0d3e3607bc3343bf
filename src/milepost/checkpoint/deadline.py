"""A time limit for what may never return: a file system whose server is gone answers no call; no signal ends the wait.

So such calls are made in a thread, and who asked waits for it no longer than the time that is left. The thread is then
left to itself: it ends when the file system answers, or with the process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from milepost.checkpoint.background import Background
from milepost.errors import WriteError
from milepost.wording import duration

T = TypeVar("T")
_NAME = "milepost-in-time"  # of threads


class Deadline:
    """The time that a save may take. `seconds`: from now on; infinity: as long as it will."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.missed = False

    def left(self) -> float | None:
        """Seconds; None: no limit."""
        return None if math.isinf(self._seconds) else max(0.0, self._end - time.monotonic())

    def within(
        self, what: object | Callable[[], object], act: Callable[[], T], late: Callable[[T], object] | None = None
    ) -> T:
        """Do `act` and return its result, or raise what it raises. Raises WriteError where the time is over before it.

        what: the file or folder that is waited for, for the message; where it is a function, asked only then
        late: undoes what `act` has done, by its result, where nobody waits for that any more; raises nothing
        """
        if math.isinf(self._seconds):
            return act()
        call = Background(act, _NAME)
        try:
            answered = call.wait(self.left())
        except BaseException:  # Ctrl-C
            if late is not None:
                call.leave(late)
            raise
        if answered:
            return call.result()
        if late is not None:
            call.leave(late)
        raise self.miss(what() if callable(what) else what)

    def check(self, what: object) -> None:
        """Raise WriteError where the time is over: who asked has given up, so nothing may be changed any more."""
        if self.left() == 0.0:
            raise self.miss(what)

    def miss(
        self,
        what: object,
        slow: str = "the file system did not answer",
        do: str = "look after it, or choose another place",
    ) -> WriteError:
        """The error of a call that did not come to its end in time.

        slow, do: what kept it from that, and what is to be done about it
        """
        self.missed = True
        return WriteError(f"{what}: {slow} within {duration(self._seconds)} (save_timeout); {do}")


NO_DEADLINE = Deadline()


def in_time(seconds: float | None, act: Callable[[], object]) -> bool:
    """Do `act`, which raises nothing, and wait for it so long at most (None: for ever); whether it came to its end."""
    return Background(act, _NAME).wait(seconds)
