"""The saving half of a run's record: one step after the other, while training waits or behind its back.

A save that does not block takes the state, which is one copy of this rank's bytes into memory that is used again
(`milepost.checkpoint.saving.staging`), and returns. A thread brings the step to the disk; the ranks' threads talk over
a channel of their own, so that nothing mixes with the collectives of training. There is one step in flight at most: the
next save waits for it, and so do a load and the end of the run.

What every rank has (a replicated weight, a step count) is written as the layout has it. FSDP's layout, which verl
reads, wants it in each rank's file; under a one-dimensional mesh that is what no rank can cut, a few bytes. DeepSpeed
has one rank write it, in files whose names and contents are its own. Megatron's layouts leave open who writes: in the
classic one weights and moments come from two replicas where there are two, in the other Megatron shares them out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.checkpoint.comm import Communicator, agree, on_rank_0
from milepost.checkpoint.commit import (
    ExportHF,
    SavedStep,
    StepRequest,
    TakenStep,
    finish_step,
    take_step,
)
from milepost.checkpoint.deadline import Deadline
from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.files import move_aside
from milepost.checkpoint.saving.flight import Flight
from milepost.checkpoint.saving.staged_file import Staging
from milepost.checkpoint.steps import StepDir, scan
from milepost.engines.base import Engine
from milepost.errors import CallError, EarlierStepError, LostRankError, MilepostError
from milepost.wording import duration, file_size

if TYPE_CHECKING:
    from milepost.checkpoint.saving.staging import PagePool

PATIENCE = 1800.0
"""Seconds in which a step must have come to the disk: a file system that hangs would else hold up a run for ever."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saving:
    """How a run saves.

    contents:       what the manifest says was saved
    staging_limit:  most bytes of a rank's state that are held in memory for it; what is beyond them is written while
                    training waits. None: all of it
    patience:       seconds in which a step must have come to the disk
    after_durable:  called on rank 0, in the thread that saved, once a step is on the disk: retention, uploads. What it
                    raises is logged, and changes nothing about the step
    make_way:       called on rank 0 before the first step of this session appears, with the number up to which steps
                    belong to its history: has the others moved aside where they lie in a second place too
    """

    contents: tuple[str, ...]
    run_id: str = ""
    export_hf: ExportHF | None = None
    staging_limit: int | None = None
    patience: float = PATIENCE
    after_durable: Callable[[SavedStep], None] = lambda saved: None
    make_way: Callable[[int], None] = lambda keep_up_to: None


