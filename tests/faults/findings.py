"""What one injected fault did."""

from __future__ import annotations

import re
from dataclasses import dataclass

from faults.jobs import Outcome


@dataclass(frozen=True)
class Finding:
    """One injected fault and its consequences.

    what:    the fault, in words
    reached: whether it was injected at all: a save makes so many calls and no more
    faults:  what did not hold afterwards
    newest:  the newest step on disk
    outcome: what the ranks were told; None where a job of many faults told it
    """

    what: str
    reached: bool
    faults: tuple[str, ...]
    newest: int = 0
    outcome: Outcome | None = None

    def shows(self, fault: str) -> bool:
        """Whether a fault is one of that kind, a regular expression. What is found of a mutant must be what it does
        wrong: anything else says only that the box is busy."""
        return any(re.search(fault, found) for found in self.faults)
