"""A step in flight: its state is taken, and a thread brings it to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from milepost.checkpoint.commit import SavedStep
from milepost.errors import MilepostError, WriteError
from milepost.wording import duration

Verdict = SavedStep | MilepostError
"""What became of a step."""


class Flight:
    """One step on its way.

    The thread keeps the process from ending before it: who leaves without a word still finds the step on the disk, or
    nothing of it.

    Args:
        step: its number.
        land: brings it to the disk; called in the thread.
    """

    def __init__(self, step: int, land: Callable[[], SavedStep]) -> None:
        self.step = step
        self._land = land
        self._verdict: Verdict | None = None
        self._thread = Thread(target=self._fly, name=f"milepost-step-{step}")
        self._thread.start()

    @property
    def landed(self) -> bool:
        """Whether its end is known on this rank."""
        return not self._thread.is_alive()

    def verdict(self, seconds: float) -> Verdict:
        """What became of it; waits so long at most, and is then an error too."""
        self._thread.join(seconds)
        if self._thread.is_alive() or self._verdict is None:
            return WriteError(
                f"step {self.step} is not on the disk {duration(seconds)} after it was waited for: the file system "
                "hangs, or another rank does"
            )
        return self._verdict

    def _fly(self) -> None:
        try:
            self._verdict = self._land()
        except MilepostError as error:
            self._verdict = error
        except BaseException as error:  # noqa: BLE001  raised by who asks
            self._verdict = MilepostError(f"step {self.step} was not saved: {type(error).__name__}: {error}")
