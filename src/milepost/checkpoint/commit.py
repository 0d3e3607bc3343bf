"""The commit of one step: every rank writes, and then the step is there as a whole, or not at all.

    .global_step_{i}.{nonce}.tmp/     rank 0 makes it; every rank writes its files, hashed and flushed
    manifest.json                     rank 0 writes it last, once all ranks have reported their files
    global_step_{i}/                  by one rename; then the parent is flushed, and the tracker moved

A process may be killed, or the power cut, between any two of these: what is left is a temporary folder that no reader
takes for a step and the next start sweeps away. An error on any rank makes all ranks raise and nothing changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from milepost import __version__
from milepost.checkpoint.comm import Communicator, on_rank_0, together
from milepost.checkpoint.deadline import Deadline, in_time
from milepost.checkpoint.files import StepFiles, make_directory, sync_directory, write_durably
from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, digest_file
from milepost.checkpoint.saving.staged_file import Staging, reason
from milepost.checkpoint.steps import STATE_FILE, TRACKER, read_tracker, step_name
from milepost.engines.base import Engine
from milepost.errors import CallError, IncompleteError, LostRankError, MilepostError, WriteError

_LITTER = re.compile(r"\.(global_steps?_\d+|latest_checkpointed_iteration)\.[0-9a-f]{8}\.tmp")
_SHARED_FS_SECONDS = 10.0  # how long a network file system may take to show one node what another made
_PARTING = 3.0  # seconds for which threads that still write, and then the removal of what they wrote, are waited for
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
    """A committed step.

    path:     its folder
    nbytes:   bytes of all its files
    stall:    seconds for which rank 0's training stood still
    seconds:  from the call to the moment when all was durable
    """

    step: int
    path: Path
    nbytes: int
    stall: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class TakenStep:
    """A step whose state is taken: what training does from here on cannot change it.

    tmp, final:  where its files are written, and where they will be
    files:       this rank's
    state:       the content of trainer_state.json
    nbytes:      bytes of all ranks' files, those that another program wrote left out
    """

    request: StepRequest
    tmp: Path
    final: Path
    staging: Staging
    files: tuple[StepFiles, ...]
    state: bytes
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


def take_step(request: StepRequest, comm: Communicator, staging: Staging) -> TakenStep:
    """Take the state of all roles, so that training may go on; all ranks call it together, with requests that `agree`.

    Raises on every rank, and leaves everything as it was, where any rank fails: WriteError where a disk refuses.
    """
    final = request.root / step_name(request.step)
    with _or_nothing(request.step, comm, staging, final):
        tmp, state = on_rank_0(comm, lambda: _begin(request, staging.deadline))
    taken: list[StepFiles] = []

    def take(role: str, engine: Engine) -> int:
        taken.append(_take_role(tmp, role, engine, staging))
        if len(taken) == len(request.roles):
            staging.copies.wait()
        return taken[-1].nbytes

    with _or_nothing(request.step, comm, staging, final, tmp):
        together(comm, lambda: staging.deadline.within(tmp, lambda: _await(tmp, comm.rank)))
        # Gathered after each role: no rank enters a role's collectives without all others.
        nbytes = sum(sum(together(comm, partial(take, role, engine))) for role, engine in request.roles.items())
    return TakenStep(request, tmp, final, staging, tuple(taken), state, nbytes)


def finish_step(taken: TakenStep, comm: Communicator) -> SavedStep:
    """Bring a step to the disk and commit it; all ranks call it together. Raises as `take_step` does."""
    request, tmp, final = taken.request, taken.tmp, taken.final
    word = _LastWord()
    with _or_nothing(request.step, comm, taken.staging, final, tmp, word):
        together(comm, taken.staging.wait)
        records = [record for of_one in comm.all_gather(_records(taken)) for record in of_one]
        commit = partial(_commit, taken, records, comm.world_size, word)
        return on_rank_0(comm, lambda: taken.staging.deadline.within(final, commit))


class _LastWord:
    """Whether a step gets its name. The thread that commits may be slow or hang, and who waits for it may have to leave
    or give up: only one of the two has its way."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._naming = False
        self._refused = False
        self._taken_back = False

    def name(self) -> bool:
        """Asked right before the step gets its name; from then on its files are not to be touched."""
        with self._lock:
            self._naming = not self._refused
            return self._naming

    def refuse(self) -> bool:
        """Give the step up. False: it is just getting its name, and stays."""
        with self._lock:
            self._refused = not self._naming
            return self._refused

    def take_back(self) -> bool:
        """Give the step up, though it may be getting its name: then that will be taken from it again. False in that
        case."""
        with self._lock:
            self._refused, self._taken_back = not self._naming, self._naming
            return self._refused

    def no_name(self) -> bool:
        """The step did not get its name, or lost it again. Whether who waited has left its files to be removed here."""
        with self._lock:
            self._naming = False
            return self._taken_back

    def keeps(self) -> bool:
        """Asked once the step has its name: whether it keeps it."""
        with self._lock:
            return not self._taken_back


