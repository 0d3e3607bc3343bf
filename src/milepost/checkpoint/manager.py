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

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from milepost.checkpoint import restore
from milepost.checkpoint.comm import Communicator, default_communicator, on_rank_0, together
from milepost.checkpoint.commit import SavedStep, StepRequest, agree, delete_step, sweep, write_step
from milepost.checkpoint.events import EventLog, interrupted_session, plain_json, read_events
from milepost.checkpoint.files import sync_directory
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.resume import Part, ResumeReport, Start, choose_start
from milepost.checkpoint.retention import keep_last
from milepost.checkpoint.steps import StepDir, judge, scan
from milepost.engines.base import Engine
from milepost.errors import CallError, CheckpointError, ConfigError, MilepostError, MismatchError
from milepost.index import TensorIndex
from milepost.jobs.merge import merge
from milepost.jobs.prepare import prepare
from milepost.wording import counted

T = TypeVar("T")
CONTENTS = ("model", "optimizer", "extra")
HF_MODEL = "hf_model"
STATE_FORMAT = 1
Parts = Callable[[Path | None, int | None], Sequence[Part]]
"""From a step's folder (None: a fresh start) and the number of ranks that saved it to what is restored of it."""


class Stateful(Protocol):
    """A part of the training state that is small and the same on all ranks: KL controller, data position."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, as JSON knows it."""

    def load_state_dict(self, state: Any, /) -> str | Sequence[str] | None:
        """Take over a state. Returns sentences where it was not restored as it was saved, and why; else nothing."""


@dataclass(frozen=True)
class _Opened:
    """A step that is about to be loaded: the index of each role, and trainer_state.json."""

    indexes: Mapping[str, TensorIndex]
    state: Mapping[str, Any]


