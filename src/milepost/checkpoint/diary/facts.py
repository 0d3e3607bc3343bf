"""The facts of a run's life: sessions (from one start to a stop, a kill, or the present), the steps that each of them
trained, and which of those steps still count.

A step is *kept* until a later session trains it again or resumes from before it; the values of the lost ones are kept
too, so that both can be shown. `milepost.checkpoint.diary.history` reads these facts from the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from milepost.checkpoint.resume import Part, Skipped

_ENDS = {
    "done": "done",
    "killed": "killed",
    "deadline": "stopped before its deadline",
    "resize": "stopped for other machines to join",
    "error": "stopped on an error",
}


@dataclass(frozen=True)
class Resume:
    """What a session started from. `from_step` is None for a fresh start; `time` is in unix seconds; `notes` are the
    warnings of the start, in words."""

    time: float
    mode: str | None
    from_step: int | None
    folder: str | None
    next_step: int | None
    parts: tuple[Part, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    saved_world_size: int | None


@dataclass(frozen=True)
class StepRecord:
    """One trained step. `seconds` is its duration and `reward` its mean reward, None where not recorded; a metric that
    was recorded but is no number is NaN. `session` counts from 0."""

    step: int
    time: float
    session: int
    kept: bool
    seconds: float | None
    reward: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Validation:
    """One validation, after `step` steps."""

    step: int
    time: float
    session: int
    kept: bool
    metrics: Mapping[str, float]
    seconds: float | None = None


@dataclass(frozen=True)
class Save:
    """One save. `outcome` is durable, failed (see `error`), or open: requested, and then nothing more was heard.

    requested, time:  unix seconds of the request and of the outcome
    seconds, bytes:   of a durable save, None where not recorded
    stall:            seconds for which training waited, None where not recorded
    """

    step: int
    session: int
    outcome: str
    requested: float
    time: float
    seconds: float | None
    bytes: int | None
    folder: str | None
    error: str | None
    stall: float | None = None


@dataclass(frozen=True)
class Stall:
    """A phase that took far longer than it ever did.

    step:    at which the session was, 0 before its first
    time:    unix seconds at which the first rank told of it
    ranks:   those that told of it, ascending; one that does not is stopped, or gone
    limit:   seconds after which they did
    over:    how long it took in the end, in seconds; None where it did not end
    stacks:  files with what the ranks were doing, in the run's folder
    """

    session: int
    step: int
    phase: str
    time: float
    ranks: tuple[int, ...]
    limit: float | None
    over: float | None
    stacks: tuple[str, ...]

    @property
    def where(self) -> str:
        """The phase and its step, for people."""
        return f"step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


@dataclass(frozen=True)
class Kill:
    """A session that ended without a stop.

    time:            unix seconds of its last sign of life
    seen:            unix seconds of the start that noticed it
    last_step:       the last step it finished, None for none
    committed_step:  the step that was safe on disk, None for none
    lost_steps:      number of finished steps that were not safe on disk
    """

    session: int
    time: float
    seen: float
    last_step: int | None
    committed_step: int | None
    lost_steps: int


@dataclass(frozen=True)
class Session:
    """From one start to its end. `end` is the reason of its stop (done, signal, deadline, resize, error), killed, or
    None: not known. `error` is what it stopped on, in words; `index` counts from 0; start and last (event) are in unix
    seconds. Of a session that was asked to stop, `signal` is the signal's name, `stopped_at` the last finished step and
    `saved` whether that one is on disk."""

    index: int
    start: float
    last: float
    run_id: str | None
    attempt: int | None
    host: str | None
    pid: int | None
    world_size: int | None
    engine: str | None
    version: str | None
    resume: Resume | None
    end: str | None
    error: str | None
    first_step: int | None
    last_step: int | None
    signal: str | None = None
    stopped_at: int | None = None
    saved: bool | None = None

    @property
    def ended(self) -> str:
        """How it ended, for people; empty where that is not known."""
        if self.end is None:
            return ""
        said = {**_ENDS, "signal": f"stopped on {self.signal or 'a signal'}"}.get(self.end, self.end)
        if self.saved is None:
            return said
        kept = f"saved step {self.stopped_at}" if self.saved else f"step {self.stopped_at} not saved"
        return f"{said}, {kept if self.stopped_at else 'no step yet'}{'' if self.end == 'resize' else ', requeue'}"


@dataclass(frozen=True)
class RunHistory:
    """All that the events of a run tell; every tuple is in the order of the events."""

    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    validations: tuple[Validation, ...]
    saves: tuple[Save, ...]
    kills: tuple[Kill, ...]
    stalls: tuple[Stall, ...] = ()

    @property
    def kept_steps(self) -> tuple[StepRecord, ...]:
        """The steps that count, by step number."""
        return tuple(record for record in self.steps if record.kept)

    @property
    def lost_steps(self) -> tuple[StepRecord, ...]:
        """The steps whose work was lost: trained again later, or to be trained again."""
        return tuple(record for record in self.steps if not record.kept)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """The world sizes of the sessions in order, a repeated one once."""
        sizes = [session.world_size for session in self.sessions if session.world_size is not None]
        return tuple(size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1])

    @property
    def typical_step_seconds(self) -> float | None:
        """Median duration of a step in seconds."""
        durations = [record.seconds for record in self.steps if record.seconds is not None]
        return median(durations) if durations else None

    @property
    def trained_seconds(self) -> float:
        """Seconds spent in the steps that count."""
        return sum(record.seconds or 0.0 for record in self.kept_steps)

    @property
    def redone_seconds(self) -> float:
        """Seconds spent in steps whose work was lost."""
        return sum(record.seconds or 0.0 for record in self.lost_steps)

    @property
    def down_seconds(self) -> float:
        """Seconds between the last sign of life of each killed session and the first step begun after it (or, where
        there is none yet, the start that noticed the kill)."""
        first: dict[int, StepRecord] = {}
        for record in self.steps:
            first.setdefault(record.session, record)
        total = 0.0
        for kill in self.kills:
            begun = first.get(kill.session + 1)
            back = kill.seen if begun is None else max(kill.seen, begun.time - (begun.seconds or 0.0))
            total += max(0.0, back - kill.time)
        return total
