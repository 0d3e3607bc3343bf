"""A watch over the phases of a run: one that takes far longer than it ever did is told of while it still hangs.

What a step consists of is compared with its own history, in which earlier sessions count. What comes once a session (a
start with its file locks, models, a resume, the end with its uploads) has none that tells anything, and a fixed limit.

Ranks wait for one another in almost every phase, so where one hangs all of them do, and each tells of it by itself. The
one that says nothing is the one to look at: its process is stopped, or gone, or its machine is.

A thread looks at the clock. It cannot run while something holds Python's lock and never gives it back; for that case
`faulthandler`, whose thread needs no lock, writes the stacks to stderr a little later and, where workers are to be
restarted, ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.preemption import Durations
from milepost.wording import disk_error, duration

FOLDER = "stalls"
EXIT_STATUS = 3
START, MODELS, RESUME, END = "start", "models", "resume", "end"
"""Phases that come once a session."""
LOGGING, AGREEING = "logging", "agreeing"
"""Phases of a step that only this watch knows by name: metrics go out; ranks ask one another whether to stop."""
SAVING = "save_checkpoint"
"""A step is saved, or only taken where it is written behind training's back: the same phase takes seconds or long."""
_ONCE = (START, MODELS, RESUME, END)
_FIRST_TIME = 3.0  # times the floor, for a phase of which nothing is known yet
_GRACE = 15.0  # seconds after which the thread must have had its turn
_LONGEST_LOOK = 1.0


@dataclass(frozen=True)
class StallLimits:
    """When a phase counts as hanging, and what follows.

    factor:   times the longest that it took before
    floor:    seconds below which nothing counts
    once:     seconds for each of the phases that come once a session
    saving:   seconds after which a save ends by itself, with an error that says more
    restart:  whether the process is ended
    """

    factor: float
    floor: float
    once: float
    saving: float = 0.0
    restart: bool = False

    def of(self, phase: str, known: float) -> float:
        """The limit of a phase in seconds. `known`: the longest that it took before, 0 where nothing is known."""
        if phase in _ONCE:
            return self.once
        least = self.saving + self.floor if phase == SAVING else 0.0
        return max(least, self.floor * (1.0 if known else _FIRST_TIME), self.factor * known)


@dataclass(frozen=True)
class _Phase:
    """A phase as it is watched.

    begun:  by the monotonic clock
    limit:  in seconds
    """

    name: str
    step: int
    begun: float
    limit: float

    @property
    def where(self) -> str:
        return f"step {self.step}" if self.step else "before its first step"


class StallWatch:
    """Watches one rank's phases; `phase` marks them, one at a time.

    limits:   None: nothing is watched
    folder:   where the stacks go, `stalls/` in the run's folder
    events:   the run's diary; every rank that stalls writes a line of its own
    step:     the step that this rank is at, 0 before the first of a session
    """

    def __init__(
        self, limits: StallLimits | None, folder: Path, events: EventLog, rank: int = 0, world_size: int = 1
    ) -> None:
        self._limits = limits
        self._folder = folder
        self._events = events
        self._rank = rank
        self._who = f"rank {rank} of {world_size} on {socket.gethostname()}"
        self._durations = Durations()
        self._change = threading.Condition()
        self._now: _Phase | None = None
        self._told = False
        self._over: list[tuple[_Phase, float]] = []  # told of, and ended after so many seconds
        self._closed = False
        self.step = 0
        self._thread = threading.Thread(target=self._watch, name="milepost-stall-watch", daemon=True)
        if limits is not None:
            self._thread.start()

    def remember(self, earlier: Mapping[str, Sequence[float]]) -> None:
        """Take in how long phases took in earlier sessions, by name, in seconds."""
        self._durations = Durations(earlier)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the block as a phase of that name."""
        if self._limits is None:
            yield
            return
        limit = self._limits.of(name, self._durations.longest(name))
        now = _Phase(name, self.step, time.monotonic(), limit)
        with self._change:
            self._now, self._told = now, False
            self._change.notify()
        faulthandler.dump_traceback_later(limit + _GRACE, exit=self._limits.restart)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            took = time.monotonic() - now.begun
            with self._change:
                told, self._now = self._told, None
                if told:  # the thread says so too: it may still be telling of the stall
                    self._over.append((now, took))
                    self._change.notify()
            if not told:
                self._durations.add(name, took)

    def close(self) -> None:
        """Watch no more."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._limits is not None:
            self._thread.join(timeout=_LONGEST_LOOK * 5)

    def _watch(self) -> None:
        while True:
            stalled = None
            with self._change:
                over, self._over = self._over, []
                now = self._now
                left = None if now is None or self._told else now.begun + now.limit - time.monotonic()
                if not over:
                    if self._closed:
                        return
                    if now is None or left is None or left > 0:
                        # Not all of it at once: a machine that sleeps stops this clock's waits, not its time.
                        self._change.wait(None if left is None else min(left, _LONGEST_LOOK))
                        continue
                    self._told, stalled = True, now
            for phase, took in over:
                self._events.write("stall_over", step=phase.step, phase=phase.name, rank=self._rank, seconds=took)
            if stalled is not None:
                self._tell(stalled)

    def _tell(self, now: _Phase) -> None:
        seconds = time.monotonic() - now.begun
        # Before anything that may hang too: the disk may be what hangs.
        sys.stderr.write(
            f"milepost: {self._who}: {now.where}: {now.name} goes on for {duration(seconds)} "
            f"(limit {duration(now.limit)}); the stacks of all ranks go to {self._folder}\n"
        )
        sys.stderr.flush()
        self._record(now, seconds)
        if self._limits is None or not self._limits.restart:
            return
        with self._change:  # which holds up the end of the phase
            if self._now is now:  # it may have ended meanwhile: then nothing hangs
                sys.stderr.write(f"milepost: {self._who}: ends, so that all workers start again\n")
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def _record(self, now: _Phase, seconds: float) -> None:
        file = self._folder / f"step_{now.step}_{now.name}_rank_{self._rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file.open("w", encoding="utf-8") as out:
                out.write(f"{self._who}, process {os.getpid()}: {now.where}, {now.name} for {seconds:.1f} s\n\n")
                out.flush()
                faulthandler.dump_traceback(out, all_threads=True)
        except OSError as error:
            sys.stderr.write(f"milepost: {self._who}: {file}: {disk_error(error)}; the stacks:\n")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._events.write(
            "stall",
            step=now.step,
            phase=now.name,
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            seconds=seconds,
            limit=now.limit,
            stacks=str(file.relative_to(self._folder.parent)),
        )
