"""The commit of one step: every rank writes, and then the step is there as a whole, or not at all.

    .global_step_{i}.{nonce}.tmp/     rank 0 makes it; every rank writes its files, hashed and flushed
    manifest.json                     rank 0 writes it last, once all ranks have reported their files
    global_step_{i}/                  by one rename; then the parent is flushed, and the tracker moved

A process may be killed, or the power cut, between any two of these: what is left is a temporary folder that no reader
takes for a step and the next start sweeps away. An error on any rank makes all ranks raise and nothing changes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milepost import __version__
from milepost.checkpoint.comm import Communicator, on_rank_0, together
from milepost.checkpoint.deadline import Deadline, in_time
from milepost.checkpoint.files import StepFiles, make_directory, sync_directory, write_durably
from milepost.checkpoint.last_word import LastWord
from milepost.checkpoint.litter import remove, temporary_path
from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, digest_file
from milepost.checkpoint.saving.staged_file import Staging, reason
from milepost.checkpoint.shared import await_seen
from milepost.checkpoint.steps import STATE_FILE, TRACKER, step_name
from milepost.checkpoint.tracker import move_tracker, prepare_tracker
from milepost.engines.base import Engine
from milepost.errors import CallError, LostRankError, MilepostError, WriteError

_PARTING = 3.0  # seconds for which threads that still write, and then the removal of what they wrote, are waited for
_AT_LEAST = 1.0  # seconds for the tracker, where no time is left
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of a rename to a name that something has
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


@dataclass
class _Progress:
    """How far the thread that commits a step has come; who waits for it looks at this.

    exporting:  the role whose weights are being written in Hugging Face's form
    saved:      the step, and the tracker that is to name it; there right before it is committed for good
    """

    exporting: str | None = None
    saved: tuple[SavedStep, Path] | None = None


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

    def see() -> None:
        await_seen(tmp, comm.rank, alone=comm.rank == 0, left=staging.deadline.left())

    with _or_nothing(request.step, comm, staging, final, tmp):
        together(comm, lambda: staging.deadline.within(tmp, see))
        # Gathered after each role: no rank enters a role's collectives without all others.
        nbytes = sum(sum(together(comm, partial(take, role, engine))) for role, engine in request.roles.items())
    return TakenStep(request, tmp, final, staging, tuple(taken), state, nbytes)


def finish_step(
    taken: TakenStep, comm: Communicator, committed: Callable[[SavedStep], None] = lambda saved: None
) -> SavedStep:
    """Bring a step to the disk and commit it; all ranks call it together. Raises as `take_step` does.

    committed:  called on rank 0 once the step is committed, before the others hear of it: from then on it is there,
        also where this raises LostRankError since one of them never hears
    """
    request, tmp, final = taken.request, taken.tmp, taken.final
    word = LastWord()

    def commit() -> SavedStep:
        saved = _commit_in_time(taken, records, comm.world_size, word)
        committed(saved)
        return saved

    with _or_nothing(request.step, comm, taken.staging, final, tmp, word):
        together(comm, taken.staging.wait)
        word.elsewhere = comm.rank > 0
        records = [record for of_one in comm.all_gather(_records(taken)) for record in of_one]
        return on_rank_0(comm, commit)


@contextlib.contextmanager
def _or_nothing(
    step: int,
    comm: Communicator,
    staging: Staging,
    final: Path,
    tmp: Path | None = None,
    word: LastWord | None = None,
) -> Iterator[None]:
    """Where anything goes wrong in this context, on any rank, nothing of the step stays."""
    word = word or LastWord()

    def parting() -> float:
        return 0.1 if staging.deadline.missed else _PARTING

    def remove_files() -> None:
        if comm.rank == 0 and tmp is not None and not in_time(parting(), lambda: remove(tmp)):
            _log.warning("%s was left behind, since the file system does not answer; the next start removes it", tmp)

    try:
        yield
    except LostRankError as error:  # with whom nobody can meet again
        staging.crew.abandon(parting())
        if word.refuse():
            remove_files()
        raise (_perhaps_saved(step, error, word) or _not_saved(step, error, tmp, final)) from error
    except MilepostError as error:
        staging.crew.abandon(parting())
        comm.barrier()  # from here on nobody writes into it
        if word.take_back():
            remove_files()
        comm.barrier()
        raise _not_saved(step, error, tmp, final) from error
    except BaseException:  # leaving in a hurry: a step that is just getting its name is whole, and stays
        staging.crew.abandon(parting())
        if word.refuse():
            remove_files()
        raise


def _not_saved(step: int, error: MilepostError, tmp: Path | None, final: Path) -> MilepostError:
    """The temporary folder is gone: the reader knows the file by the place that it was meant for."""
    return type(error)(f"step {step} was not saved: {str(error).replace(str(tmp), str(final))}")


def _perhaps_saved(step: int, error: LostRankError, word: LastWord) -> LostRankError | None:
    """Where another rank was lost so late that the step is committed, or may be."""
    if word.kept:
        return LostRankError(f"step {step} is saved, but {error}")
    if word.elsewhere:
        return LostRankError(f"whether step {step} was saved the next start will tell: {error}")
    return None


def _records(taken: TakenStep) -> list[FileRecord]:
    return [record for files in taken.files for record in files.records]


def _begin(request: StepRequest, deadline: Deadline) -> tuple[Path, bytes]:
    """On rank 0: the temporary folder, and the content of trainer_state.json."""
    state = json.dumps(request.state(), indent=1).encode() + b"\n"
    return deadline.within(request.root, lambda: _make_temporary(request), late=remove), state


def _make_temporary(request: StepRequest) -> Path:
    tmp = temporary_path(request.root / step_name(request.step))
    try:
        make_directory(request.root)
        for directory in (tmp, *(tmp / role for role in request.roles)):
            directory.mkdir()
    except OSError as error:
        if tmp.exists():
            remove(tmp)
        raise WriteError(f"{request.root}: {reason(error)}") from error
    return tmp


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


def _commit_in_time(taken: TakenStep, records: list[FileRecord], world_size: int, word: LastWord) -> SavedStep:
    """Rank 0's part, after all ranks have written. Raises WriteError where a disk refuses or the time is over."""
    root, deadline = taken.request.root, taken.staging.deadline
    progress = _Progress()
    try:
        deadline.within(taken.final, lambda: _commit(taken, records, world_size, word, progress))
    except WriteError as error:
        word.take_back()
        if not word.kept:  # else it was committed in this very moment
            late = _too_slow(taken, deadline, progress)
            if late is None:
                raise
            raise late from error
    assert progress.saved is not None
    saved, tracker = progress.saved
    left = deadline.left()
    patience = None if left is None else max(left, _AT_LEAST)
    if not in_time(patience, lambda: move_tracker(root, saved.step, tracker)):
        _log.warning("%s still names an older step: the file system does not answer", root / TRACKER)
    return saved


