"""From a URL to this machine: a step's files by ranges that are read side by side, checked against its manifest."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock

from milepost.checkpoint.files import make_directory, move_aside, sync_directory, write_durably
from milepost.checkpoint.litter import delete_step, sweep, temporary_path
from milepost.checkpoint.manifest import MANIFEST, FileRecord
from milepost.checkpoint.remote.folder import PART, Remote, side_by_side
from milepost.checkpoint.remote.steps import RemoteStep, newest_whole, remote_steps, same_step
from milepost.checkpoint.steps import judge, newest_good, step_name, step_number
from milepost.checkpoint.tracker import mend_tracker
from milepost.errors import CheckpointError, DamagedError, NotFoundError, WriteError
from milepost.fileio import write_exactly
from milepost.jobs.checksums import check_records
from milepost.jobs.output import sync
from milepost.transfer.execute import Progress
from milepost.wording import disk_error, duration, file_size

_WORKERS = 8
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
    counting = Lock()
    try:
        for name, size in files.items():
            target = into / name
            make_directory(target.parent)
            with target.open("xb") as file:
                file.truncate(size)
            ranges += [_Range(name, target, at, min(at + PART, size)) for at in range(0, size, PART)]

        def bring_one(one: _Range) -> None:
            data = remote.read(one.name, one.start, one.end)
            with one.target.open("r+b", buffering=0) as file:
                write_exactly(file.fileno(), memoryview(data), one.start)
            if progress is not None:
                with counting:
                    progress(len(data))

        side_by_side(ranges, bring_one, _WORKERS)
    except OSError as error:
        raise WriteError(f"{error.filename or into}: {disk_error(error)}") from error


def fetch(step: RemoteStep, root: Path) -> Path:
    """Bring a step into a run's folder, where it appears whole or not at all; returns its folder.

    Raises DamagedError where a file is not what the manifest says, WriteError where the disk refuses, or has no room.
    """
    final = root / step_name(step.step)
    tmp = temporary_path(final)
    begun = time.monotonic()
    make_directory(root)
    try:
        tmp.mkdir()
        manifest = step.manifest
        _require_room(tmp, manifest.nbytes)
        bring(step, manifest.files, tmp)
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
    newest = newest_good(root, roles, run_id=run_id)
    here = newest.good
    bad_here = {state.step: state.why for state in newest.skipped}
    notes: list[str] = []
    bad: list[int] = []
    while True:
        found, passed_over = newest_whole(remote, roles, run_id=run_id, without=bad, up_to=up_to)
        newer = [f"passed over {step.why}" for step in passed_over if here is None or step.step > here.step]
        notes += [note for note in newer if note not in notes]
        if found is None:
            return notes
        if here is not None and found.step <= here.step:
            if found.step == here.step and not same_step(here.path, found):
                notes.append(
                    f"{here.path} is another step than {remote}/{found.folder}: the run goes on from the one here, and "
                    "the other is moved aside there before this one is uploaded"
                )
            return notes
        try:
            fetch(found, root)
        except (CheckpointError, NotFoundError) as error:
            bad.append(found.step)
            notes.append(f"passed over step {found.step} of {remote}: {error}")
        else:
            if found.step in bad_here:
                notes.append(f"step {found.step} here was moved aside: {bad_here[found.step]}")
            return [*notes, f"step {found.step} was fetched from {remote}"]


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
    sweep(root)
    kept = root / step_name(step.step)
    if kept.exists():
        delete_step(kept)
    return fetch(step, root)


def bring(step: RemoteStep, records: Iterable[FileRecord], into: Path, progress: Progress | None = None) -> None:
    """Bring files of a step into a folder, and compare what arrived with the manifest: what differs is asked for once
    more, since it may have been altered on the way. DamagedError where it differs again."""
    source = step.remote.below(step.folder)
    wanted = {record.path: record for record in records}
    download(source, {path: record.size for path, record in wanted.items()}, into, progress)
    altered = [problem.path for problem in check_records(into, wanted.values(), deep=True)]
    if not altered:
        return
    for path in altered:
        (into / path).unlink()
    download(source, {path: wanted[path].size for path in altered}, into)
    for problem in check_records(into, [wanted[path] for path in altered], deep=True):
        raise DamagedError(f"{source}/{problem}")


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise WriteError(f"{folder}: {file_size(nbytes)} are needed there, and {file_size(free)} are free: make room")


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
