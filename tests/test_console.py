"""What long work shows: a bar with bytes, rate and time left on a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from milepost import console

WORK = (
    "import time\n"
    "from milepost.console import bytes_progress\n"
    "with bytes_progress('merge', 4 * 10**9) as progress:\n"
    "    for _ in range(20):\n"
    "        progress(10**8)\n"
    "        time.sleep(0.1)\n"
)


def on_a_terminal(program: str) -> str:
    """What a program's stderr shows on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # Linux's way to say that the other side has closed
                break
            if not data:
                break
            shown += data
    os.close(ours)
    assert process.returncode == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_a_terminal_shows_bytes_rate_and_time_left() -> None:
    shown = on_a_terminal(WORK)
    assert re.search(r"merge .*[━╸].* [01]\.\d/4\.0 GB +\d+(\.\d)? [MG]B/s +0:00:\d\d", shown), shown[-2000:]


def test_a_log_has_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    with console.bytes_progress("merge", 10**9) as progress:
        for _ in range(45):
            now[0] += 1
            progress(10**7)
    # 10 MB a second of 1 GB
    assert capsys.readouterr().err.splitlines() == [
        f"merge: {done} MB of 1.0 GB, 10 MB/s, {left} left"
        for done, left in ((100, "1 min 30 s"), (200, "1 min 20 s"), (300, "1 min 10 s"), (400, "1 min"))
    ]


def test_short_or_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    for quiet, step in ((False, 0.5), (True, 60.0)):
        with console.bytes_progress("merge", 100, quiet=quiet) as progress:
            for _ in range(10):
                now[0] += step
                progress(10)
    assert capsys.readouterr().err == ""