def _too_slow(taken: TakenStep, deadline: Deadline, progress: _Progress) -> WriteError | None:
    """Where it was no file system that took too long: what did."""
    if progress.exporting is None:
        return None
    return deadline.miss(
        taken.tmp / progress.exporting,
        "its weights were not written in Hugging Face's form",
        "allow for more, or save without hf_model and merge the steps that you want",
    )


def _commit(taken: TakenStep, records: list[FileRecord], world_size: int, word: LastWord, progress: _Progress) -> None:
    request, tmp, final, deadline = taken.request, taken.tmp, taken.final, taken.staging.deadline
    tracker: Path | None = None
    try:
        for record in records:
            await_seen(tmp / record.path, 0, record.size, alone=world_size == 1, left=deadline.left())
        if request.export_hf is not None:
            for role in request.roles:
                progress.exporting = role
                records = _export(request.export_hf, tmp, role, records)
            progress.exporting = None
        files = StepFiles(tmp, tmp)
        with files.create(STATE_FILE) as file:
            file.write(taken.state)
        manifest = _manifest(request, [*records, *files.records], world_size)
        write_durably(tmp / MANIFEST, manifest.to_json().encode())
        for directory, _, _ in os.walk(tmp):
            sync_directory(Path(directory))
        tracker = prepare_tracker(request.root, request.step)
        deadline.check(final)
        request.make_way()
        if not word.name():
            raise deadline.miss(final)
        _name(tmp, final)
        _hold(tmp, final)
        progress.saved = SavedStep(request.step, final, manifest.nbytes), tracker
        if not word.keep():  # all ranks were told that it was not saved
            final.rename(tmp)
            raise deadline.miss(final)
    except BaseException as error:
        progress.exporting = None
        if tracker is not None:
            remove(tracker)
        if word.no_name():
            remove(tmp)
        if isinstance(error, OSError):
            raise WriteError(f"{error.filename or final}: {reason(error)}") from error
        raise


def _name(tmp: Path, final: Path) -> None:
    """Give a step its name."""
    try:
        tmp.rename(final)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        raise WriteError(
            f"{final} is there already: a save of this step that was given up hangs in the file system and still has "
            "that name, or another program made it; wait for the file system, or move the folder away"
        ) from error


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
