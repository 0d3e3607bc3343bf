"""The steps of a run at a URL too: each is uploaded behind training's back, once it is durable on the run's own disk.

What is to be uploaded follows from the two places alone: the newest step that is here, is to stay, and is not there.
So nothing need be remembered over a restart, and a network that fails for an hour costs no step, only the hour. One
step is on its way at a time, in parts sent side by side; when steps come faster than they can be sent, the newest goes
first, and an older one that the run's disk no longer keeps is left out, which the diary says.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Thread

from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.inventory import PIN, DiskStep, disk_steps
from milepost.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from milepost.checkpoint.remote.folder import Remote, side_by_side
from milepost.checkpoint.remote.steps import UPLOADING, RemoteStep, plan_remote, remote_steps, remove_step, set_aside
from milepost.checkpoint.retention import Retention, Step, decide
from milepost.checkpoint.steps import TRACKER, step_name
from milepost.errors import CallError, CheckpointError, UploadError, WriteError
from milepost.wording import duration, file_size

_log = logging.getLogger(__name__)


class Mirror:
    """Uploads the steps of one run; on rank 0. Its calls return at once, but for `make_way` and `close`.

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
        self._uploading: int | None = None
        self._sent: dict[str, set[str]] = {}  # of a step that was cut off: its files that have arrived
        self._there: set[int] = set()
        self._awaited: set[int] = set()
        self._errors: list[UploadError] = []
        self._woken = self._closing = False
        self._thread: Thread | None = None

    def begin(self, keep_up_to: int) -> None:
        """The history that this session goes on with; what of it is not there yet is uploaded from now on."""
        self._start(keep_up_to)

    def make_way(self, keep_up_to: int) -> None:
        """Before the first step of this session appears here: what lies there and is newer than the start belongs to
        another history, and is moved aside. Raises CallError where that cannot be done."""
        others = [step for step in remote_steps(self.remote) if step.step > keep_up_to]
        if others:
            into = set_aside(self.remote, others)
            self._write_event(
                "set_aside", step=keep_up_to, folders=[s.folder for s in others], into=into, at=str(self.remote)
            )

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

    def close(self) -> None:
        """Wait until all has been uploaded, or has failed; raises what failed."""
        with self._state:
            self._closing = self._woken = True
            self._state.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self.check()

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
            return
        except Exception as error:  # noqa: BLE001  raised by who asks
            number = None if step is None else step.step
            which = "steps were" if step is None else f"step {number} is durable in {self._root}, but was"
            failure = UploadError(f"{which} not uploaded to {self.remote}: {error}")
        finally:
            with self._state:
                self._uploading = None
        self._write_event("upload_failed", step=number, error=str(failure))
        _log.warning("%s; it is tried again with the next step", failure)
        with self._state:
            self._errors.append(failure)

    def _next(self) -> DiskStep | None:
        """The newest step that is here and to stay, and is not there; it is held until its upload has ended."""
        there = {step.step: step for step in self._ours_there()}
        here = {s.step: s for s in disk_steps(self._root) if s.own and s.step <= (self._newest or 0)}
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
            plan_remote(self._ours_there(), self._retention).carry_out()
        for other in self._ours_there():
            if other.unfinished and not (self._root / step_name(other.step)).exists():
                remove_step(self.remote, other.folder)

    def _ours_there(self) -> list[RemoteStep]:
        """The steps there that belong to this run's history: newer ones may wait for being moved aside."""
        return [step for step in remote_steps(self.remote) if step.step <= (self._newest or 0)]

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


def _is_same(here: DiskStep, there: RemoteStep) -> bool:
    """Whether what lies there is this very step, and whole; an export may have gone from one of them."""
    if not there.whole:
        return False
    try:
        ours = read_manifest(here.path)
    except CheckpointError:  # retention has just taken it
        return False
    return (ours.created, ours.run_id) == (there.manifest.created, there.manifest.run_id)
