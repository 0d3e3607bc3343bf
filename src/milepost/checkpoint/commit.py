"""The commit of one step: every rank writes, and then the step is there as a whole, or not at all.

    .global_step_{i}.{nonce}.tmp/     rank 0 makes it; every rank writes its files, hashed and flushed
    manifest.json                     rank 0 writes it last, once all ranks have reported their files
    global_step_{i}/                  by one rename; then the parent is flushed, and the tracker moved

A process may be killed, or the power cut, between any two of these: what is left is a temporary folder that no reader
takes for a step and the next start sweeps away. An error on any rank makes all ranks raise and nothing changes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milepost import __version__
from milepost.checkpoint.comm import Communicator, on_rank_0, together
from milepost.checkpoint.files import StepFiles, make_directory, reason, sync_directory, write_durably
from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, digest_file
from milepost.checkpoint.steps import STATE_FILE, TRACKER, read_tracker, step_name
from milepost.engines.base import Engine
from milepost.errors import CallError, IncompleteError, MilepostError, WriteError

_LITTER = re.compile(r"\.(global_step_\d+|latest_checkpointed_iteration)\.[0-9a-f]{8}\.tmp")
_SHARED_FS_SECONDS = 10.0  # how long a network file system may take to show one node what another made
_log = logging.getLogger(__name__)

ExportHF = Callable[[Path, Path], None]
"""Write the weights of a role directory (first) as a Hugging Face model into a new directory (second), durably."""


@dataclass(frozen=True)
class StepRequest:
    """What is to be saved.

    root:      the run's folder
    step:      its number
    roles:     role -> engine
    contents:  what the manifest says was saved
    state:     makes the content of trainer_state.json; called on rank 0
    run_id:    of this run
    export_hf: where the weights are wanted in Hugging Face's form too
    make_way:  called on rank 0 right before the rename: moves aside what does not belong to this history
    """

    root: Path
    step: int
    roles: Mapping[str, Engine]
    contents: tuple[str, ...]
    state: Callable[[], Mapping[str, Any]]
    run_id: str = ""
    export_hf: ExportHF | None = None
    make_way: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed step: its folder, and the bytes of all its files."""

    path: Path
    nbytes: int


def agree(comm: Communicator, root: Path, **what: Any) -> None:
    """Raise on every rank, before anything is written, unless all were given the same root and the same `what`."""
    views = comm.all_gather((os.path.abspath(root), what))  # noqa: PTH100  resolve() would follow links
    for rank, (folder, other) in enumerate(views):
        if folder != views[0][0]:
            raise CallError(
                f"the ranks were given different folders: rank 0 {views[0][0]}, rank {rank} {folder}; "
                "all must save to the same one"
            )
        for name, value in other.items():
            if value != views[0][1][name]:
                raise CallError(f"the ranks disagree about {name}: rank 0 {views[0][1][name]}, rank {rank} {value}")


def write_step(request: StepRequest, comm: Communicator) -> SavedStep:
    """Save one step; all ranks call it together, with requests that `agree`.

    Raises on every rank, and leaves everything as it was, where any rank fails: WriteError where a disk refuses.
    """
    final = request.root / step_name(request.step)
    tmp: Path | None = None
    try:
        tmp = on_rank_0(comm, lambda: _make_temporary(request))
        together(comm, lambda: _await(tmp, comm.rank))
        records: list[FileRecord] = []
        for role, engine in request.roles.items():
            # Gathered after each role: no rank enters a role's collectives without all others.
            for written in together(comm, partial(_write_role, tmp, role, engine)):
                records += written
        return on_rank_0(comm, lambda: _commit(request, tmp, final, records, comm.world_size))
    except MilepostError as error:
        if comm.rank == 0 and tmp is not None:
            _remove(tmp)
        comm.barrier()
        # The temporary folder is gone: the reader knows the file by the place that it was meant for.
        sentence = str(error).replace(str(tmp), str(final))
        raise type(error)(f"step {request.step} was not saved: {sentence}") from error
    except BaseException:
        if comm.rank == 0 and tmp is not None:
            _remove(tmp)
        raise


def _make_temporary(request: StepRequest) -> Path:
    tmp = request.root / f".{step_name(request.step)}.{secrets.token_hex(4)}.tmp"
    try:
        make_directory(request.root)
        for directory in (tmp, *(tmp / role for role in request.roles)):
            directory.mkdir()
    except OSError as error:
        if tmp.exists():
            _remove(tmp)
        raise WriteError(f"{request.root}: {reason(error)}") from error
    return tmp


def _await(path: Path, rank: int, size: int | None = None) -> None:
    """Wait until this node sees what another made, with its size."""
    deadline = time.monotonic() + _SHARED_FS_SECONDS
    while True:
        try:
            found = path.stat().st_size
            if size is None or found == size:
                return
            seen = f"sees {found} instead of {size} bytes of"
        except OSError:
            seen = "does not see"
        if time.monotonic() > deadline:
            raise IncompleteError(
                f"rank {rank} {seen} {path}, which another rank wrote: the folder is not on a file system that all "
                "nodes share"
            )
        time.sleep(0.05)


