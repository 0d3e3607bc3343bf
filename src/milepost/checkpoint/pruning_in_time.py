"""Retention while a run saves: what it lets go is deleted after each durable step, and holds up nobody for long.

A file system may hang in the middle of a deletion, or take minutes for it. So it is done in a thread of its own, which
the save waits for a while and then leaves to itself; until that thread has come to its end nothing else is deleted.
Where it never does, the run trains on, and its folder grows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from milepost.checkpoint.background import Background
from milepost.checkpoint.pruning import Unread, carry_out, nobody_reads, plan_prune
from milepost.checkpoint.retention import Retention
from milepost.wording import duration

PATIENCE = 60.0
"""Seconds in which a deletion is waited for: on a network file system each of a step's files may take a part of one.
The other ranks train on meanwhile, and their collectives wait for this one: NCCL's for ten minutes, as a rule."""
_log = logging.getLogger(__name__)


class PruningInTime:
    """Deletes what retention lets go, and is waited for no longer than `patience`; on rank 0, one call at a time.

    Args:
        root: the run's folder.
        retention: what stays.
        patience: most seconds that a call takes.
    """

    def __init__(self, root: Path, retention: Retention, patience: float) -> None:
        self._root = root
        self._retention = retention
        self._patience = min(patience, PATIENCE)
        self._deleting: Background[None] | None = None

    def prune(self, whole: Mapping[int, bool], unread: Unread = nobody_reads) -> None:
        """Delete, from what the disk holds. Raises what kept it from that, where it is known in time.

        whole:   steps of which it is known whether they are
        unread:  as for `carry_out`
        """
        if self._retention.keeps_all:
            return
        if self._deleting is not None and not self._deleting.ended:
            self._warn("still does not answer")
            return

        def delete() -> None:
            carry_out(plan_prune(self._root, self._retention, whole=dict(whole)), unread=unread)

        self._deleting = Background(delete, "milepost-prune")
        if self._deleting.wait(self._patience):
            self._deleting.result()
        else:
            self._warn(f"did not answer within {duration(self._patience)}")

    def _warn(self, what: str) -> None:
        _log.warning("%s: the file system %s while older steps were being deleted; they stay for now", self._root, what)
