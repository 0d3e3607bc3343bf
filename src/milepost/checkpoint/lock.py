"""One run writes into a folder at a time: two would set each other's steps aside and sweep each other's saves away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from milepost.errors import WriteError

LOCK = ".lock"


@contextlib.contextmanager
def exclusive(root: Path, run_id: str) -> Iterator[None]:
    """Hold the folder of a run, by a file lock that goes with the process however it ends.

    Raises WriteError where another run holds it. A restart of the same run is let in: a network file system may keep
    the lock of a dead node for a while. A file system without locks holds nobody back.
    """
    with (root / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder, _, where = file.read().partition(" ")
            if holder != run_id:
                raise WriteError(
                    f"{root}: another run writes here now ({where.strip() or 'an unknown process'}); wait for its end, "
                    "stop it, or choose another trainer.default_local_dir"
                ) from None
        except OSError:
            yield  # no locks here
            return
        else:
            file.truncate(0)
            file.write(f"{run_id} process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