def _write_role(tmp: Path, role: str, engine: Engine) -> list[FileRecord]:
    files = StepFiles(tmp / role, tmp)
    try:
        engine.save(files)
    except MilepostError:
        raise
    except OSError as error:
        raise WriteError(f"{tmp / role}: {reason(error)}") from error
    except Exception as error:
        raise files.failure or MilepostError(f"{tmp / role}: {type(error).__name__}: {error}") from error
    return files.records


def _commit(request: StepRequest, tmp: Path, final: Path, records: list[FileRecord], world_size: int) -> SavedStep:
    """Rank 0's part, after all ranks have written."""
    for record in records:
        _await(tmp / record.path, 0, record.size)
    if request.export_hf is not None:
        for role in request.roles:
            records = _export(request.export_hf, tmp, role, records)
    try:
        files = StepFiles(tmp, tmp)
        with files.create(STATE_FILE) as file:
            file.write(json.dumps(request.state(), indent=1).encode() + b"\n")
        manifest = _manifest(request, [*records, *files.records], world_size)
        write_durably(tmp / MANIFEST, manifest.to_json().encode())
        for directory, _, _ in os.walk(tmp):
            sync_directory(Path(directory))
        tracker = _prepare_tracker(request)
        try:
            request.make_way()
            tmp.rename(final)
            sync_directory(request.root)
        except BaseException:
            tracker.unlink()
            raise
    except OSError as error:
        raise WriteError(f"{error.filename or final}: {reason(error)}") from error
    _move_tracker(request, tracker)
    return SavedStep(final, manifest.nbytes)


def _manifest(request: StepRequest, records: Sequence[FileRecord], world_size: int) -> Manifest:

    paths = [record.path for record in records]
    twice = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else set()
    if twice:
        raise CallError(f"{min(twice)} was written by more than one rank")
    return Manifest(
        step=request.step,
        world_size=world_size,
        roles={role: engine.layout for role, engine in request.roles.items()},
        contents=request.contents,
        files=tuple(sorted(records, key=lambda record: record.path)),
        created=time.time(),
        version=__version__,
        run_id=request.run_id,
    )


def _export(export_hf: ExportHF, tmp: Path, role: str, records: list[FileRecord]) -> list[FileRecord]:
    """Put the weights in Hugging Face's form over the companions that the engine left in `huggingface/`."""
    target = tmp / role / "huggingface"
    fresh = tmp / role / ".export"
    export_hf(tmp / role, fresh)
    target.mkdir(exist_ok=True)
    exported = []
    for path in sorted(fresh.iterdir()):
        place = path.replace(target / path.name)
        exported.append(FileRecord(place.relative_to(tmp).as_posix(), place.stat().st_size, digest_file(place)))
    fresh.rmdir()
    replaced = {record.path for record in exported}
    return [*(record for record in records if record.path not in replaced), *exported]


def _prepare_tracker(request: StepRequest) -> Path:
    """Write the new tracker beside the old one, before the step appears: no full disk can come between the two."""
    path = request.root / f".{Path(TRACKER).stem}.{secrets.token_hex(4)}.tmp"
    try:
        write_durably(path, str(request.step).encode())
    except OSError as error:
        raise WriteError(f"{request.root / TRACKER}: {reason(error)}") from error
    return path


def _move_tracker(request: StepRequest, prepared: Path) -> None:
    """Name the new step in the tracker, unless a newer step that is still there has the name.

    The step is committed whatever happens here: readers go by the steps, and this file is for people and other tools.
    """
    try:
        named = read_tracker(request.root)
        if named is not None and named > request.step and (request.root / step_name(named)).exists():
            prepared.unlink()
            return
        prepared.replace(request.root / TRACKER)
        sync_directory(request.root)
    except OSError as error:
        _log.warning("%s still names an older step: %s", request.root / TRACKER, error.strerror)


def sweep(root: Path) -> list[str]:
    """Remove what killed saves of earlier processes left in `root`; the names of what went."""
    try:
        with os.scandir(root) as entries:
            litter = [entry.name for entry in entries if _LITTER.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in litter:
        _remove(root / name)
    return sorted(litter)


def delete_step(step_dir: Path) -> None:
    """Delete a step. By a rename it first stops being one, so that a kill in between leaves litter and no half step."""
    litter = step_dir.with_name(f".{step_dir.name}.{secrets.token_hex(4)}.tmp")
    try:
        step_dir.rename(litter)
    except OSError as error:
        _log.warning("%s was not deleted: %s", step_dir, error.strerror)
        return
    _remove(litter)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s was left behind and may be deleted: %s", path, error.strerror)
