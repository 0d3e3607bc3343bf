"""The record of a run: what a training loop calls to save its steps and to go on after it was stopped.

    manager = CheckpointManager(root, {"actor": actor, "critic": critic}, parts={"data": sampler}, keep_last=3)
    step = manager.resume()              # None where there is nothing to resume
    print("\\n".join(manager.report.lines()))
    for step in range(manager.report.next_step, last + 1):
        ...
        manager.save(step, metrics)
    manager.close()

All ranks make the same calls. Whatever fails on one rank is raised on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from milepost.checkpoint.comm import Communicator, agree, default_communicator, on_rank_0, on_rank_0_at_length
from milepost.checkpoint.commit import SavedStep
from milepost.checkpoint.contents import CONTENTS, check_contents, export_hf
from milepost.checkpoint.diary.events import EventLog, plain_json, see_kill
from milepost.checkpoint.litter import sweep
from milepost.checkpoint.loading import Loader, Opened, Stateful
from milepost.checkpoint.manifest import HF_MODEL, MANIFEST, read_manifest
from milepost.checkpoint.pruning import nobody_reads
from milepost.checkpoint.pruning_in_time import PruningInTime
from milepost.checkpoint.remote.fetching import fetch_named
from milepost.checkpoint.remote.folder import Remote, url_of
from milepost.checkpoint.remote.mirror import Mirror
from milepost.checkpoint.resume import Part, ResumeReport, Start, choose_start
from milepost.checkpoint.retention import Retention
from milepost.checkpoint.saving.saver import PATIENCE, Saver, Saving
from milepost.checkpoint.steps import StepDir
from milepost.checkpoint.tracker import mend_tracker
from milepost.engines.base import Engine
from milepost.errors import (
    CallError,
    CheckpointError,
    DamagedError,
    IncompleteError,
    LostRankError,
    MilepostError,
    UploadError,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
STATE_FORMAT = 1
_BEAT = 1.0  # seconds
FETCHED = "fetched"  # folder of a run for a step that was named by its URL
Parts = Callable[[Path | None, int | None], Sequence[Part]]
"""From a step's folder (None: a fresh start) and the number of ranks that saved it to what is restored of it."""


