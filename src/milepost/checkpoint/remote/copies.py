"""The weights that a URL names, as a folder of this machine for as long as a command reads them.

Readers of layouts read files: the directory of an archive, then many small ranges, from several threads. So the files
are brought here whole, by ranges that are read side by side, in bounded memory. The folder lies below the one for
temporary files, needs as much room as those files, and goes when the command ends; what a kill leaves of it, the next
such command removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.remote.fetching import bring, download, place_of, step_at
from milepost.checkpoint.remote.folder import Remote, Stored
from milepost.errors import CallError, NotFoundError, WriteError
from milepost.transfer.execute import Progress
from milepost.wording import file_size

_OPTIMIZER = ("optim_world_size_", "extra_state_world_size_")
_PREFIX = "milepost-copy-"
_LOCK = "lock"


@dataclass(frozen=True)
class Copying:
    """What is about to be brought here: from where, into which folder, and how many bytes."""

    url: str
    into: Path
    nbytes: int


Told = Callable[[Copying], contextlib.AbstractContextManager[Progress]]


@contextlib.contextmanager
def local_copy(url: str, role: str | None = None, told: Told | None = None) -> Iterator[Path]:
    """A folder on this machine with the weights that a URL names, which goes when the context ends.

    TMPDIR names another place for it. Optimizer states that lie in files of their own stay where they are. role: the
    role of a step, by default the one that `locate` would take.

    Raises WriteError where there is no room, before anything is brought; DamagedError where something is not what the
    manifest says; CallError where something was replaced meanwhile.
    """
    place = place_of(url)
    step = step_at(place)
    source = place.remote if step is None else step.remote.below(step.folder)
    objects = source.objects("") if step is None else step.objects
    if role is not None and not any(name.startswith(f"{role}/") for name in objects):
        role = None  # a part of a state dict
    files = {name: stored for name, stored in objects.items() if _wanted(name, place.role or role, objects)}
    if not files:
        raise NotFoundError(f"{url}: nothing lies there")
    sizes = {name: stored.size for name, stored in files.items()}
    with _scratch() as scratch:
        copying = Copying(url, scratch, sum(sizes.values()))
        _require_room(copying)
        into = scratch / ("model" if step is None else step.folder)
        with contextlib.nullcontext(None) if told is None else told(copying) as progress:
            records = [record for record in step.manifest.files if record.path in files] if step and step.own else []
            if step is not None:
                bring(step, records, into, progress)
            known = {record.path for record in records}
            others = {name: stored for name, stored in files.items() if name not in known}
            download(source, {name: stored.size for name, stored in others.items()}, into, progress)
            _require_same(source, others)
        yield into / place.role if place.role else into


def _wanted(name: str, role: str | None, objects: Mapping[str, Stored]) -> bool:
    """Whether an object is needed to read the weights of a role (None: of actor, or of whatever roles there are)."""
    head, slash, inside = name.partition("/")
    if name == MANIFEST or (slash and PurePosixPath(inside).name.startswith(_OPTIMIZER)):
        return False
    wanted = role or ("actor" if any(other.startswith("actor/") for other in objects) else None)
    return wanted is None or not slash or head in (wanted, f"{wanted}_huggingface")


def _require_room(copying: Copying) -> None:
    free = shutil.disk_usage(copying.into).free
    if copying.nbytes > free:
        raise WriteError(
            f"{copying.url}: {file_size(copying.nbytes)} are to be brought to {copying.into.parent}, which has "
            f"{file_size(free)} free: let TMPDIR name a larger place"
        )


def _require_same(source: Remote, before: Mapping[str, Stored]) -> None:
    """Of these no manifest says what should have arrived, so parts of two versions may have come together."""
    now = source.objects("") if before else {}
    for name, stored in before.items():
        if now.get(name) != stored:
            raise CallError(f"{source}/{name} was replaced while it was read: give the command again")


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A new temporary folder, whose lock says that somebody uses it; those of the dead go first."""
    _sweep(Path(tempfile.gettempdir()))
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (scratch / f"{_LOCK}.new").open("w") as lock:
            with contextlib.suppress(OSError):  # no locks here: then nobody takes the folder for a dead one's either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(lock.name).rename(scratch / _LOCK)
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(below: Path) -> None:
    for scratch in below.glob(f"{_PREFIX}*"):
        try:
            if scratch.stat().st_uid != os.getuid():
                continue
            with (scratch / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use, or just begun, or going
        shutil.rmtree(scratch, ignore_errors=True)
