"""Numbers of one training step: means over all ranks, and the seconds of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from milepost.trainer.advantages import AllReduce

TIMING = "timing_s/"
"""Before the name of what took so many seconds; as verl has it."""


class Tally:
    """Sums and counts of this rank, by metric name. Every rank adds to the same names, if only zeros."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add to the sum that `name` is the mean of, and to the number of things in it."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + _exact(total), old_count + _exact(count))

    def means(self, all_reduce: AllReduce) -> dict[str, float]:
        """The mean of each name over all ranks; 0 where nothing was counted. All ranks call it together."""
        if not self._sums:
            return {}
        local = torch.tensor(
            [[float(total), float(count)] for total, count in self._sums.values()], dtype=torch.float64
        )
        return {
            name: total / count if count else 0.0
            for name, (total, count) in zip(self._sums, all_reduce(local).tolist(), strict=True)
        }


def _exact(value: Tensor | float) -> Tensor | float:
    """In float64, and on its device: fetching it from a GPU would wait for all work queued there."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


class Stopwatch:
    """Seconds by the name of what they were spent on.

    also:  entered, with that name, around everything that is timed
    """

    def __init__(self, also: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._also = also

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time that the block takes. On a GPU this is the time to queue its work and to wait for results."""
        start = time.perf_counter()
        try:
            with nullcontext() if self._also is None else self._also(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """As verl names them: timing_s/<name>."""
        return {f"{TIMING}{name}": seconds for name, seconds in self.seconds.items()}
