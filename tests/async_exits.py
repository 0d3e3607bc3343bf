"""A program for tests: a process ends, in one way or another, while a step of its is on its way to a slow disk.

    async_exits.py ROOT

Forks one saver for each way, each with a folder of its own in ROOT, and prints their exit statuses as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tiny_engine import Run

from milepost.checkpoint.steps import scan

WAYS = ("end", "interrupt", "terminate", "close", "kill")


def slow_disk(seconds: float) -> None:
    flush = os.fsync

    def fsync(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        flush(fd)

    os.fsync = fsync


def save(root: Path, way: str) -> None:
    run = Run(root)
    run.manager.resume()
    run.train(1)
    slow_disk(0.03)
    run.reach(2)
    run.manager.save(2, blocking=False)
    assert [step.step for step in scan(root)] == [1]
    run.reach(3)
    if way == "close":
        run.manager.close()
        assert [step.step for step in scan(root)] == [1, 2]
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "terminate":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    elif way == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  of the traceback that Python prints
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def main() -> None:
    base = Path(sys.argv[1])
    pids = {}
    for way in WAYS:
        pid = os.fork()
        if pid == 0:
            save(base / way, way)
            return  # to the end of the interpreter
        pids[way] = pid
    statuses = {way: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for way, pid in pids.items()}
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
