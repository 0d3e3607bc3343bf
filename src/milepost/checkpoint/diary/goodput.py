"""Where the time of a run went: what share of it was training that counts.

The whole is every session from its start to its last sign of life, and the pauses between them, but for a pause after a
session that was done: nobody wanted the run then. All of it is read from the diary, so a hang that nobody reported and
that ended in a kill is part of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

from milepost.checkpoint.diary.facts import RunHistory
from milepost.wording import duration

# Phases outside of the seconds of a step, and the part that they would else be of.
_AROUND = {"save_checkpoint": "saving", "testing": "validating"} | dict.fromkeys(
    ("start", "models", "resume"), "starting"
)
_REST = ("logging", "poll_saves", "end")


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run, by what they were spent on.

    training:    steps that count
    redone:      steps whose work was lost
    saving:      training waited for a save
    validating:  held-out prompts
    starting:    from a start to its first step
    down:        from the end of a session to the next start
    stalled:     phases that took far longer than they ever did
    rest:        all else
    """

    training: float
    redone: float
    saving: float
    validating: float
    starting: float
    down: float
    stalled: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Of all the time, what was training that counts: 0 to 1."""
        return self.training / self.total if self.total > 0 else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}

    def words(self) -> str:
        """The share, and where else the time went, the most first: at least a tenth of a second, and a thousandth."""
        least = max(0.1, self.total / 1000)
        others = sorted(
            ((seconds, name) for name, seconds in self.parts.items() if name != "training" and seconds >= least),
            reverse=True,
        )
        went = "; ".join(f"{name} {duration(seconds)}" for seconds, name in others)
        return f"{self.share:.0%} of {duration(self.total)} was training{f' ({went})' if went else ''}"


def goodput(history: RunHistory) -> Goodput | None:
    """Where the time went; None where no step was finished yet."""
    if not history.steps:
        return None
    stalled = dict.fromkeys(("training", "saving", "validating", "starting", "rest"), 0.0)
    for stall in history.stalls:
        # Ranks that wait for one another may tell of one hang in several phases. Rank 0's follow one another.
        if 0 in stall.ranks:
            stalled[_AROUND.get(stall.phase, "rest" if stall.phase in _REST else "training")] += stall.over or 0.0
    training = max(0.0, history.trained_seconds - stalled["training"])
    redone = history.redone_seconds
    saving = max(0.0, sum(save.stall or 0.0 for save in history.saves) - stalled["saving"])
    validating = max(0.0, sum(validation.seconds or 0.0 for validation in history.validations) - stalled["validating"])
    begun: dict[int, float] = {}
    for record in history.steps:
        begun.setdefault(record.session, record.time - (record.seconds or 0.0))
    sessions = history.sessions
    starting = sum(max(0.0, begun.get(session.index, session.last) - session.start) for session in sessions)
    starting = max(0.0, starting - stalled["starting"])
    down = sum(max(0.0, after.start - before.last) for before, after in pairwise(sessions) if before.end != "done")
    whole = sum(session.last - session.start for session in sessions) + down
    hung = sum(stalled.values())
    known = training + redone + saving + validating + starting + down + hung
    return Goodput(training, redone, saving, validating, starting, down, hung, max(0.0, whole - known))