@contextlib.contextmanager
def _or_nothing(
    step: int,
    comm: Communicator,
    staging: Staging,
    final: Path,
    tmp: Path | None = None,
    word: _LastWord | None = None,
) -> Iterator[None]:
    """Where anything goes wrong in this context, on any rank, nothing of the step stays."""
    word = word or _LastWord()

    def parting() -> float:
        return 0.1 if staging.deadline.missed else _PARTING

    def remove() -> None:
        if comm.rank == 0 and tmp is not None and not in_time(parting(), lambda: _remove(tmp)):
            _log.warning("%s was left behind, since the file system does not answer; the next start removes it", tmp)

    try:
        yield
    except LostRankError as error:  # with whom nobody can meet again
        staging.crew.abandon(parting())
        if word.refuse():
            remove()
        raise _not_saved(step, error, tmp, final) from error
    except MilepostError as error:
        staging.crew.abandon(parting())
        comm.barrier()  # from here on nobody writes into it
        if word.take_back():
            remove()
        comm.barrier()
        raise _not_saved(step, error, tmp, final) from error
    except BaseException:  # leaving in a hurry: a step that is just getting its name is whole, and stays
        staging.crew.abandon(parting())
        if word.refuse():
            remove()
        raise


def _not_saved(step: int, error: MilepostError, tmp: Path | None, final: Path) -> MilepostError:
    """The temporary folder is gone: the reader knows the file by the place that it was meant for."""
    return type(error)(f"step {step} was not saved: {str(error).replace(str(tmp), str(final))}")


def _records(taken: TakenStep) -> list[FileRecord]:
    return [record for files in taken.files for record in files.records]


def _begin(request: StepRequest, deadline: Deadline) -> tuple[Path, bytes]:
    """On rank 0: the temporary folder, and the content of trainer_state.json."""
    state = json.dumps(request.state(), indent=1).encode() + b"\n"
    return deadline.within(request.root, lambda: _make_temporary(request)), state


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


def _take_role(tmp: Path, role: str, engine: Engine, staging: Staging) -> StepFiles:
    files = StepFiles(tmp / role, tmp, staging)
    try:
        engine.save(files)
    except MilepostError:
        raise
    except OSError as error:
        raise WriteError(f"{tmp / role}: {reason(error)}") from error
    except Exception as error:
        raise files.failure or MilepostError(f"{tmp / role}: {type(error).__name__}: {error}") from error
    return files