class Saver:
    """Saves the steps of one run. All ranks make the same calls."""

    def __init__(
        self, root: Path, roles: Mapping[str, Engine], comm: Communicator, events: EventLog | None, how: Saving
    ) -> None:
        self._root = root
        self._roles = roles
        self._comm = comm
        self._events = events
        self._how = how
        self._pool: PagePool | None = None
        self._channel: Communicator | None = None
        self._flight: Flight | None = None
        self._landed: list[SavedStep] = []
        self._keep_up_to: int | None = None
        self._newest: StepDir | None = None
        self._way_is_clear = False

    @property
    def newest(self) -> StepDir | None:
        """The newest step that this session resumed from or has brought to the disk."""
        return self._newest

    def begin(self, keep_up_to: int | None, newest: StepDir | None) -> None:
        """The history that this session goes on with: its steps, and the one that is as good as saved."""
        self._keep_up_to, self._newest = keep_up_to, newest
        self._way_is_clear = False

    def save(self, step: int, state: Callable[[], Mapping[str, Any]], *, blocking: bool = True) -> Path:
        """Save a step; returns its folder, which is there once the step is durable. See `CheckpointManager.save`.

        Raises EarlierStepError where this step is saved, or on its way, and the one before it never came to the disk.
        """
        begun = time.monotonic()
        self._comm.meet("save")
        late = self._wait()
        try:
            folder = self._save(step, state, blocking, begun)
        except MilepostError as error:
            # Nothing of the two may go unheard.
            raise (error if late is None else type(error)(f"{error}; before it {late}")) from late
        if isinstance(late, LostRankError):
            raise late
        if late is not None:
            raise EarlierStepError(str(late)) from late
        return folder

    def poll(self) -> tuple[SavedStep, ...]:
        """The steps that have become durable since the last call. Raises what kept a step in flight from it."""
        if self._flight is not None and all(self._comm.all_gather(self._flight.landed)):
            self.wait()
        landed, self._landed = tuple(self._landed), []
        return landed

    def wait(self) -> None:
        """Return once nothing is in flight. Raises what kept the step that was from becoming durable."""
        late = self._wait()
        if late is not None:
            raise late

    def linger(self, seconds: float) -> bool:
        """Give a step in flight so long; for this rank alone, others may be gone. Whether nothing is in flight."""
        if self._flight is not None:
            self._flight.verdict(seconds)
        return self._flight is None or self._flight.landed

    def close(self) -> None:
        """Wait for what is in flight, and give back memory and channel. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._flight is None:
                if self._pool is not None:
                    self._pool.close()
                    self._pool = None
                if self._channel is not None:
                    self._channel.close()
                    self._channel = None

    # A step on its way

    def _save(self, step: int, state: Callable[[], Mapping[str, Any]], blocking: bool, begun: float) -> Path:
        agree(
            self._comm, self._root, step=step, roles=list(self._roles), contents=self._how.contents, blocking=blocking
        )
        if self._newest is not None and step == self._newest.step:
            return self._newest.path
        self._check_step(step)
        if blocking:
            self._write_event("save_requested", step=step)
        try:
            taken = self._take(step, state, blocking)
        except MilepostError as error:
            self._write_event("save_failed", step=step, error=str(error))
            raise
        if blocking:
            self._settle(self._finish(taken, self._comm, begun, None))
        else:
            self._send_off(taken, begun)
        return taken.final

    def _take(self, step: int, state: Callable[[], Mapping[str, Any]], blocking: bool) -> TakenStep:
        if self._pool is None:
            from milepost.checkpoint.saving.staging import PagePool, on_gpu  # noqa: PLC0415  imports torch

            self._pool = PagePool(self._how.staging_limit, pinned=on_gpu())
        if not blocking and self._channel is None:
            self._channel = self._comm.another()
        request = StepRequest(
            root=self._root,
            step=step,
            roles=self._roles,
            contents=self._how.contents,
            state=state,
            run_id=self._how.run_id,
            export_hf=self._how.export_hf,
            make_way=lambda: self._set_aside(step),
        )
        deadline = Deadline(self._how.patience)
        return take_step(request, self._comm, Staging.make(self._pool, blocking=blocking, deadline=deadline))

    def _send_off(self, taken: TakenStep, begun: float) -> None:
        channel = self._channel
        assert channel is not None
        stall = time.monotonic() - begun
        self._tell(taken.request.step, "requested", taken.nbytes, stall)
        self._write_event(
            "save_requested", step=taken.request.step, bytes=taken.nbytes, seconds=stall, rate=taken.nbytes / stall
        )
        self._flight = Flight(taken.request.step, lambda: self._finish(taken, channel, begun, stall))

    def _finish(self, taken: TakenStep, comm: Communicator, begun: float, stall: float | None) -> SavedStep:
        """Bring a step to the disk, then what rank 0 does once it is durable."""

        def timed(written: SavedStep) -> SavedStep:
            seconds = time.monotonic() - begun
            return replace(written, seconds=seconds, stall=seconds if stall is None else stall)

        noted: list[SavedStep] = []
        try:
            written = finish_step(taken, comm, lambda written: noted.append(self._note(timed(written))))
        except MilepostError as error:
            if not noted:  # else it is there, though another rank was lost before it heard
                self._write_event("save_failed", step=taken.request.step, error=str(error))
            raise
        saved = noted[0] if noted else timed(written)
        if comm.rank == 0:
            try:
                self._how.after_durable(saved)
            except Exception as error:  # noqa: BLE001  the step is durable on all ranks, whatever comes after it
                _log.warning("step %s is durable, but not what was to follow: %s", saved.step, error)
        return saved

    def _wait(self) -> MilepostError | None:
        """Wait for the step in flight. Returns what kept it from the disk, the same on all ranks; None: all is well."""
        flight = self._flight
        if flight is None:
            return None
        # Its files have a deadline of their own; what is more than that is for what follows a durable step.
        verdict = flight.verdict(self._how.patience + PATIENCE)
        heard = self._comm.all_gather((verdict, flight.landed))
        late = next((verdict for verdict, _ in heard if isinstance(verdict, MilepostError)), None)
        if not all(landed for _, landed in heard):
            raise late or MilepostError(f"step {flight.step} is still on its way")
        self._flight = None
        if late is None:
            assert isinstance(heard[0][0], SavedStep)
            self._settle(heard[0][0])
        return late

    def _settle(self, saved: SavedStep) -> None:
        self._newest = StepDir(saved.step, saved.path)
        self._landed.append(saved)

    # What may be saved

    def _check_step(self, step: int) -> None:
        if self._keep_up_to is None:
            if on_rank_0(self._comm, lambda: bool(scan(self._root))):
                raise CallError(
                    f"{self._root} holds steps already: call resume() before the first save, "
                    "in mode disable to begin anew"
                )
            self._keep_up_to = 0
        if self._newest is not None and step < self._newest.step:
            raise CallError(f"step {step} cannot be saved after step {self._newest.step}: steps only go forward")

    def _set_aside(self, step: int) -> None:
        """Before the first step of this session appears: move away the steps of a history that it does not go on with.

        Left where they are, the newest of them would be what the next start resumes from.
        """
        if self._way_is_clear:
            return
        self._how.make_way(self._keep_up_to or 0)
        others = [found.path for found in scan(self._root) if found.step > (self._keep_up_to or 0)]
        if others:
            into = move_aside(self._root, others)
            self._write_event("set_aside", step=step, folders=[folder.name for folder in others], into=into.name)
        self._way_is_clear = True

    # What is told

    def _note(self, saved: SavedStep) -> SavedStep:
        """On rank 0: a step is durable."""
        self._tell(saved.step, "durable", saved.nbytes, saved.seconds)
        self._write_event(
            "save_durable",
            step=saved.step,
            bytes=saved.nbytes,
            seconds=saved.seconds,
            stall=saved.stall,
            rate=saved.nbytes / saved.seconds,
            folder=saved.path.name,
        )
        return saved

    def _tell(self, step: int, what: str, nbytes: int, seconds: float) -> None:
        if self._comm.rank == 0:
            rate = f"{file_size(nbytes / seconds)}/s"
            _log.info("step %s %s: %s in %s (%s)", step, what, file_size(nbytes), duration(seconds), rate)

    def _write_event(self, event: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(event, **fields)
