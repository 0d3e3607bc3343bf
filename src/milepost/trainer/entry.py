"""Where a worker process begins: `python -m milepost.trainer.entry`, as torchrun's agent starts it.

Importing torch takes seconds. A Ctrl-C in them must end the process, and not print a page of importing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

AGENT = "MILEPOST_AGENT"
"""Environment variable: the process id of the agent that starts the workers."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Import the worker and be it; returns its exit status."""
    if "RANK" in os.environ:
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from milepost.trainer import worker  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return worker.main()


def die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun's agent dies: an orphan would train on and write into the run."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.get(AGENT, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what a dead rank left of a process group could keep the interpreter from ending.
    os._exit(status)
