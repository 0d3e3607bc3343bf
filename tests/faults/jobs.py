"""What a test asks of a saver, and what comes back: plain facts that pass between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults.shim import Rule


@dataclass(frozen=True)
class Job:
    """Some ranks that resume from a folder and save steps to it.

    root:      the run's folder; changes below it are counted
    scratch:   a folder for what the job itself needs
    ranks:     number of processes
    steps:     how many steps each saves; None: without end
    resume_from: the step to go on from; None: the newest
    kind:      of the engines, see `faults.engines`
    model:     what they are engines of: a folder in Hugging Face's form
    rules:     what happens to their calls
    at_rank:   whose calls are counted and broken; None: all together
    trace:     where changes are recorded
    mount:     the mount point that the act "cut" cuts
    mutant:    a safeguard that the savers go without, see `faults.mutants`
    blocking:  whether training waits for its saves; else its state changes right after the call, and the step counts as
               saved once it is durable
    each:      the ranks stay, and save once with the first rule at its 1st, 2nd, ... call: every such `each` calls
    again:     a rank that was told of an error leaves the file `told<rank>` in `scratch`, waits there for a file `go`,
               and saves the same step again
    interrupts: SIGINT and SIGTERM break a rank off, as Ctrl-C and the agent's signal do a worker; it then ends with 128
               and the signal's number, and what it says on stderr lies in `scratch`, in `stderr<rank>`
    patience:  seconds for which ranks wait for one another; None: as long as the manager has it
    orphans:   whether ranks go on where the process that started them is killed; else they die with it
    seconds:   after which what is left of the job is killed
    options:   of the manager
    """

    root: Path
    scratch: Path
    ranks: int = 1
    steps: int | None = 1
    resume_from: Path | None = None
    kind: str = "tiny"
    model: Path | None = None
    rules: tuple[Rule, ...] = ()
    at_rank: int | None = None
    trace: Path | None = None
    mount: Path | None = None
    mutant: str = ""
    blocking: bool = True
    each: int = 0
    again: bool = False
    interrupts: bool = False
    patience: float | None = None
    orphans: bool = False
    seconds: float = 60.0
    options: Mapping[str, Any] = field(default_factory=lambda: {"keep_last": 2})

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        content = json.loads(text)
        for name in ("root", "scratch", "trace", "mount", "resume_from", "model"):
            content[name] = None if content[name] is None else Path(content[name])
        content["rules"] = tuple(Rule(**{**rule, "ops": tuple(rule["ops"])}) for rule in content["rules"])
        return cls(**content)


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    told:      what each rank said, in order: {"rank", "event": resumed (and whether it "holds" the
               state of that step), saved, error, point, closed, ended; "step", "why", "seconds"}
    signals:   by which signal each rank was ended, 0 where by none; None where nobody could see it
    statuses:  with which status each rank ended; None where a signal ended it, or nobody could see it
    overtime:  whether something was left when the time was over
    """

    told: tuple[Mapping[str, Any], ...]
    signals: tuple[int | None, ...]
    statuses: tuple[int | None, ...]
    overtime: bool

    def of(self, event: str, rank: int | None = None) -> list[Mapping[str, Any]]:
        """The events of that kind, of one rank or of all."""
        return [said for said in self.told if said["event"] == event and rank in (None, said["rank"])]

    @property
    def saved(self) -> int:
        """The newest step that any rank was told is saved; 0 where none was."""
        return max((said["step"] for said in self.of("saved")), default=0)

    @property
    def errors(self) -> list[str]:
        """What ranks were told of failures, each text once."""
        return list(dict.fromkeys(said["why"] for said in self.of("error")))