class CheckpointManager:
    """Saves and resumes the steps of one run.

    Args:
        root: the run's folder, on a file system that all ranks share.
        roles: role -> its engine; the same on all ranks, in the same order.
        parts: name -> other state; rank 0's is saved, and every rank gets the same back.
        keep_last: how many committed steps stay, None for all. Steps of other programs are never deleted.
        retention: more of what stays than `keep_last` can say; in its place.
        comm: how ranks talk; by default torch.distributed where it is initialised.
        events: the run's diary; only rank 0 writes to it.
        fingerprint: config key -> value; a resume says which have changed.
        save_contents, load_contents: of model, optimizer, extra, which go together; and hf_model, to save the weights
            in Hugging Face's form too.
        run_id: the same for all restarts of one run.
        attempt: how many restarts came before.
        save_timeout: seconds after which a save is given up on all ranks, whatever the file system still does.
        staging_limit: most bytes of memory, of each rank, for saves that do not block; what is beyond them is written
            while training waits. None: as many as the rank's state has. All of it is used again by the next save.
        remote: a URL (s3://bucket/run) to which every durable step is uploaded behind training's back, and from which
            a start takes the newest whole step where it is newer than what lies in `root`.
    """

    def __init__(
        self,
        root: Path | str,
        roles: Mapping[str, Engine],
        *,
        parts: Mapping[str, Stateful] | None = None,
        keep_last: int | None = None,
        retention: Retention | None = None,
        comm: Communicator | None = None,
        events: EventLog | None = None,
        fingerprint: Mapping[str, str] | None = None,
        save_contents: Sequence[str] = CONTENTS,
        load_contents: Sequence[str] = CONTENTS,
        run_id: str = "",
        attempt: int = 0,
        staging_limit: int | None = None,
        save_timeout: float = PATIENCE,
        remote: str | None = None,
    ) -> None:
        if not roles:
            raise CallError("a checkpoint needs at least one role")
        self._root = Path(root)
        self._roles = dict(roles)
        self._parts = dict(parts or {})
        self._retention = Retention(keep_last=keep_last) if retention is None else retention
        self._owns_comm = comm is None
        # Ranks wait for one another longer than for their files, so that it is told which file it was.
        self._comm = default_communicator(3 * save_timeout) if comm is None else comm
        self._events = events if self._comm.rank == 0 else None
        self._fingerprint = dict(fingerprint or {})
        self._notes = [
            *check_contents("save_contents", save_contents),
            *check_contents("load_contents", load_contents),
        ]
        self._run_id = run_id
        self._attempt = attempt
        self._pruning = PruningInTime(self._root, self._retention, save_timeout)
        self._remote = remote
        self._mirror: Mirror | None = None
        self._report: ResumeReport | None = None
        self._loader = Loader(self._comm, self._roles, self._parts, self._fingerprint)
        self._saver = Saver(
            self._root,
            self._roles,
            self._comm,
            self._events,
            Saving(
                contents=(*CONTENTS, HF_MODEL) if HF_MODEL in save_contents else CONTENTS,
                run_id=run_id,
                export_hf=export_hf if HF_MODEL in save_contents else None,
                staging_limit=staging_limit,
                patience=save_timeout,
                after_durable=self._after_durable,
                make_way=self._make_way,
            ),
        )
        self._closed = False

    @property
    def report(self) -> ResumeReport:
        """What the start restored; there once `resume` has been called."""
        if self._report is None:
            raise CallError("the report is there once resume() has been called")
        return self._report

    def resume(self, mode: str = "auto", path: Path | None = None) -> int | None:
        """Restore the training state; returns its step, or None where training begins afresh. See `choose_start`.

        Everything is found to be whole and fitting before the first byte is loaded. In mode "auto" a step that turns
        out to be bad, then or while it is loaded, is passed over for the next older one. Raises CheckpointError or
        CallError on all ranks.
        """
        path, entered = self._enter(mode, path)
        start, opened, parts, notes = self._load(mode, path)
        saved_world_size = next((index.world_size for index in opened.indexes.values()), None)
        self._begin(mode, start, parts, entered, [*notes, *self._notes], saved_world_size)
        return start.step

    def choose(self, mode: str, path: Path | None, parts: Parts) -> Path | None:
        """Choose the step to go on from as `resume` does, and load nothing: for a trainer that loads a step by itself.

        parts: what it will restore, for the report; it may refuse the step. Returns the step's folder, or None for a
        fresh start.
        """
        path, entered = self._enter(mode, path)
        start = on_rank_0(self._comm, lambda: self._choose(mode, path, {}))
        saved_world_size = on_rank_0(self._comm, lambda: _saved_world_size(start.folder))
        self._begin(mode, start, parts(start.folder, saved_world_size), entered, [], saved_world_size)
        return start.folder

    def save(self, step: int, metrics: Mapping[str, float] | None = None, *, blocking: bool = True) -> Path:
        """Save the whole training state as this step; returns its folder. All ranks call it.

        blocking:  return once the step is durable. Else return once its state is taken, which no training can change
            any more; the step appears in its folder as soon as it is durable, and the next save waits for it.

        A step that was saved already, or resumed from, is not saved twice. Raises MilepostError on all ranks and leaves
        what was there untouched: WriteError where a disk refuses. What kept the step before from becoming durable is
        raised too, once this one is on its way; and so is, as UploadError, what kept an earlier one from `remote`.
        """
        folder = self._saver.save(step, lambda: self._state(step, metrics or {}), blocking=blocking)
        self._check_uploads()
        return folder

    def poll(self) -> tuple[SavedStep, ...]:
        """The steps that have become durable since the last call, with their figures; never waits for the disk. All
        ranks call it. Raises, on all ranks, what kept a step from becoming durable."""
        self._check_uploads()
        return self._saver.poll()

    def wait(self) -> None:
        """Return once no step is on its way to the disk. All ranks call it; raises as `poll` does."""
        self._saver.wait()

    def linger(self, seconds: float) -> bool:
        """Give a step that is on its way so many seconds, where this rank is about to end and others may be gone.
        Returns whether none is on its way any more."""
        return self._saver.linger(seconds)

    def close(
        self,
        reason: str = "done",
        *,
        patience: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        **about: Any,
    ) -> None:
        """The run is over: wait for the step that is on its way, note the end in the diary, and give back what the
        manager holds. Raises, on all ranks, what kept that step from becoming durable, which then is the end that the
        diary knows; and at last, as UploadError, what kept steps from `remote`.

        reason, about:  what the diary is to say of the end
        patience:       most seconds in which uploads may come to their end; None: as long as they take
        meanwhile:      called by all ranks about once a second while uploads go on. What it raises is raised, and then
                        nothing is closed: `close` is to be called again, with what is left of the time
        """
        try:
            self._saver.close()
        except MilepostError as error:
            self._end_on(error)
            raise
        missing: UploadError | None = None
        if self._remote is not None and not self._closed:
            while meanwhile is not None and not on_rank_0(self._comm, self._drained):
                meanwhile()
            try:
                on_rank_0_at_length(self._comm, lambda: self._drain(patience))
            except UploadError as error:
                missing = error
                about["not_uploaded"] = str(error)
            except MilepostError as error:
                self._end_on(error)
                raise
        if not self._closed:
            newest = None if self._saver.newest is None else self._saver.newest.step
            self._write_event("stop", **{"reason": reason, "step": newest, **about})
        self._closed = True
        if self._owns_comm:
            self._comm.close()
        if missing is not None:
            raise missing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error other ranks may be gone, and giving back what is shared with them could wait for ever.
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            self._end_on(error)

    def _end_on(self, error: Exception) -> None:
        """Note the end in the diary, where that was not done yet. A lost rank is a kill, and no stop."""
        if not self._closed and not isinstance(error, LostRankError):
            self._write_event("stop", reason="error", error=str(error) or type(error).__name__)
        self._closed = True

    # Resuming

    def _enter(self, mode: str, path: Path | None) -> tuple[Path | None, list[str]]:
        """All ranks are here and mean the same; what killed saves have left is gone, and told of; what lies only at a
        URL is here. Returns the path to resume from, and notes for the report."""
        self._comm.meet("resume")
        self._saver.wait()
        agree(self._comm, self._root, resume_mode=mode, resume_from_path=path, roles=list(self._roles))
        swept = on_rank_0(self._comm, lambda: sweep(self._root))
        notes = [f"removed {name}, left by a save that was killed" for name in swept]
        if self._remote is None and (path is None or url_of(path) is None):
            return path, notes
        path, told = on_rank_0_at_length(self._comm, lambda: self._bring(mode, path))
        return path, [*notes, *told]

    def _begin(
        self,
        mode: str,
        start: Start,
        parts: Sequence[Part],
        entered: Sequence[str],
        notes: Sequence[str],
        saved_world_size: int | None,
    ) -> None:
        """Take a start as this session's, and report it."""
        loses_from = (start.step or 0) if mode == "auto" else None  # else the user chose: what lies between is no loss
        all_notes = [
            *start.notes,
            *on_rank_0(self._comm, lambda: [] if self._events is None else see_kill(self._events, loses_from)),
            *entered,
            *notes,
        ]
        newest = None
        if start.folder is not None and start.keep_up_to == start.step:
            newest = StepDir(start.step, start.folder)
            if self._comm.rank == 0:
                mend_tracker(self._root, start.step)
        self._saver.begin(start.keep_up_to, newest)
        if self._remote is not None and self._comm.rank == 0:
            self._mirrored().begin(start.keep_up_to)
        self._report = ResumeReport(
            mode=mode,
            root=self._root,
            folder=start.folder,
            step=start.step,
            next_step=(start.step or 0) + 1,
            parts=tuple(parts),
            skipped=start.skipped,
            notes=tuple(all_notes),
            world_size=self._comm.world_size,
            saved_world_size=saved_world_size,
        )
        self._write_event("resume", **self._report.as_event(), retention=self._retention.as_json())

    def _load(self, mode: str, path: Path | None) -> tuple[Start, Opened, list[Part], list[str]]:
        """The step to go on from, loaded. Headers and small state of all roles are read before anything is; where some
        of the rest cannot be read after all, everything is loaded anew, from an older step."""
        bad: dict[Path, str] = {}
        while True:
            start = on_rank_0(self._comm, lambda: self._choose(mode, path, bad))
            folder = start.folder
            if folder is None:
                return start, Opened({}, {}), self._loader.all_fresh(), []
            opened = None
            try:
                opened = self._loader.open(folder)
                parts, notes = self._loader.restore(opened)
                return start, opened, parts, notes
            except CheckpointError as error:
                another = isinstance(error, DamagedError | IncompleteError) or opened is None
                if folder == path or not another:
                    raise
                bad[folder] = str(error)

    def _choose(self, mode: str, path: Path | None, bad: Mapping[Path, str]) -> Start:
        return choose_start(
            self._root, mode, path, self._roles, run_id=self._run_id, attempt=self._attempt, without=bad
        )

    # Saving

    def _state(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "step": step,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "metrics": plain_json(metrics),
            "fingerprint": self._fingerprint,
        }

    def _after_durable(self, saved: SavedStep) -> None:
        """Rank 0, once a step is durable, in the thread that saved it: retention, from what the disk holds."""
        self._prune({saved.step: True})
        if self._remote is not None:
            self._mirrored().durable(saved.step)

    def _drained(self) -> bool:
        """On rank 0: whether uploads have come to their end, good or bad."""
        return self._mirror is None or self._mirror.drained(_BEAT)

    def _drain(self, patience: float | None) -> None:
        """On rank 0: all that is to be uploaded is, or has failed; what stayed for that goes."""
        if self._mirror is not None:
            try:
                self._mirror.close(patience)
            finally:
                try:
                    self._prune({})
                except Exception as error:  # noqa: BLE001  every step is safe, whatever stays beside it
                    _log.warning("steps that are not to stay may be left in %s: %s", self._root, error)

    def _prune(self, whole: dict[int, bool]) -> None:
        self._pruning.prune(whole, nobody_reads if self._mirror is None else self._mirror.unread)

    # A second place

    def _mirrored(self) -> Mirror:
        """On rank 0, where steps are uploaded too."""
        if self._mirror is None:
            assert self._remote is not None
            self._mirror = Mirror(Remote(self._remote), self._root, self._retention, self._events)
        return self._mirror

    def _bring(self, mode: str, path: Path | None) -> tuple[Path | None, list[str]]:
        """On rank 0, before a start is chosen: bring here what lies only at a URL. Returns the path to resume from, and
        notes for the report."""
        again = bool(self._attempt and self._run_id)
        if mode == "resume_path" and path is not None and (url := url_of(path)) is not None:
            path = fetch_named(url, self._root / FETCHED, self._roles, again=again)
        if self._remote is None or (mode != "auto" and not again):
            return path, []
        return path, self._mirrored().fetch(self._roles, "" if mode == "auto" else self._run_id)

    def _make_way(self, keep_up_to: int) -> None:
        if self._remote is not None:
            self._mirrored().make_way(keep_up_to)

    def _check_uploads(self) -> None:
        """Raise, on all ranks, what kept a step from being uploaded."""
        if self._remote is not None:
            on_rank_0(self._comm, lambda: None if self._mirror is None else self._mirror.check())

    def _write_event(self, event: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(event, **fields)


def _saved_world_size(step_dir: Path | None) -> int | None:
    """The number of ranks that saved a step, where its manifest says it."""
    if step_dir is None or not (step_dir / MANIFEST).exists():
        return None
    return read_manifest(step_dir).world_size
