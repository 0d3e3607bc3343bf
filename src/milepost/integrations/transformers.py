"""Any Hugging Face Trainer, recorded by milepost: committed steps, checksums, retention, and a start that finds them.

    record = CheckpointCallback("runs/mine", keep_last=3)
    trainer = Trainer(..., callbacks=[record])
    trainer.train(resume_from_checkpoint=record.resume())

The Trainer saves as it always does (`save_steps` and so on). Right after, its folder `checkpoint-N` becomes the role
`trainer` of the committed step `global_step_N`: every file with its checksum and on the disk, the step there as a whole
or not at all. To go on, `resume` chooses the newest step that is whole, and the Trainer loads that folder by its own
code: weights, moments, schedule, RNG, its own state and the position in the data. Only a start of the Trainer's own can
set the last two, so nothing is loaded behind its back; and what is recorded is all that the Trainer knows to save,
under every engine that it knows.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback

from milepost import __version__
from milepost.checkpoint.comm import Communicator, default_communicator, on_rank_0
from milepost.checkpoint.diary.events import EVENTS, EventLog
from milepost.checkpoint.files import StepFiles
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.resume import Part, ResumeReport
from milepost.checkpoint.steps import step_name
from milepost.engines.base import OPTIMIZER, RNG, SCHEDULE, LiveTensor, RoleFiles
from milepost.errors import CallError, MismatchError, NotFoundError
from milepost.jobs.ranks import share_out
from milepost.layouts import find_layout

ROLE = "trainer"
_PARTS = ("weights", OPTIMIZER, SCHEDULE, RNG, "state of the Trainer and position in the data")
_FOLDER = "checkpoint-"


class CheckpointCallback(TrainerCallback):
    """Makes a committed step of each checkpoint of a Hugging Face Trainer.

    Args:
        root: the run's folder, on a file system that all ranks share. `milepost status`, `verify`, `merge` and `report`
            take it.
        keep_last: how many committed steps stay; None for all.

    The Trainer's folder goes once its step is committed, so that nothing lies on the disk twice. It stays where the
    Trainer needs it later (`load_best_model_at_end`, `push_to_hub`), and the step then holds a copy.
    """

    def __init__(self, root: str | os.PathLike[str], *, keep_last: int | None = None) -> None:
        self._root = Path(root)
        self._keep_last = keep_last
        self._folder = _TrainerFolder()
        self._comm: Communicator | None = None
        self._manager: CheckpointManager | None = None
        self._events: EventLog | None = None
        self._metrics: dict[str, float] = {}
        self._step_begun = monotonic()
        self._finished: tuple[int, float] | None = None  # a step that the diary has not yet, and its seconds

    def resume(self, mode: str = "auto", path: str | os.PathLike[str] | None = None) -> str | None:
        """Where the Trainer goes on, for its `resume_from_checkpoint`; None where training begins afresh.

        mode: "auto", the newest step that is whole; "resume_path", the one at `path`; "disable", none: newer steps are
            then moved aside at the first save. Every rank calls it, once the Trainer (or its arguments) are made.

        Raises CheckpointError or CallError on all ranks.
        """
        manager, _ = self._open()
        folder = manager.choose(mode, None if path is None else Path(path), self._parts)
        if self._comm is not None and self._comm.rank == 0:
            print("\n".join(manager.report.lines()), flush=True)
        return None if folder is None else str(folder / ROLE)

    @property
    def report(self) -> ResumeReport:
        """What the start found; there once `resume` has been called."""
        return self._open()[0].report

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the Trainer goes on from where `resume` said, and has steps left to train."""
        if args.save_only_model:
            raise CallError("save_only_model leaves out what a resume needs; set it to False to record steps")
        if self._manager is None and self.resume() is not None:
            raise CallError(
                f"{self._root} holds steps already: train with resume_from_checkpoint=callback.resume(), or with "
                'callback.resume("disable") to begin anew'
            )
        if self.report.step not in (None, state.global_step):
            raise CallError(
                f"the Trainer begins at step {state.global_step}, but resume() chose step {self.report.step}: give "
                "what it returned to trainer.train(resume_from_checkpoint=...)"
            )
        on_rank_0(self._open()[1], lambda: self._remove_twins(Path(args.output_dir)))
        if state.global_step and state.global_step >= state.max_steps:
            # Left to itself it would train one step too many before it looks.
            raise CallError(
                f"nothing to train: step {state.global_step} was the last of {state.max_steps}; for more raise "
                "max_steps or num_train_epochs"
            )
        self._step_begun = monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The diary gets the step before."""
        self._note_step()
        self._step_begun = monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One more step is finished."""
        self._finished = (state.global_step, monotonic() - self._step_begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """What the Trainer logs of a step goes into the diary with it."""
        self._metrics = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._note_step(self._metrics)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the Trainer has just written becomes a committed step. Raises MilepostError on all ranks."""
        self._note_step()
        manager, comm = self._open()
        comm.barrier()  # a rank may still be writing
        source = Path(args.output_dir) / f"{_FOLDER}{state.global_step}"
        files = on_rank_0(comm, lambda: _files_of(source))
        own = share_out(files, comm.world_size)[comm.rank]
        keep = bool(args.load_best_model_at_end or args.push_to_hub)
        self._folder.take(source, sorted(own), comm, copy=keep)
        manager.save(state.global_step, self._metrics)
        if not keep:
            on_rank_0(comm, lambda: shutil.rmtree(source))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The diary ends in order."""
        self._note_step()
        if self._events is not None:
            self._events.write("stop", step=state.global_step, reason="done")

    # Details

    def _open(self) -> tuple[CheckpointManager, Communicator]:
        """The record of the run. Made when first asked for: the Trainer's arguments start torch.distributed."""
        if self._manager is None or self._comm is None:
            comm = default_communicator()
            if comm.rank == 0:
                self._events = EventLog(self._root / EVENTS)
                self._events.write(
                    "start",
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    world_size=comm.world_size,
                    engine="transformers.Trainer",
                    version=__version__,
                )
            self._comm = comm
            self._manager = CheckpointManager(
                self._root, {ROLE: self._folder}, keep_last=self._keep_last, comm=comm, events=self._events
            )
        return self._manager, self._comm

    def _parts(self, folder: Path | None, saved_world_size: int | None) -> Sequence[Part]:
        """What the Trainer restores of a step."""
        assert self._comm is not None
        now = self._comm.world_size
        if folder is None:
            return [Part(f"{ROLE}/{part}", "fresh") for part in _PARTS]
        if not (folder / ROLE).is_dir():
            raise NotFoundError(f"{folder}: no Hugging Face Trainer saved it, so none can go on from it")
        if saved_world_size in (None, now):
            return [Part(f"{ROLE}/{part}", "restored") for part in _PARTS]
        if any((folder / ROLE).glob("global_step*")):
            raise MismatchError(
                f"{folder} was saved by {saved_world_size} ranks under DeepSpeed, which goes on with no other number; "
                f"start {saved_world_size} ranks, or begin anew from the weights that `milepost merge {folder}` gives"
            )
        why = f"saved by {saved_world_size} ranks, now {now}"
        return [
            Part(f"{ROLE}/{part}", "fresh" if part == RNG else "restored", why if part == RNG else "")
            for part in _PARTS
        ]

    def _note_step(self, metrics: Mapping[str, float] | None = None) -> None:
        if self._finished is not None and self._events is not None:
            step, seconds = self._finished
            self._events.write("step", step=step, seconds=seconds, metrics=dict(metrics or {}))
        self._finished = None

    def _remove_twins(self, output_dir: Path) -> None:
        """Remove folders of the Trainer whose files are those of a committed step, as a kill between commit and removal
        leaves them. The Trainer would write into them, and so into the step."""
        for folder in output_dir.glob(f"{_FOLDER}*"):
            number = folder.name.removeprefix(_FOLDER)
            step = self._root / step_name(int(number)) / ROLE if number.isdigit() else folder
            if step != folder and any(_same(folder / name, step / name) for name in _files_of(folder)):
                shutil.rmtree(folder)


class _TrainerFolder:
    """A folder that the Trainer has written, as an engine that is saved."""

    def __init__(self) -> None:
        self.layout = ROLE
        self.rank = 0
        self.world_size = 1
        self._source = Path()
        self._names: Sequence[str] = ()
        self._copy = False

    def take(self, source: Path, names: Sequence[str], comm: Communicator, *, copy: bool) -> None:
        """What the next save takes: the files `names` of `source` on this rank."""
        layout = find_layout(source)
        self.layout = ROLE if layout is None else layout.name
        self.rank, self.world_size = comm.rank, comm.world_size
        self._source, self._names, self._copy = source, names, copy

    def tensors(self) -> Mapping[str, LiveTensor]:
        """None: the Trainer fills its own."""
        return {}

    def objects(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        """Never called with any."""
        return {}

    def finish_load(self) -> None:
        """Nothing was loaded."""

    def save(self, files: RoleFiles) -> None:
        """Take this rank's share of the files into the step."""
        if not isinstance(files, StepFiles):
            raise TypeError("the files of a step are expected")
        for name in self._names:
            files.adopt(self._source / name, name, copy=self._copy)


def _files_of(folder: Path) -> dict[str, int]:
    """Every file below a folder, by its path from there, and its size in bytes."""
    if not folder.is_dir():
        raise NotFoundError(f"{folder}: the Trainer was to save there and did not")
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.samefile(other)
