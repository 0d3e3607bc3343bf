"""torchrun's agent with milepost's exit status: starts the workers of one machine, and restarts them when one dies.

    python -m milepost.trainer.agent <torchrun's arguments>

torchrun itself ends every failed run with status 1 and a page of traceback, and would restart a worker that found, say,
a damaged checkpoint. A worker that knows that no restart can help, or that was stopped in order, leaves its status in a
file instead. `milepost.trainer.elastic` is the agent itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.preemption import CLOSING, REQUEUE
from milepost.errors import MilepostError
from milepost.trainer.entry import AGENT
from milepost.trainer.launch import EVENTS_FILE, SHUTDOWN_TIMEOUT, STOP_SIGNALS_VARIABLE, VERDICT_FILE


def main(arguments: Sequence[str]) -> int:
    """Run to the end; returns 0, a worker's verdict, 75 for a run that was stopped in order, 3 for workers that kept
    failing, or 128 + a signal's number."""
    stops = [signal.Signals[name] for name in os.environ.get(STOP_SIGNALS_VARIABLE, "").split(",") if name]
    # Importing torch takes seconds: a signal in them must end the process, not print a page of importing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in stops:
        signal.signal(number, _leave)
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    from milepost.trainer.elastic import AgentStopped, run_agent  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_tell_of_death)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="milepost-") as directory:
        verdict = Path(directory) / "verdict"
        os.environ[VERDICT_FILE] = str(verdict)
        os.environ[AGENT] = str(os.getpid())
        patience = float(os.environ.get(SHUTDOWN_TIMEOUT, "30"))
        try:
            run_agent(arguments, stops, verdict.with_name(CLOSING), patience)
        except ChildFailedError as error:
            if not verdict.exists():
                rank, failure = error.get_first_failure()
                return _failed(rank, failure.exitcode, [one.exitcode for one in error.failures.values()], stops)
        except AgentStopped as stopped:
            return REQUEUE if not stopped.had_workers else 128 + stopped.number
        except SignalException as signalled:
            # Only the agent knows: its workers get the same signal when one of them has died.
            if EVENTS_FILE in os.environ:
                EventLog(Path(os.environ[EVENTS_FILE])).write("stop", reason="signal", signal=signalled.sigval.name)
            return REQUEUE if signalled.sigval in stops else 128 + int(signalled.sigval)
        finally:
            for number in stops:
                signal.signal(number, signal.SIG_IGN)  # all is over: one more must not take the place of the status
        return int(verdict.read_text()) if verdict.exists() else 0


def _leave(number: int, _frame: object) -> NoReturn:
    sys.exit(REQUEUE)  # nothing has begun


def _failed(rank: int, code: int, codes: Sequence[int], stops: Sequence[int]) -> int:
    """The status of workers that failed, with nobody's verdict."""
    stopped = {-number for number in stops} | {128 + number for number in stops}
    if set(codes) <= stopped:  # before they could take note of a signal: nothing had begun
        return REQUEUE
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    sys.stderr.write(f"milepost: rank {rank} ended with {how} and no restarts are left; see above\n")
    return MilepostError.exit_status


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
