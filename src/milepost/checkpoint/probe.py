"""Whether all ranks mean the same folder when they name a run's: found out at the start, and not by a step of which
half lies on the disk of another machine.

Every rank writes a small file there, and looks for everybody's.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from milepost.checkpoint.comm import Communicator, together
from milepost.checkpoint.files import make_directory
from milepost.checkpoint.shared import seen_within
from milepost.errors import CallError
from milepost.wording import named_ranks

_LOOK = 0.05
_PREFIX = ".probe_"
_OLD = 3600.0  # seconds


def probe_root(comm: Communicator, root: Path) -> None:
    """Return if all ranks see one another's files in `root`, which is made where it is not there.

    Raises CallError on all ranks: it names which ranks were given which folder, or which see whose files. All ranks
    call it together.
    """
    if comm.world_size == 1:
        return
    given = comm.all_gather((str(root.absolute()), socket.gethostname(), secrets.token_hex(8)))
    folders = [folder for folder, _, _ in given]
    if len(set(folders)) > 1:
        raise CallError(f"ranks were given different folders for the run: {_by_value(folders)}; give all the same one")
    names = [f"{_PREFIX}{given[0][2]}_{rank}" for rank in range(comm.world_size)]
    own = root / names[comm.rank]

    def write() -> None:
        make_directory(root)
        if comm.rank == 0:
            _sweep(root)
        own.write_bytes(b"")

    try:
        together(comm, write)
        seen = together(comm, lambda: _wait_for(root, names, seen_within(comm.timeout_seconds)))
    finally:
        own.unlink(missing_ok=True)
    if all(len(ranks) == comm.world_size for ranks in seen):
        return
    hosts = [host for _, host, _ in given]
    raise CallError(
        f"{root} is not one folder for all ranks: {_sights(seen, hosts)}. "
        "Put the run on a file system that all machines share (trainer.default_local_dir)"
    )


def _sweep(root: Path) -> None:
    """Remove what a probe has left that was killed."""
    for file in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another job's may go in this moment
            if time.time() - file.stat().st_mtime > _OLD:
                file.unlink()


def _wait_for(root: Path, names: Sequence[str], patience: float) -> tuple[int, ...]:
    """Whose files are there; waits for those that are not."""
    until = time.monotonic() + patience
    while True:
        seen = tuple(rank for rank, name in enumerate(names) if (root / name).exists())
        if len(seen) == len(names) or time.monotonic() > until:
            return seen
        time.sleep(_LOOK)


def _by_value(values: Sequence[str]) -> str:
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return "; ".join(f"{named_ranks(ranks)} {value}" for value, ranks in found.items())


def _sights(seen: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """Who sees whose files, ranks of one host and one sight together."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, (host, ranks) in enumerate(zip(hosts, seen, strict=True)):
        found.setdefault((host, tuple(ranks)), []).append(rank)
    return "; ".join(
        f"{named_ranks(ranks)} on {host} {'see' if len(ranks) > 1 else 'sees'} the files of {named_ranks(sight)} only"
        if len(sight) < len(seen)
        else f"{named_ranks(ranks)} on {host} {'see' if len(ranks) > 1 else 'sees'} those of all"
        for (host, sight), ranks in found.items()
    )
