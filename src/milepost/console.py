"""What long work shows on stderr: a bar on a terminal, sparse plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from milepost.wording import duration, file_size

if TYPE_CHECKING:
    from milepost.transfer.execute import Progress

_EVERY_SECONDS = 10.0


def note(text: str, *, quiet: bool = False) -> None:
    """A line for the person, not for a pipe."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def bytes_progress(label: str, total: int, *, quiet: bool = False) -> Iterator[Progress]:
    """Show how many of `total` bytes are done, the rate and the time left; yields the function to call."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar(label, total) as advance:
            yield advance
    else:
        yield _PlainProgress(label, total)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Progress]:
    from rich.console import Console  # noqa: PLC0415  rich takes longer to import than most calls take
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.advance(task, count)


class _PlainProgress:
    """A line every ten seconds: for logs."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._begun = self._told = monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = monotonic()
        if now - self._told >= _EVERY_SECONDS and self._done:
            self._told = now
            rate = self._done / (now - self._begun)
            left = duration((self._total - self._done) / rate)
            done = f"{file_size(self._done)} of {file_size(self._total)}"
            note(f"{self._label}: {done}, {file_size(rate)}/s, {left} left")
