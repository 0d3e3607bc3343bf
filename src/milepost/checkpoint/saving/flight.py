"""A step in flight: its state is taken, and a thread brings it to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Callable

from milepost.checkpoint.background import Background
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
        self._landing = Background(land, f"milepost-step-{step}", keeps_process=True)

    @property
    def landed(self) -> bool:
        """Whether its end is known on this rank."""
        return self._landing.ended

    def verdict(self, seconds: float) -> Verdict:
        """What became of it; waits so long at most, and is then an error too."""
        if not self._landing.wait(seconds):
            return WriteError(
                f"step {self.step} is not on the disk {duration(seconds)} after it was waited for: the file system "
                "hangs, or another rank does"
            )
        try:
            return self._landing.result()
        except MilepostError as error:
            return error
        except BaseException as error:  # noqa: BLE001  raised by who asks
            return MilepostError(f"step {self.step} was not saved: {type(error).__name__}: {error}")
