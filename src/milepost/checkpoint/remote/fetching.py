"""From a URL to this machine: a step's files by ranges that are read side by side, checked against its manifest."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from milepost.checkpoint.commit import mend_tracker
from milepost.checkpoint.files import make_directory, move_aside, sync_directory, write_durably
from milepost.checkpoint.manifest import MANIFEST, FileRecord
from milepost.checkpoint.remote.folder import PART, Remote, side_by_side
from milepost.checkpoint.remote.steps import RemoteStep, newest_whole, remote_steps
from milepost.checkpoint.steps import judge, newest_good, step_name, step_number
from milepost.errors import CheckpointError, DamagedError, NotFoundError, WriteError
from milepost.index import write_exactly
from milepost.jobs.checksums import check_records
from milepost.jobs.output import sync
from milepost.transfer.execute import Progress
from milepost.wording import disk_error, duration, file_size

_WORKERS = 8
_OPTIMIZER = ("optim_world_size_", "extra_state_world_size_")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Range:
    name: str
    target: Path
    start: int
    end: int


def download(remote: Remote, files: Mapping[str, int], into: Path, progress: Progress | None = None) -> None:
    """Bring objects into a folder, by their names below `remote`.

    files: name -> bytes

    Raises WriteError where the disk takes less than all.
    """
    ranges = []
    try:
        for name, size in files.items():
            target = into / name
            make_directory(target.parent)
            with target.open("xb") as file:
                file.truncate(size)
            ranges += [_Range(name, target, at, min(at + PART, size)) for at in range(0, size, PART)]

        def bring(one: _Range) -> None:
            data = remote.read(one.name, one.start, one.end)
            with one.target.open("r+b", buffering=0) as file:
                write_exactly(file.fileno(), memoryview(data), one.start)
            if progress is not None:
                progress(len(data))

        side_by_side(ranges, bring, _WORKERS)
    except OSError as error:
        raise WriteError(f"{error.filename or into}: {disk_error(error)}") from error


def fetch(step: RemoteStep, root: Path) -> Path:
    """Bring a step into a run's folder, where it appears whole or not at all; returns its folder.

    Raises DamagedError where a file is not what the manifest says, WriteError where the disk refuses.
    """
    final = root / step_name(step.step)
    tmp = root / f".{final.name}.{secrets.token_hex(4)}.tmp"
    begun = time.monotonic()
    make_directory(root)
    try:
        tmp.mkdir()
        manifest = step.manifest
        download(step.remote.below(step.folder), {r.path: r.size for r in manifest.files}, tmp)
        _check(step, manifest.files, tmp)
        for record in manifest.files:
            sync(tmp / record.path)
        write_durably(tmp / MANIFEST, manifest.to_json().encode())
        for directory, _, _ in os.walk(tmp):
            sync_directory(Path(directory))
        if final.exists():  # a step of that number that is not whole
            move_aside(root, [final])
        tmp.rename(final)
        sync_directory(root)
    except WriteError as error:
        said = str(error).replace(str(tmp), str(final))
        raise WriteError(f"step {step.step} was not fetched from {step.remote}: {said}") from error
    except OSError as error:
        raise WriteError(f"{error.filename or final}: {disk_error(error)}") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    mend_tracker(root, step.step)
    seconds = time.monotonic() - begun
    _log.info(
        "step %s fetched from %s: %s in %s", step.step, step.remote, file_size(manifest.nbytes), duration(seconds)
    )
    return final


def fetch_newest(
    remote: Remote, root: Path, roles: Collection[str], *, run_id: str = "", up_to: int | None = None
) -> list[str]:
    """Where the newest whole step lies at a URL and not here, bring it here; sentences for the report of the start.

    A step that turns out to be damaged is passed over for the next older one. Raises OutageError where the URL does not
    answer, WriteError where the disk here has no room. up_to: as for `newest_whole`.
    """
    here = newest_good(root, roles, run_id=run_id).good
    notes: list[str] = []
    bad: list[int] = []
    while True:
        found, why = newest_whole(remote, roles, run_id=run_id, without=bad, up_to=up_to)
        if found is None or (here is not None and found.step <= here.step):
            return notes
        notes += [f"passed over {reason}" for reason in why if f"passed over {reason}" not in notes]
        try:
            fetch(found, root)
            return [*notes, f"step {found.step} was fetched from {remote}"]
        except CheckpointError as error:
            bad.append(found.step)
            notes.append(f"passed over step {found.step} of {remote}: {error}")


def fetch_named(url: str, root: Path, roles: Collection[str] = (), *, again: bool = False) -> Path:
    """Bring the step that a URL names into a folder; returns its folder there. Raises NotFoundError where the URL names
    none, and what `fetch` does.

    again: what an earlier start of the same run brought will do where it is whole, with these roles
    """
    place = place_of(url)
    if again and place.step is not None:
        earlier = root / step_name(place.step)
        if judge(earlier, roles).state == "committed":
            return earlier
    step = step_at(place)
    if step is None or place.step is None or place.role:
        raise NotFoundError(f"{url} is no step; name one, such as {place.remote}/global_step_N")
    kept = root / step_name(step.step)
    if kept.exists():
        shutil.rmtree(kept)
    return fetch(step, root)


def _check(step: RemoteStep, records: Iterable[FileRecord], folder: Path) -> None:
    for problem in check_records(folder, records, deep=True):
        raise DamagedError(f"{step.remote}/{step.folder}/{problem}")


@dataclass(frozen=True)
class Place:
    """What a URL names: a run, a step of it, or a role of a step.

    remote: the run; for a URL that is none of these, the folder itself
    """

    remote: Remote
    step: int | None = None
    role: str = ""


def place_of(url: str) -> Place:
    """Tell by the names in a URL what it names."""
    parts = PurePosixPath(url.partition("://")[2]).parts
    for depth in (1, 2):
        if len(parts) > depth and step_number(Path(parts[-depth])) is not None:
            run, role = url.rsplit("/", depth)[0], parts[-1] if depth == 2 else ""
            return Place(Remote(run), step_number(Path(parts[-depth])), role)
    return Place(Remote(url))


def step_at(place: Place) -> RemoteStep | None:
    """The step that a place names, or its newest one that is whole. None for a folder that is no run.

    Raises NotFoundError where there is no such step, IncompleteError or DamagedError where it, or every one, is not
    whole.
    """
    steps = remote_steps(place.remote)
    if place.step is not None:
        steps = tuple(step for step in steps if step.step == place.step)
        if not steps:
            raise NotFoundError(f"{place.remote} holds no step {place.step}")
    reasons = []
    for step in reversed(steps):
        if step.whole or not (step.own or step.unfinished):
            return step
        reasons.append(step.why)
    if reasons:
        raise DamagedError(f"{place.remote}: no step here is whole ({reasons[0]})")
    return None


@contextlib.contextmanager
def local_copy(
    url: str,
    role: str | None = None,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]] | None = None,
) -> Iterator[Path]:
    """A folder on this machine with the weights that a URL names, which goes when the context ends.

    It lies below the folder for temporary files (TMPDIR names another). Optimizer states that lie in files of their own
    stay where they are. role: the role of a step, by default the one that `locate` would take.
    """
    place = place_of(url)
    step = step_at(place)
    scratch = Path(tempfile.mkdtemp(prefix="milepost-"))
    try:
        source = place.remote if step is None else step.remote.below(step.folder)
        sizes = source.sizes("") if step is None else step.sizes
        if role is not None and not any(name.startswith(f"{role}/") for name in sizes):
            role = None  # a part of a state dict
        files = {name: size for name, size in sizes.items() if _wanted(name, place.role or role, sizes)}
        if not files:
            raise NotFoundError(f"{url}: nothing lies there")
        into = scratch / ("model" if step is None else step.folder)
        with contextlib.nullcontext(None) if progress is None else progress(sum(files.values())) as told:
            download(source, files, into, told)
        if step is not None and step.own:
            _check(step, [record for record in step.manifest.files if record.path in files], into)
        yield into / place.role if place.role else into
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wanted(name: str, role: str | None, sizes: Mapping[str, int]) -> bool:
    """Whether an object is needed to read the weights of a role (None: of actor, or of whatever roles there are)."""
    head, slash, inside = name.partition("/")
    if name == MANIFEST or (slash and PurePosixPath(inside).name.startswith(_OPTIMIZER)):
        return False
    wanted = role or ("actor" if any(other.startswith("actor/") for other in sizes) else None)
    return wanted is None or not slash or head in (wanted, f"{wanted}_huggingface")
