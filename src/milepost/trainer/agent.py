"""torchrun's agent with milepost's exit status: starts the workers of one machine, and restarts them when one dies.

    python -m milepost.trainer.agent <torchrun's arguments>

torchrun itself ends every failed run with status 1 and a page of traceback, and would restart a worker that found, say,
a damaged checkpoint. A worker that knows that no restart can help leaves its status in a file instead.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from milepost.checkpoint.events import EventLog
from milepost.errors import MilepostError
from milepost.trainer.launch import EVENTS_FILE, VERDICT_FILE


def main(arguments: Sequence[str]) -> int:
    """Run to the end; returns 0, a worker's verdict, 3 for workers that kept failing, or 128 + a signal's number."""
    # Importing torch takes seconds: a Ctrl-C in them must end the process, not print a page of importing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_tell_of_death)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="milepost-") as directory:
        verdict = Path(directory) / "verdict"
        os.environ[VERDICT_FILE] = str(verdict)
        try:
            run.run(run.parse_args(list(arguments)))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            if not verdict.exists():
                rank, failure = error.get_first_failure()
                how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
                sys.stderr.write(f"milepost: rank {rank} ended with {how} and no restarts are left; see above\n")
                return MilepostError.exit_status
        except SignalException as signalled:
            # Only the agent knows: its workers get the same signal when one of them has died.
            if EVENTS_FILE in os.environ:
                EventLog(Path(os.environ[EVENTS_FILE])).write("stop", reason="signal")
            return 128 + int(signalled.sigval)
        return int(verdict.read_text()) if verdict.exists() else 0


def _tell_of_death(record: logging.LogRecord) -> bool:
    """Say in a line of ours what torchrun logs of a worker that ended badly; other records pass."""
    if not record.getMessage().startswith("failed (exitcode") or not isinstance(record.args, tuple):
        return True
    code, local_rank, pid = record.args[:3]
    how = f"signal {-code}" if isinstance(code, int) and code < 0 else f"exit status {code}"
    sys.stderr.write(f"milepost: worker {local_rank} of this machine (pid {pid}) ended with {how}\n")
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
