"""How a run is asked to stop in order, and how its ranks agree on it.

A scheduler says it by a signal, to one process or to all of them, or beforehand by an hour at which the machine goes.
Ranks train in step, so all of them must stop at the same place: a handler only notes the signal, and at the next
*poll*, a place that every rank passes, one small collective tells whether any of them has something noted. Then all of
them raise `Stop` there. A second signal finds the first one noted and changes nothing.

An agent that starts the workers of a machine ends them by the same SIGTERM when one has died, or when machines come.
It leaves a word in a file before, so that its signal is not taken for a scheduler's (see `milepost.trainer.elastic`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from milepost.errors import CallError

REQUEUE = 75
"""Exit status: saved and stopped as asked, start me again. EX_TEMPFAIL of sysexits.h."""

CLOSING = "closing"
"""File beside a worker's verdict in which its agent says why it ends the workers: `FAILED` or `RESIZE`."""
FAILED, RESIZE = "failed", "resize"

DEADLINE = "deadline"
SIGNAL = "signal"
_CODE_DEADLINE, _CODE_RESIZE, _CODE_SIGNAL = 1.0, 2.0, 3.0  # the higher one is what all ranks hear of
_ROLLOUT_SECONDS = 0.2  # between two agreements in a loop of many short turns
_MOST_TURNS = 256
_REMEMBERED = 20


class Stop(BaseException):
    """All ranks stop here. Not an Exception: what ranks do together catches those and tells the others.

    reason:  "signal", "deadline", or "resize": other machines are to join
    signal:  the signal's name, None for the other reasons
    since:   when this process heard of it, by the monotonic clock
    """

    def __init__(self, reason: str, name: str | None = None, since: float | None = None) -> None:
        super().__init__(reason)
        self.since = time.monotonic() if since is None else since
        self.reason = reason
        self.signal = name

    @property
    def words(self) -> str:
        """What stops the run, for people."""
        if self.reason == SIGNAL:
            return self.signal or "a signal"
        return "its deadline" if self.reason == DEADLINE else "a change of machines"


class Terminated(BaseException):
    """The agent ends its workers since one of them has died: unwinds at once, as Ctrl-C does."""


class StopSignals:
    """Notes the signals that ask this process to stop; the main thread alone may make use of it.

    names:    such as SIGTERM
    closing:  where this process's agent leaves word of why it ends its workers, None without an agent
    """

    def __init__(self, names: Iterable[str], closing: Path | None = None) -> None:
        self.numbers = tuple(signal.Signals[name] for name in names)
        self.noted: signal.Signals | None = None
        self.noted_at: float | None = None
        self.resize = False
        self._closing = closing
        self._parent = os.getppid()

    def install(self) -> None:
        """From now on the signals are noted and end nothing. SIGTERM from an agent always counts."""
        for number in {*self.numbers, signal.SIGTERM}:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        why = "" if self._closing is None or number != signal.SIGTERM else _read(self._closing)
        if why == RESIZE:
            self.resize = True
        elif why or number not in self.numbers:
            signal.signal(number, signal.SIG_IGN)  # a second one must not break the clearing up
            raise Terminated
        elif self.noted is None:
            self.noted, self.noted_at = signal.Signals(number), time.monotonic()

    def await_resize(self, seconds: float = 60.0) -> bool:
        """Wait for this process's own agent to say that it starts the workers anew; whether it did in time."""
        until = time.monotonic() + seconds
        while not self.resize and time.monotonic() < until:
            if self._closing is not None and _read(self._closing) == RESIZE:
                self.resize = True
            time.sleep(0.05)
        return self.resize

    def check_parent(self) -> None:
        """End this process where the one that started it is gone: nobody would restart it, and it would write into a
        run that others go on with."""
        if os.getppid() != self._parent:
            os.kill(os.getpid(), signal.SIGKILL)


class Durations:
    """How long things took, the newest few of each name; in seconds."""

    def __init__(self, earlier: Mapping[str, Sequence[float]] | None = None) -> None:
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        for name, seconds in (earlier or {}).items():
            self._seconds[name].extend(seconds)

    def add(self, name: str, seconds: float) -> None:
        """Take in one more."""
        self._seconds[name].append(seconds)

    def longest(self, *names: str) -> float:
        """The sum of the longest of each name; one never seen counts 0."""
        return sum(max(self._seconds[name], default=0.0) for name in names)


class Preemption:
    """Where ranks ask one another whether to stop. All ranks make the same calls in the same order.

    signals:   of this process
    highest:   the elementwise maximum of some numbers over all ranks; a collective
    deadline:  unix seconds at which this machine goes, None for never. The one duration that must be told by the clock
               on the wall, since others set it
    margin:    seconds that shall be left then
    """

    def __init__(
        self,
        signals: StopSignals,
        highest: Callable[[Sequence[float]], list[float]],
        deadline: float | None = None,
        margin: float = 0.0,
    ) -> None:
        self._signals = signals
        self._highest = highest
        self._deadline = deadline
        self._margin = margin
        self._turns, self._stride, self._since = 0, 1, time.monotonic()
        self.needed = 0.0

    def poll(self, needed: float | None = None) -> None:
        """Raise Stop on every rank, if one was asked to stop, or if less time is left than is `needed`: seconds for
        what comes before the next poll, and for the save after it."""
        if needed is not None:
            self.needed = needed
        self._signals.check_parent()
        self._decide(self._highest([self._code()])[0])

    def turn(self) -> None:
        """The same for a loop that all ranks turn equally often, such as that over the tokens of a rollout: they agree
        a few times a second, however fast it turns."""
        self._signals.check_parent()
        self._turns += 1
        if self._turns < self._stride:
            return
        now = time.monotonic()
        code, pace = self._highest([self._code(), (now - self._since) / self._turns])
        self._turns, self._since = 0, now
        # The slowest rank's pace is the same number on all of them.
        self._stride = max(1, min(_MOST_TURNS, int(_ROLLOUT_SECONDS / max(pace, 1e-9))))
        self._decide(code)

    def _code(self) -> float:
        if self._signals.noted is not None:
            return _CODE_SIGNAL + self._signals.noted
        if self._signals.resize:
            return _CODE_RESIZE
        late = self._deadline is not None and time.time() + self.needed + self._margin > self._deadline
        return _CODE_DEADLINE if late else 0.0

    def _decide(self, code: float) -> None:
        if code >= _CODE_SIGNAL:
            raise Stop(SIGNAL, signal.Signals(int(code - _CODE_SIGNAL)).name, self._signals.noted_at)
        if code:
            raise Stop(RESIZE if code == _CODE_RESIZE else DEADLINE)


def deadline_of(variable: str | None, environment: Mapping[str, str]) -> float | None:
    """The unix time that an environment variable names; None where none is asked for or it is not set.

    Raises CallError for one that is no number."""
    value = None if variable is None else environment.get(variable)
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise CallError(f"trainer.esi_deadline_env: ${variable} is {value!r}, not unix seconds") from None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
