"""Where a worker process begins: `python -m milepost.trainer.entry`, as torchrun's agent starts it.

Importing torch takes seconds. A Ctrl-C in them must end the process, and not print a page of importing.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Import the worker and be it; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from milepost.trainer import worker  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return worker.main()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what a dead rank left of a process group could keep the interpreter from ending.
    os._exit(status)
