"""The steps of a run at a URL too: each is uploaded behind training's back, once it is durable on the run's own disk.

What is to be uploaded follows from the two places alone: the newest step that is here, is to stay, and is not there.
So nothing need be remembered over a restart, and a network that fails for an hour costs no step, only the hour: each
failure is logged and noted in the diary, what is missing is tried again with the next step, the trainer trains on, and
only what has not arrived at the end of the run is an error there. Only a start with no whole step here needs the URL to
answer. One step is on its way at a time, in parts sent side by side; when steps come faster than they can be sent, the
newest goes first, and an older one that the run's disk no longer keeps is left out, which the diary says.

What lies there of a history that the run does not go on with must be aside before the first step of the new one is
uploaded. No save waits for that: an empty file in the run's folder, which outlives a kill, says that it is to be done.

What a kill leaves there is no step, and goes at the next start (`UPLOADING`, `SETTING_ASIDE`, `_forget_cut_off`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Condition, RLock, Thread

from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.files import sync_directory
from milepost.checkpoint.inventory import PIN, DiskStep, disk_steps
from milepost.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from milepost.checkpoint.remote.fetching import fetch_newest
from milepost.checkpoint.remote.folder import Remote, side_by_side
from milepost.checkpoint.remote.steps import (
    UPLOADING,
    RemoteStep,
    plan_remote,
    remote_steps,
    remove_unfinished,
    same_step,
    set_aside,
    tracker_of,
)
from milepost.checkpoint.retention import Retention, Step, decide
from milepost.checkpoint.steps import TRACKER, newest_good, step_name, step_number
from milepost.errors import CallError, MilepostError, OutageError, UploadError, WriteError
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
        # By `with self._state`, in Python, Ctrl-C could come between the lock and the block, and leave it locked.
        self._lock = RLock()
        self._state = Condition(self._lock)
        self._newest: int | None = None  # steps up to this number belong to this run's history
        self._up_to = 0  # what that was when the thread last looked
        self._tidy = self._retained = False
        self._uploading: int | None = None
        self._held: set[int] = set()  # steps that were not taken up, since something of them is being deleted
        self._going: set[int] = set()  # steps of which something is being deleted
        self._sent: dict[str, set[str]] = {}  # of a step that was cut off: its files that have arrived
        self._there: set[int] = set()
        self._awaited: set[int] = set()  # durable here, and not yet looked for
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
        self._start(step, {step})

    @contextlib.contextmanager
    def unread(self, step: int) -> Iterator[bool]:
        """Have a step for oneself, to delete it or a part of it: while this is open it is not taken up. Yields False
        where it is being read in this moment. Waits for nothing: what hangs while this is open holds up nobody."""
        with self._lock:
            free = step != self._uploading
            if free:
                self._going.add(step)
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._going.discard(step)

    def check(self) -> None:
        """Raise what went wrong since the last call. The step is safe here, and is tried again with the next one."""
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def drained(self, patience: float | None) -> bool:
        """No step comes any more: wait until all has been uploaded, or has failed, or `patience` seconds have passed;
        whether it has. May be called again."""
        with self._lock:
            if not self._closing:  # else what has failed would be tried once more at each call
                self._closing = self._woken = True
                self._state.notify()
            thread = self._thread
        if thread is not None:
            thread.join(patience)
        return thread is None or not thread.is_alive()

    def close(self, patience: float | None = None) -> None:
        """`drained`; raises UploadError where something has not been uploaded."""
        drained = self.drained(patience)
        with self._lock:
            errors, self._errors = self._errors, []
            number = self._uploading
        if not drained:
            which = "steps were" if number is None else f"step {number} is durable in {self._root}, but was"
            why = "" if not errors else f" ({errors[-1]})"
            failure = UploadError(f"{which} not uploaded to {self.remote} in the time that was left{why}")
            self._write_event("upload_failed", step=number, error=str(failure))
            raise failure
        if self._failed and errors:
            raise errors[-1]

    def _start(self, newest: int, durable: Collection[int] = ()) -> None:
        with self._lock:
            self._newest = max(newest, self._newest or 0)
            self._awaited.update(durable)
            self._woken = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="milepost-upload", daemon=True)
                self._thread.start()
            self._state.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._state.wait_for(lambda: self._woken)
                self._woken = False
                closing = self._closing
            self._upload_all()
            with self._lock:
                if closing and not self._woken:
                    return

    def _upload_all(self) -> None:
        number: int | None = None
        try:
            while (step := self._next()) is not None:
                number = step.step
                self._upload(step)
                number = None
            if self._closing and self._held:
                number = max(self._held)
                raise WriteError("the file system has not come to the end of a deletion in it")
            self._retain()
            self._failed = False
            return
        except Exception as error:  # noqa: BLE001  raised by who asks
            which = "steps were" if number is None else f"step {number} is durable in {self._root}, but was"
            why = error if isinstance(error, MilepostError | OSError) else repr(error)  # a fault of a program
            failure = UploadError(f"{which} not uploaded to {self.remote}: {why}")
        finally:
            with self._lock:
                self._uploading = None
        self._write_event("upload_failed", step=number, error=str(failure))
        _log.warning("%s; it is tried again with the next step", failure)
        with self._lock:
            self._errors.append(failure)
            self._failed = True

    def _next(self) -> DiskStep | None:
        """The newest step that is here and to stay, and is not there; it is held until its upload has ended."""
        with self._lock:
            self._up_to = self._newest or 0
            awaited = frozenset(self._awaited)
        if not self._tidy:
            self._forget_cut_off()
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
        self._held = set()
        for number in sorted((here.keys() & kept) - self._there, reverse=True):
            step = here[number]
            if number in there and same_step(step.path, there[number]):
                self._arrived(there[number])
            elif step.whole:
                # Nothing that waits for the network or the disk is done under the lock: saves wait for it.
                with self._lock:
                    if number in self._going:
                        self._held.add(number)
                        continue
                    self._uploading = number
                if step.path.exists():  # retention may just have taken it
                    return step
        with self._lock:
            self._uploading = None
            left_out = awaited - self._there - here.keys()
            self._awaited -= awaited - self._held
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
        listed = self.remote.sizes(folder)
        for record in manifest.files:
            size = listed.get(record.path)
            if size != record.size:  # a listing may lag behind
                size = self.remote.size(f"{folder}/{record.path}")
            if size != record.size:
                sent.clear()
                raise WriteError(f"{folder}/{record.path} arrived with {size or 0} bytes of {record.size}")
        with contextlib.suppress(CallError):  # told of at the start
            self.remote.give_up(self.remote.cut_off(folder))
        if step.pinned:
            self.remote.put_bytes(b"", f"{folder}/{PIN}")
        self.remote.put_bytes(data, f"{folder}/{MANIFEST}")  # the commit
        self.remote.remove([f"{folder}/{UPLOADING}"])
        self._there.add(step.step)
        self._sent.clear()
        self._move_tracker()
        seconds = time.monotonic() - begun
        self._write_event(
            "upload_durable", step=step.step, bytes=manifest.nbytes, seconds=seconds, url=str(self.remote)
        )
        rate = f"{file_size(manifest.nbytes / max(seconds, 1e-6))}/s"
        _log.info("step %s uploaded: %s in %s (%s)", step.step, file_size(manifest.nbytes), duration(seconds), rate)
        self._retained = False

    def _retain(self) -> None:
        """Let what is there be what is to stay: after uploads, and at a start, since a kill may have come between."""
        if self._retained or self._retention.keeps_all:
            return
        try:
            steps = self._ours_there()
            plan_remote(steps, self._retention).carry_out()
            remove_unfinished(steps)  # all that is to be there is: none of them waits for being gone on with
            self._retained = True
        except CallError as error:  # no step is lost by it
            _log.warning(
                "%s keeps more steps than it is to: %s; it is tried again after the next upload", self.remote, error
            )

    def _arrived(self, step: RemoteStep) -> None:
        """A step of this run is there already; what a kill right after its commit left undone is done."""
        self._there.add(step.step)
        if UPLOADING in step.sizes:
            self.remote.remove([f"{step.folder}/{UPLOADING}"])
        if step.step == max(self._there) and tracker_of(self.remote) != step.step:
            self._move_tracker()

    def _move_tracker(self) -> None:
        self.remote.put_bytes(str(max(self._there)).encode(), TRACKER)

    def _forget_cut_off(self) -> None:
        """Parts of files that a killed process had on their way are no objects, and are billed until somebody says that
        nothing will come of them."""
        try:
            found = self.remote.cut_off("")
            self.remote.give_up(one for one in found if _is_of_run(one.name))
        except OutageError:
            raise
        except CallError as error:
            _log.warning(
                "%s; what killed uploads leave stays there, and costs money: let a lifecycle rule of the bucket abort "
                "incomplete multipart uploads", error,
            )  # fmt: skip

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
        if other.sizes and not other.unfinished:
            into = set_aside(self.remote, [other])
            _log.warning("%s/%s was another step than the one here; it is now in %s", self.remote, folder, into)
        self.remote.put_bytes(str(manifest.run_id).encode(), f"{folder}/{UPLOADING}")

    def _write_event(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write(event, **fields)


def _is_of_run(name: str) -> bool:
    """Whether an object is of a step of the run itself, and not of what else may lie below its URL."""
    folder = name.partition("/")[0]
    return step_number(Path(folder)) is not None or folder.startswith("set_aside_")


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
