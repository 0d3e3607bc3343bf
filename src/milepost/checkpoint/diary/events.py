"""The diary of a run: `events.jsonl`, one JSON object a line, appended to by rank 0 and never rewritten.

Each line has "time" (unix seconds), "clock" (seconds of this machine's clock that is never set) and "event": start,
kill_seen, resume, step, validation, save_requested, save_durable, save_failed, upload_durable, upload_failed,
upload_skipped, remote_unreachable, set_aside, stall, stall_over, stop. A stall is told by each rank that it holds up.
What a killed process leaves is at worst one torn line, which readers leave out and the next writer ends.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milepost.checkpoint.background import Background
from milepost.wording import counted

EVENTS = "events.jsonl"
_PATIENCE = 5.0  # seconds
_log = logging.getLogger(__name__)


class EventLog:
    """Appends events to a file. It never raises on a full or failing disk, and does not wait long for one that hangs: a
    diary must not stop the training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._late: Background[None] | None = None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Numbers that are not finite are written as null."""
        clocks = {"time": time.time(), "clock": round(time.monotonic(), 3)}
        line = json.dumps(plain_json({**clocks, "event": event, **fields}), allow_nan=False)
        if self._late is not None and not self._late.ended:
            _log.warning("%s: event %s was not written: the file system does not answer", self.path, event)
            return
        self._late = Background(lambda: self._append(event, line), "milepost-diary")
        self._late.wait(_PATIENCE)

    def _append(self, event: str, line: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write a line, so that lines of two writers do not mix.
            with self.path.open("ab", buffering=0) as file:
                file.write((b"" if self._at_line_start() else b"\n") + line.encode() + b"\n")
        except OSError as error:
            _log.warning("%s: event %s was not written: %s", self.path, event, error.strerror)

    def _at_line_start(self) -> bool:
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def plain_json(value: Any) -> Any:
    """As JSON knows it: mappings, lists, strings, finite numbers; numpy's and torch's scalars become numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_json(item) for item in value]
    if hasattr(value, "item"):
        return plain_json(value.item())
    return str(value)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every readable event, oldest first; empty where there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A session that ended without saying so.

    last_step:       the last step it finished
    committed_step:  the step that training goes on from, or could; 0 where none was saved
    lost_steps:      how many steps after that it had finished
    attempt:         the session's restart count
    """

    last_step: int
    committed_step: int
    lost_steps: int
    attempt: int


def interrupted_session(events: Sequence[Mapping[str, Any]], resumed_from: int | None = None) -> Interrupted | None:
    """What the session before this process's lost, where it was killed; None where it stopped in order or never was.

    resumed_from:  the step that this process goes on from; by default the last that the killed session saved

    A session begins with its `start`, or with its `resume` where nobody wrote a start. The last one, if it is this very
    process's, is the present.
    """
    sessions: list[list[Mapping[str, Any]]] = []
    for event in events:
        if begins_session(event, sessions[-1] if sessions else []):
            sessions.append([])
        if sessions:
            sessions[-1].append(event)
    if sessions and _is_this_process(sessions[-1][0]):
        sessions.pop()
    if not sessions or any(event["event"] == "stop" for event in sessions[-1]):
        return None
    session = sessions[-1]
    saved = [_number(event.get("step")) for event in session if event["event"] == "save_durable"]
    saved += [_number(event.get("from_step")) for event in session if event["event"] == "resume"]
    finished = [_number(event.get("step")) for event in session if event["event"] == "step"]
    committed = max(saved, default=0) if resumed_from is None else resumed_from
    last = max([*saved, *finished, committed])
    return Interrupted(last, committed, last - committed, _number(session[0].get("attempt")))


def see_kill(log: EventLog, resumed_from: int | None) -> list[str]:
    """Note in the diary that the session before was killed, where it was; the line for the report of a start.
    resumed_from: as for `interrupted_session`"""
    try:
        events = read_events(log.path)
    except OSError as error:
        return [f"{log.path} cannot be read ({error.strerror}): how the session before ended is not known"]
    killed = interrupted_session(events, resumed_from)
    if killed is None:
        return []
    log.write("kill_seen", **asdict(killed))
    lost = f"{counted(killed.lost_steps, 'step')} after its last save lost" if killed.lost_steps else "nothing lost"
    return [f"the session before was killed after step {killed.last_step}: {lost}"]


def begins_session(event: Mapping[str, Any], session: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `event` opens a new session, rather than going on with `session`: a start does, and, where nobody writes
    starts, a second resume."""
    if event["event"] == "resume":
        return not session or any(earlier["event"] == "resume" for earlier in session)
    return bool(event["event"] == "start")


def _is_this_process(first: Mapping[str, Any]) -> bool:
    here = first.get("pid") == os.getpid() and first.get("host") in (None, socket.gethostname())
    return here and first["event"] == "start"


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
