"""The steps of a run at a URL too: each is uploaded behind training's back, once it is durable on the run's own disk.

What is to be uploaded follows from the two places alone: the newest step that is here, is to stay, and is not there.
So nothing need be remembered over a restart, and a network that fails for an hour costs no step, only the hour: each
failure is logged and noted in the diary, what is missing is tried again with the next step, the trainer trains on, and
only what has not arrived at the end of the run is an error there. Only a start with no whole step here needs the URL to
answer. One step is on its way at a time, in parts sent side by side; when steps come faster than they can be sent, the
newest goes first, and an older one that the run's disk no longer keeps is left out, which the diary says.

What lies there of a history that the run does not go on with must be aside before the first step of the new one is
uploaded. No save waits for that: an empty file in the run's folder, which outlives a kill, says that it is to be done.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Condition, Thread

from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.files import sync_directory
from milepost.checkpoint.inventory import PIN, DiskStep, disk_steps
from milepost.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from milepost.checkpoint.remote.fetching import fetch_newest
from milepost.checkpoint.remote.folder import Remote, side_by_side
from milepost.checkpoint.remote.steps import (
    UPLOADING,
    RemoteStep,
    plan_remote,
    remote_steps,
    remove_unfinished,
    set_aside,
)
from milepost.checkpoint.retention import Retention, Step, decide
from milepost.checkpoint.steps import TRACKER, newest_good, step_name
from milepost.errors import CallError, CheckpointError, MilepostError, OutageError, UploadError, WriteError
from milepost.wording import duration, file_size

_TO_SET_ASIDE = re.compile(r"\.set_aside_there_above_(\d+)")
_log = logging.getLogger(__name__)


class Mirror:
    """Uploads the steps of one run; on rank 0. Its calls return at once, but for `fetch` and `close`.

    Args:
        remote: where to.
        root: the run's folder.
        retention: what stays there; the same as here.
        events: the run's diary.
    """

    def __init__(self, remote: Remote, root: Path, retention: Retention, events: EventLog | None = None) -> None:
        self.remote = remote
        self._root = root
        self._retention = retention
        self._events = events
        self._state = Condition()
        self._newest: int | None = None  # steps up to this number belong to this run's history
        self._up_to = 0  # what that was when the thread last looked
        self._tidy = False
        self._uploading: int | None = None
        self._sent: dict[str, set[str]] = {}  # of a step that was cut off: its files that have arrived
        self._there: set[int] = set()
        self._awaited: set[int] = set()
        self._errors: list[UploadError] = []
        self._failed = False  # when it was last tried
        self._woken = self._closing = False
        self._thread: Thread | None = None

    def fetch(self, roles: Collection[str], run_id: str = "") -> list[str]:
        """`fetch_newest` of this run's history. Where the URL does not answer and a whole step lies here, the run goes
        on from that one: the sentence that is returned, the diary and the log say so."""
        try:
            return fetch_newest(self.remote, self._root, roles, run_id=run_id, up_to=min(self._notes(), default=None))
        except OutageError as error:
            return [go_on_without(error, self._root, self._events)]

    def begin(self, keep_up_to: int) -> None:
        """The history that this session goes on with; what of it is not there yet is uploaded from now on."""
        self._start(keep_up_to)

    def make_way(self, keep_up_to: int) -> None:
        """Before the first step of this session appears here: what lies there and is newer than the start belongs to
        another history. Notes that on the disk; it is moved aside before the next upload. Raises OSError."""
        (self._root / f".set_aside_there_above_{keep_up_to}").touch()
        sync_directory(self._root)

    def durable(self, step: int) -> None:
        """A step is durable here."""
        with self._state:
            self._awaited.add(step)
        self._start(step)

    @contextlib.contextmanager
    def holding(self) -> Iterator[int | None]:
        """While this is open no other step is taken up; yields the number of the one that is being read."""
        with self._state:
            yield self._uploading

    def check(self) -> None:
        """Raise what went wrong since the last call. The step is safe here, and is tried again with the next one."""
        with self._state:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self, patience: float | None = None) -> None:
        """Wait until all has been uploaded, or has failed, or `patience` seconds have passed; raises UploadError where
        something has not been uploaded."""
        with self._state:
            self._closing = self._woken = True
            self._state.notify()
            thread = self._thread
        if thread is not None:
            thread.join(patience)
        with self._state:
            errors, self._errors = self._errors, []
            number = self._uploading
        if thread is not None and thread.is_alive():
            which = "steps were" if number is None else f"step {number} is durable in {self._root}, but was"
            why = "" if not errors else f" ({errors[-1]})"
            failure = UploadError(f"{which} not uploaded to {self.remote} in the time that was left{why}")
            self._write_event("upload_failed", step=number, error=str(failure))
            raise failure
        if self._failed and errors:
            raise errors[-1]

    def _start(self, newest: int) -> None:
        with self._state:
            self._newest = max(newest, self._newest or 0)
            self._woken = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="milepost-upload", daemon=True)
                self._thread.start()
            self._state.notify()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._woken)
                self._woken = False
                closing = self._closing
            self._upload_all()
            with self._state:
                if closing and not self._woken:
                    return

    def _upload_all(self) -> None:
        step: DiskStep | None = None
        try:
            while (step := self._next()) is not None:
                self._upload(step)
            self._failed = False
            return
        except Exception as error:  # noqa: BLE001  raised by who asks
            number = None if step is None else step.step
            which = "steps were" if step is None else f"step {number} is durable in {self._root}, but was"
            why = error if isinstance(error, MilepostError | OSError) else repr(error)  # a fault of a program
            failure = UploadError(f"{which} not uploaded to {self.remote}: {why}")
        finally:
            with self._state:
                self._uploading = None
        self._write_event("upload_failed", step=number, error=str(failure))
        _log.warning("%s; it is tried again with the next step", failure)
        with self._state:
            self._errors.append(failure)
            self._failed = True

    def _next(self) -> DiskStep | None:
        """The newest step that is here and to stay, and is not there; it is held until its upload has ended."""
        with self._state:
            self._up_to = self._newest or 0
        self._set_aside()  # a step up to that number is here: what was to be noted before it is noted
        ours = self._ours_there()
        there = {step.step: step for step in ours}
        here = {s.step: s for s in disk_steps(self._root) if s.own and s.step <= self._up_to}
        if not self._tidy:
            remove_unfinished(step for step in ours if step.step not in here)
            self._tidy = True
        kept = set(here)
        if self._retention.policy is not None:  # to know more of what is there takes requests
            everywhere: list[Step] = [*here.values(), *(there[number] for number in there.keys() - here.keys())]
            kept = {decision.step for decision in decide(everywhere, self._retention.policy) if decision.kept}
        for number in sorted((here.keys() & kept) - self._there, reverse=True):
            step = here[number]
            if number in there and _is_same(step, there[number]):
                self._there.add(number)
            elif step.whole:
                # Nothing that waits for the network is done under the lock: saves wait for it.
                with self._state:
                    if step.path.exists():  # retention may just have taken it
                        self._uploading = number
                        return step
        with self._state:
            self._uploading = None
            left_out = self._awaited - self._there - here.keys()
            self._awaited.clear()
        for number in sorted(left_out):
            self._write_event("upload_skipped", step=number, why="newer steps went first, and it is no longer kept")
            _log.warning("step %s was not uploaded: newer steps went first, and it is no longer kept here", number)
        return None

    def _upload(self, step: DiskStep) -> None:
        begun = time.monotonic()
        folder = step_name(step.step)
        data = (step.path / MANIFEST).read_bytes()
        manifest = parse_manifest(data, step.path / MANIFEST)
        self._begin_upload(folder, manifest)
        sent = self._sent.setdefault(f"{step.step} {manifest.created}", set())

        def send(path: str) -> None:
            self.remote.put(step.path / path, f"{folder}/{path}")
            sent.add(path)

        largest_first = sorted(manifest.files, key=lambda record: record.size, reverse=True)
        side_by_side([record.path for record in largest_first if record.path not in sent], send)
        arrived = self.remote.sizes(folder)
        for record in manifest.files:
            if arrived.get(record.path) != record.size:
                sent.clear()
                raise WriteError(
                    f"{folder}/{record.path} arrived with {arrived.get(record.path, 0)} bytes of {record.size}"
                )
        with contextlib.suppress(CallError):  # without the right to list them they stay, and harm nobody
            self.remote.give_up_unfinished(folder)
        if step.pinned:
            self.remote.put_bytes(b"", f"{folder}/{PIN}")
        self.remote.put_bytes(data, f"{folder}/{MANIFEST}")  # the commit
        self.remote.remove([f"{folder}/{UPLOADING}"])
        self._there.add(step.step)
        self._sent.clear()
        self.remote.put_bytes(str(max(self._there)).encode(), TRACKER)
        seconds = time.monotonic() - begun
        self._write_event(
            "upload_durable", step=step.step, bytes=manifest.nbytes, seconds=seconds, url=str(self.remote)
        )
        rate = f"{file_size(manifest.nbytes / max(seconds, 1e-6))}/s"
        _log.info("step %s uploaded: %s in %s (%s)", step.step, file_size(manifest.nbytes), duration(seconds), rate)
        if not self._retention.keeps_all:
            steps = self._ours_there()
            plan_remote(steps, self._retention).carry_out()
            remove_unfinished(step for step in steps if not (self._root / step.folder).exists())

    def _ours_there(self) -> list[RemoteStep]:
        """The steps there that belong to this run's history: newer ones may wait for being moved aside."""
        return [step for step in remote_steps(self.remote) if step.step <= self._up_to]

    def _notes(self) -> dict[int, Path]:
        """Number -> the note that says that what is newer there is to be moved aside."""
        found = ((_TO_SET_ASIDE.fullmatch(path.name), path) for path in self._root.glob(".set_aside_there_above_*"))
        return {int(match[1]): path for match, path in found if match is not None}

    def _set_aside(self) -> None:
        notes = self._notes()
        if not notes:
            return
        others = [step for step in remote_steps(self.remote) if step.step > min(notes)]
        if others:
            into = set_aside(self.remote, others)
            self._write_event(
                "set_aside", step=min(notes), folders=[s.folder for s in others], into=into, at=str(self.remote)
            )
        for note in notes.values():
            note.unlink(missing_ok=True)
        sync_directory(self._root)  # or a power cut could bring it back, and what is uploaded next would go aside

    def _begin_upload(self, folder: str, manifest: Manifest) -> None:
        """Another history's step of that number is moved aside, and a mark says that an upload has begun."""
        other = RemoteStep(self.remote, folder, manifest.step)
        if other.own:
            set_aside(self.remote, [other])
        self.remote.put_bytes(str(manifest.run_id).encode(), f"{folder}/{UPLOADING}")

    def _write_event(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write(event, **fields)


def try_to_upload(url: str) -> None:
    """Write a small object at a URL and remove it. Raises CallError where a run could not upload there."""
    remote, name = Remote(url), f".probe_{secrets.token_hex(4)}"
    remote.put_bytes(b"milepost was here", name)
    remote.remove([name])


def try_at_start(url: str, root: Path, events: EventLog) -> None:
    """`try_to_upload`; where there is no answer and a whole step lies in `root`, a warning is enough."""
    try:
        try_to_upload(url)
    except OutageError as error:
        go_on_without(error, root, events)


def go_on_without(error: OutageError, root: Path, events: EventLog | None) -> str:
    """Say in the log and the diary that a run starts with what lies here; the sentence. Raises the error where no step
    here is whole: to begin from nothing could lose what was trained."""
    here = newest_good(root).good
    if here is None:
        raise error
    said = f"{error}. The run starts with what lies in {root}: step {here.step} is the newest there that is whole"
    _log.warning("%s", said)
    if events is not None:
        events.write("remote_unreachable", step=here.step, error=str(error))
    return said


def _is_same(here: DiskStep, there: RemoteStep) -> bool:
    """Whether what lies there is this very step, and whole; an export may have gone from one of them."""
    if not there.whole:
        return False
    try:
        ours = read_manifest(here.path)
    except CheckpointError:  # retention has just taken it
        return False
    return (ours.created, ours.run_id) == (there.manifest.created, there.manifest.run_id)
