"""Processes that talk to a server, forked from one that has everything loaded: each costs a fraction of a second, and
can be killed at any request.

    python -m remote_sessions     one session for each line of JSON on stdin; says its process id, then how it ended
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from milepost.checkpoint.litter import sweep
from milepost.checkpoint.remote.fetching import fetch_newest
from milepost.checkpoint.remote.folder import Remote
from milepost.checkpoint.remote.mirror import Mirror
from milepost.checkpoint.retention import Retention
from milepost.checkpoint.steps import scan

TESTS = Path(__file__).parent


class Sessions:
    """The process, and how to ask it. environment: what it needs to find the server."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "remote_sessions"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=TESTS, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._pid = 0

    def start(self, kind: str, root: Path, url: str, **options: Any) -> None:
        """Start a session in a run's folder. "mirror": it brings to the URL what is to be done there; the options are
        those of its retention. "fetch": it brings the newest step from there."""
        assert self._process.stdin is not None
        job = {"kind": kind, "root": str(root), "url": url, "options": options}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._pid = int(self._said())

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self._pid, signal.SIGKILL)

    def ended(self) -> int:
        """Wait for the session's end; 0 where all went well, -9 where it was killed."""
        return int(self._said())

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process of the sessions is gone"
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def session(kind: str, root: Path, url: str, **options: Any) -> None:
    """What a session does."""
    if kind == "mirror":
        steps = [step.step for step in scan(root)]
        mirror = Mirror(Remote(url), root, Retention(**options))
        mirror.begin(max(steps, default=0))
        mirror.close()
    else:
        sweep(root)
        fetch_newest(Remote(url), root, ())


def _serve() -> None:
    import s3fs  # noqa: F401  loaded before a session is forked

    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                session(job["kind"], Path(job["root"]), job["url"], **job["options"])
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
