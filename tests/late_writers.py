"""A background that is kept waiting: what a save does while training stands still is then all that was done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from milepost.checkpoint.saving.staged_file import Staging


@contextlib.contextmanager
def late_writers() -> Iterator[None]:
    """No byte is looked at in the background before the context ends."""
    ended, wait = threading.Event(), Staging.wait

    def waits(self: Staging) -> None:
        ended.wait(60)
        wait(self)

    Staging.wait = waits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Staging.wait = wait  # type: ignore[method-assign]
        ended.set()