def _commit(taken: TakenStep, records: list[FileRecord], world_size: int, word: _LastWord) -> SavedStep:
    """Rank 0's part, after all ranks have written."""
    request, tmp, final = taken.request, taken.tmp, taken.final
    for record in records:
        _await(tmp / record.path, 0, record.size)
    if request.export_hf is not None:
        for role in request.roles:
            records = _export(request.export_hf, tmp, role, records)
    try:
        files = StepFiles(tmp, tmp)
        with files.create(STATE_FILE) as file:
            file.write(taken.state)
        manifest = _manifest(request, [*records, *files.records], world_size)
        write_durably(tmp / MANIFEST, manifest.to_json().encode())
        for directory, _, _ in os.walk(tmp):
            sync_directory(Path(directory))
        tracker = _prepare_tracker(request.root, request.step)
        try:
            taken.staging.deadline.check(final)
            request.make_way()
            if not word.name():
                raise taken.staging.deadline.miss(final)
            tmp.rename(final)
            _hold(tmp, final)
            if not word.keeps():  # all ranks were told that it was not saved
                final.rename(tmp)
                raise taken.staging.deadline.miss(final)
        except BaseException:
            tracker.unlink()
            if word.no_name():
                _remove(tmp)
            raise
    except OSError as error:
        raise WriteError(f"{error.filename or final}: {reason(error)}") from error
    _move_tracker(request.root, request.step, tracker)
    return SavedStep(request.step, final, manifest.nbytes)


def _hold(tmp: Path, final: Path) -> None:
    """Flush the name that a step just got. Where the disk refuses, it is taken back: nobody has heard of the step."""
    try:
        sync_directory(final.parent)
    except OSError:
        final.rename(tmp)
        raise


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


def _prepare_tracker(root: Path, step: int) -> Path:
    """Write the new tracker beside the old one, before the step appears: no full disk can come between the two."""
    path = root / f".{Path(TRACKER).stem}.{secrets.token_hex(4)}.tmp"
    try:
        write_durably(path, str(step).encode())
    except OSError as error:
        raise WriteError(f"{root / TRACKER}: {reason(error)}") from error
    return path


def _move_tracker(root: Path, step: int, prepared: Path) -> None:
    """Name the new step in the tracker, unless a newer step that is still there has the name.

    The step is committed whatever happens here: readers go by the steps, and this file is for people and other tools.
    """
    try:
        named = read_tracker(root)
        if named is not None and named > step and (root / step_name(named)).exists():
            prepared.unlink()
            return
        prepared.replace(root / TRACKER)
        sync_directory(root)
    except OSError as error:
        _log.warning("%s still names an older step: %s", root / TRACKER, error.strerror)


def mend_tracker(root: Path, step: int) -> None:
    """Let the tracker name a committed step where it names an older one, or none: its saver was stopped right between
    the two."""
    named = read_tracker(root)
    if named is not None and named >= step:
        return
    try:
        _move_tracker(root, step, _prepare_tracker(root, step))
    except WriteError as error:
        _log.warning("%s still names an older step than %s: %s", root / TRACKER, step, error)


def litter(root: Path) -> list[str]:
    """The names of what killed saves have left in `root`. A save that is on its way has such a name too."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _LITTER.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def sweep(root: Path, names: Iterable[str] | None = None) -> list[str]:
    """Remove what killed saves of earlier processes left in `root`, or only these `names` of it; what went."""
    return [name for name in (litter(root) if names is None else names) if _take_away(root / name)]


def delete_step(step_dir: Path) -> None:
    """Delete a step. By a rename it first stops being one, so that a kill in between leaves litter and no half step."""
    _take_away(step_dir)


def _take_away(path: Path) -> bool:
    """Remove a step or what was to become one. It first loses its name, at once or not at all: another job may be about
    to commit it in this very moment. False where it is still there."""
    litter = path.with_name(f".{path.name.removeprefix('.').partition('.')[0]}.{secrets.token_hex(4)}.tmp")
    try:
        path.rename(litter)
        sync_directory(path.parent)  # or a power cut could bring back the name, and a part of the files
    except OSError as error:
        _log.warning("%s was not deleted: %s", path, error.strerror)
        return False
    _remove(litter)
    return True


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s was left behind and may be deleted: %s", path, error.strerror)
