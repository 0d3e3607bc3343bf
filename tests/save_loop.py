"""A program for tests that kill it: forks savers from a process that has torch loaded, so that each costs milliseconds.

Reads commands from stdin, one a line, and answers each saver with two lines: its process id, then, once it is gone, its
exit status as `os.waitpid` gives it.

    loop ROOT ACK           resume, then save step after step for ever
    once ROOT ACK K         resume, save one step, and die by SIGKILL right before the K-th change of a file below ROOT

A saver appends the number of each step to the file ACK once `save` has returned.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_engine import Run


def save_steps(root: Path, ack: Path, count: int | None) -> None:
    run = Run(root, keep_last=2)
    run.manager.resume()
    first = run.manager.report.next_step
    fd = os.open(ack, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in itertools.count(first) if count is None else range(first, first + count):
        run.train(step)
        os.write(fd, f"{step}\n".encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_change(change: int, root: Path, act: Callable[[], None]) -> None:
    """Call `act` right before the given change (counted from 1) of a file or directory below `root`."""
    seen = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            path = args[0]
        else:
            return
        # Inside a removed tree paths are relative to its open directory.
        below = str(path).startswith(str(root)) or event in ("os.remove", "os.rmdir")
        if below and next(seen) == change:
            act()

    sys.addaudithook(hook)


def main() -> None:
    for line in sys.stdin:
        command, root, ack, *change = line.split()
        pid = os.fork()
        if pid == 0:
            if change:
                before_change(int(change[0]), Path(root), die)
            save_steps(Path(root), Path(ack), None if command == "loop" else 1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