class CheckpointManager:
    """Saves and resumes the steps of one run.

    Args:
        root: the run's folder, on a file system that all ranks share.
        roles: role -> its engine; the same on all ranks, in the same order.
        parts: name -> other state; rank 0's is saved, and every rank gets the same back.
        keep_last: how many committed steps stay, None for all. Steps of other programs are never deleted.
        comm: how ranks talk; by default torch.distributed where it is initialised.
        events: the run's diary; only rank 0 writes to it.
        fingerprint: config key -> value; a resume says which have changed.
        save_contents, load_contents: of model, optimizer, extra, which go together; and hf_model, to save the weights
            in Hugging Face's form too.
        run_id: the same for all restarts of one run.
        attempt: how many restarts came before.
    """

    def __init__(
        self,
        root: Path | str,
        roles: Mapping[str, Engine],
        *,
        parts: Mapping[str, Stateful] | None = None,
        keep_last: int | None = None,
        comm: Communicator | None = None,
        events: EventLog | None = None,
        fingerprint: Mapping[str, str] | None = None,
        save_contents: Sequence[str] = CONTENTS,
        load_contents: Sequence[str] = CONTENTS,
        run_id: str = "",
        attempt: int = 0,
    ) -> None:
        if not roles:
            raise CallError("a checkpoint needs at least one role")
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last={keep_last}: at least one step must stay; leave it out to keep all")
        self._root = Path(root)
        self._roles = dict(roles)
        self._parts = dict(parts or {})
        self._keep_last = keep_last
        self._owns_comm = comm is None
        self._comm = default_communicator() if comm is None else comm
        self._events = events if self._comm.rank == 0 else None
        self._fingerprint = dict(fingerprint or {})
        self._notes = [
            *_check_contents("save_contents", save_contents),
            *_check_contents("load_contents", load_contents),
        ]
        self._hf_model = HF_MODEL in save_contents
        self._run_id = run_id
        self._attempt = attempt
        self._report: ResumeReport | None = None
        self._keep_up_to: int | None = None
        self._newest: StepDir | None = None
        self._way_is_clear = False

    @property
    def report(self) -> ResumeReport:
        """What the start restored; there once `resume` has been called."""
        if self._report is None:
            raise CallError("the report is there once resume() has been called")
        return self._report

    def resume(self, mode: str = "auto", path: Path | None = None) -> int | None:
        """Restore the training state; returns its step, or None where training begins afresh. See `choose_start`.

        Everything is found to be whole and fitting before the first byte is loaded. In mode "auto" a step that turns
        out to be bad is passed over for the next older one. Raises CheckpointError or CallError on all ranks.
        """
        swept = self._enter(mode, path)
        start, opened = self._find(mode, path)
        parts, notes = (self._all_fresh(), []) if start.folder is None else self._restore(opened)
        saved_world_size = next((index.world_size for index in opened.indexes.values()), None)
        self._begin(mode, start, parts, swept, [*notes, *self._notes], saved_world_size)
        return start.step

    def choose(self, mode: str, path: Path | None, parts: Parts) -> Path | None:
        """Choose the step to go on from as `resume` does, and load nothing: for a trainer that loads a step by itself.

        parts: what it will restore, for the report; it may refuse the step. Returns the step's folder, or None for a
        fresh start.
        """
        swept = self._enter(mode, path)
        start = on_rank_0(self._comm, lambda: self._choose(mode, path, {}))
        saved_world_size = on_rank_0(self._comm, lambda: _saved_world_size(start.folder))
        self._begin(mode, start, parts(start.folder, saved_world_size), swept, [], saved_world_size)
        return start.folder

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Path:
        """Save the whole training state as this step; returns its folder once it is durable. All ranks call it.

        A step that was saved already, or resumed from, is not saved twice. Raises MilepostError on all ranks and leaves
        what was there untouched: WriteError where a disk refuses.
        """
        self._comm.meet("save")
        agree(self._comm, self._root, step=step, roles=list(self._roles), hf_model=self._hf_model)
        if self._newest is not None and step == self._newest.step:
            return self._newest.path
        self._check_step(step)
        self._write_event("save_requested", step=step)
        begun = time.monotonic()
        request = StepRequest(
            root=self._root,
            step=step,
            roles=self._roles,
            contents=(*CONTENTS, HF_MODEL) if self._hf_model else CONTENTS,
            state=lambda: self._state(step, metrics or {}),
            run_id=self._run_id,
            export_hf=_export_hf if self._hf_model else None,
            make_way=lambda: self._set_aside(step),
        )
        try:
            saved = write_step(request, self._comm)
        except MilepostError as error:
            self._write_event("save_failed", step=step, error=str(error))
            raise
        self._newest = StepDir(step, saved.path)
        self._committed(step, saved, time.monotonic() - begun)
        return saved.path

    def close(self) -> None:
        """Give back what the manager holds. Saved steps are durable already."""
        if self._owns_comm:
            self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error other ranks may be gone, and giving back what is shared with them could wait for ever.
        if error is None:
            self.close()

    # Resuming

    def _enter(self, mode: str, path: Path | None) -> list[str]:
        """All ranks are here and mean the same; what killed saves have left is gone, and named."""
        self._comm.meet("resume")
        agree(self._comm, self._root, resume_mode=mode, resume_from_path=path, roles=list(self._roles))
        return on_rank_0(self._comm, lambda: sweep(self._root))

    def _begin(
        self,
        mode: str,
        start: Start,
        parts: Sequence[Part],
        swept: Sequence[str],
        notes: Sequence[str],
        saved_world_size: int | None,
    ) -> None:
        """Take a start as this session's, and report it."""
        all_notes = [
            *start.notes,
            *on_rank_0(self._comm, lambda: self._see_kill(start, mode)),
            *(f"removed {name}, left by a save that was killed" for name in swept),
            *notes,
        ]
        self._keep_up_to = start.keep_up_to
        if start.folder is not None and start.keep_up_to == start.step:
            self._newest = StepDir(start.step, start.folder)
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
        self._write_event("resume", **self._report.as_event())

    def _find(self, mode: str, path: Path | None) -> tuple[Start, _Opened]:
        """The step to go on from, opened: headers and small state of all roles are read before anything is loaded."""
        bad: dict[Path, str] = {}
        while True:
            start = on_rank_0(self._comm, lambda: self._choose(mode, path, bad))
            folder = start.folder
            if folder is None:
                return start, _Opened({}, {})
            try:
                return start, _on_all(self._comm, partial(_open, folder, self._roles))
            except CheckpointError as error:
                if folder == path:
                    raise
                bad[folder] = str(error)

    def _choose(self, mode: str, path: Path | None, bad: Mapping[Path, str]) -> Start:
        return choose_start(
            self._root, mode, path, self._roles, run_id=self._run_id, attempt=self._attempt, without=bad
        )

    def _restore(self, opened: _Opened) -> tuple[list[Part], list[str]]:
        """Compare everything, then load everything."""
        state, indexes = opened.state, opened.indexes
        fits = _on_all(
            self._comm,
            lambda: {role: restore.fit(role, indexes[role], engine.tensors()) for role, engine in self._roles.items()},
        )
        remarks = together(
            self._comm, lambda: {role: restore.fill(fits[role], engine) for role, engine in self._roles.items()}
        )
        # Apart, since ranks meet in it: none may be there while another could not read its part.
        together(self._comm, self._finish_load)
        parts: list[Part] = []
        notes: list[str] = []
        for role, engine in self._roles.items():
            parts += restore.role_parts(fits[role], engine, _of_all_ranks([said[role] for said in remarks]))
        saved = state.get("parts") or {}
        together(self._comm, lambda: parts.extend(self._restore_parts(saved)))
        if "fingerprint" in state:
            changed = restore.changes(state["fingerprint"], self._fingerprint)
            notes += [f"the config has changed: {changed}"] if changed else []
        return parts, notes

    def _finish_load(self) -> None:
        for engine in self._roles.values():
            engine.finish_load()

    def _restore_parts(self, saved: Mapping[str, Any]) -> list[Part]:
        parts = []
        for name, part in self._parts.items():
            if name not in saved:
                parts.append(Part(name, "fresh", restore.NOT_SAVED))
                continue
            try:
                said = part.load_state_dict(saved[name])
            except Exception as error:
                raise MismatchError(f"{name}: its saved state cannot be taken over ({error})") from error
            why = said if isinstance(said, str) else "; ".join(said or ())
            parts.append(Part(name, "fresh" if why else "restored", why))
        return parts + [Part(name, "skipped", restore.NO_PLACE) for name in saved if name not in self._parts]

    def _all_fresh(self) -> list[Part]:
        parts = [part for role, engine in self._roles.items() for part in restore.fresh_parts(role, engine)]
        return parts + [Part(name, "fresh") for name in self._parts]

    def _see_kill(self, start: Start, mode: str) -> list[str]:
        """Note, on rank 0, that the session before was killed; the line for the report."""
        if self._events is None:
            return []
        # Where the user chose the start, what lies between is no loss.
        killed = interrupted_session(read_events(self._events.path), (start.step or 0) if mode == "auto" else None)
        if killed is None:
            return []
        self._events.write("kill_seen", **asdict(killed))
        lost = f"{counted(killed.lost_steps, 'step')} after its last save lost" if killed.lost_steps else "nothing lost"
        return [f"the session before was killed after step {killed.last_step}: {lost}"]

    # Saving

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

    def _state(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "step": step,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "metrics": plain_json(metrics),
            "fingerprint": self._fingerprint,
        }

    def _set_aside(self, step: int) -> None:
        """Before the first step of this session appears: move away the steps of a history that it does not go on with.

        Left where they are, the newest of them would be what the next start resumes from.
        """
        if self._way_is_clear:
            return
        others = [found.path for found in scan(self._root) if found.step > (self._keep_up_to or 0)]
        if others:
            into = self._root / f"set_aside_{datetime.now(UTC):%Y%m%d-%H%M%S}_{secrets.token_hex(2)}"
            into.mkdir()
            for folder in others:
                folder.rename(into / folder.name)
            sync_directory(into)
            self._write_event("set_aside", step=step, folders=[folder.name for folder in others], into=into.name)
        self._way_is_clear = True

    def _committed(self, step: int, saved: SavedStep, seconds: float) -> None:
        """Rank 0, once a step is durable: the diary, then retention, from what the disk holds."""
        self._write_event("save_durable", step=step, bytes=saved.nbytes, seconds=seconds, folder=saved.path.name)
        if self._comm.rank == 0 and self._keep_last is not None:
            own = {found.step: found.path for found in scan(self._root) if (found.path / MANIFEST).exists()}
            for old in keep_last(own, self._keep_last, lambda kept: kept == step or judge(own[kept]).good):
                delete_step(own[old])

    def _write_event(self, event: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(event, **fields)


def _open(folder: Path, roles: Mapping[str, Engine]) -> _Opened:
    indexes = {role: restore.open_for(folder / role, engine.tensors()) for role, engine in roles.items()}
    for index in indexes.values():
        dict(index.objects)  # read when first asked for: a damaged file must show now
    return _Opened(indexes, restore.read_state(folder))


def _saved_world_size(step_dir: Path | None) -> int | None:
    """The number of ranks that saved a step, where its manifest says it."""
    if step_dir is None or not (step_dir / MANIFEST).exists():
        return None
    return read_manifest(step_dir).world_size


def _on_all(comm: Communicator, act: Callable[[], T]) -> T:
    """Do `act` on every rank and keep each rank's own result; if any raises, all raise."""
    results: list[T] = []
    together(comm, lambda: results.append(act()))
    return results[0]


def _of_all_ranks(remarks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The remarks of all ranks on each part, each once; one that not all made, with the ranks that did."""
    speakers: dict[tuple[str, str], list[int]] = {}
    for rank, said in enumerate(remarks):
        for part, why in said.items():
            speakers.setdefault((part, why), []).append(rank)
    joined: dict[str, list[str]] = {}
    for (part, why), ranks in speakers.items():
        some = "" if len(ranks) == len(remarks) else f" (rank {', '.join(map(str, ranks))})"
        joined.setdefault(part, []).append(why + some)
    return {part: "; ".join(reasons) for part, reasons in joined.items()}


def _check_contents(option: str, contents: Sequence[str]) -> list[str]:
    """Refuse unknown contents; the line for a part of what goes together."""
    unknown = [name for name in contents if name not in (*CONTENTS, HF_MODEL)]
    if unknown:
        raise ConfigError(f"{option}: {unknown[0]!r} is none of {', '.join((*CONTENTS, HF_MODEL))}")
    lacking = [name for name in CONTENTS if name not in contents]
    if not lacking:
        return []
    return [f"{option} leaves out {', '.join(lacking)}: {', '.join(CONTENTS)} go together, so all are taken"]


def _export_hf(role_dir: Path, target: Path) -> None:
    merge(prepare(role_dir), target)
