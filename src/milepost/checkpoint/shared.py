"""What one node makes, the others see: how long a shared file system may take for that, and who waits so long."""

from __future__ import annotations

import time
from pathlib import Path

from milepost.errors import IncompleteError

SEEN_WITHIN = 60.0
"""Seconds for which a node may go on to see an old picture of a folder, or of a file. NFS clients keep attributes for
60 s at most (acregmax and acdirmax of nfs(5)); others keep them shorter, or not at all. A name that nobody asked for
before is asked of the server, so that it is seldom waited for."""
_LOOK = 0.05  # seconds


def seen_within(left: float | None) -> float:
    """Seconds in which to see what another node made, where all is given up in `left` seconds (None: never): half of
    them at most, so that it is told what is not seen before nobody listens any more."""
    return SEEN_WITHIN if left is None else min(SEEN_WITHIN, left / 2)


def await_seen(
    path: Path, rank: int, size: int | None = None, *, alone: bool = False, left: float | None = None
) -> None:
    """Wait until this node sees what another made, with its size in bytes; a rank that is `alone` made it itself, and
    does not wait. `left`: see `seen_within`.

    Raises IncompleteError where it does not come to that: the nodes do not share the folder.
    """
    end = time.monotonic() + (0.0 if alone else seen_within(left))
    while True:
        try:
            found = path.stat().st_size
            if size is None or found == size:
                return
            seen = f"sees {found} instead of {size} bytes of"
        except OSError:
            seen = "does not see"
        if time.monotonic() > end:
            raise IncompleteError(
                f"rank {rank} {seen} {path}, which another rank wrote: the folder is not on a file system that all "
                "nodes share"
            )
        time.sleep(_LOOK)
