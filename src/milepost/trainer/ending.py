"""How a worker ends, and what it says last: done, stopped in order, or one of two kinds of error.

torchrun restarts whatever fails. So under `milepost train` a worker that knows that no restart can help, or that was
asked to stop, leaves the exit status in a file and ends as if well; `milepost.trainer.agent` ends the run with it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from milepost.checkpoint.preemption import REQUEUE, RESIZE, StopSignals
from milepost.checkpoint.steps import step_name
from milepost.errors import LostRankError, MilepostError
from milepost.trainer.experience import JOINT
from milepost.trainer.loop import Stopped

_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker")
"""In the words of gloo and NCCL."""


def stopped(ending: Stopped, signals: StopSignals, verdict_file: str | None) -> int:
    """The exit status of a run that was asked to stop, left as `verdict` leaves it."""
    if ending.why.reason == RESIZE:
        # This machine's agent may not have seen yet that others come: it must not think that all is done.
        return 0 if signals.await_resize() else MilepostError.exit_status
    if verdict_file is None:
        return REQUEUE
    _leave_verdict(Path(verdict_file), REQUEUE)
    return 0


def told(ending: Stopped) -> str:
    """The last line of a run that was asked to stop."""
    if not ending.step:
        kept = "before the first step"
    else:
        kept = f"step {ending.step} is saved" if ending.saved else f"step {ending.step} is NOT saved"
    return (
        f"stopped on {ending.why.words}, {kept}; the same command goes on from there (exit status {REQUEUE}: requeue)"
    )


def done(root: Path, step: int, role: str) -> str:
    """The last line of a run that came to its end: where its model is, and what to do with it.

    role:  under which a step holds the policy
    """
    weights = root / step_name(step) / role
    policy = " --role policy" if role == JOINT else ""
    return f"done: step {step} is saved; milepost merge {weights} OUT{policy} makes a Hugging Face model of it"


def verdict(error: MilepostError, verdict_file: str | None) -> int:
    """Tell the user of an error that no restart can mend, and return the exit status. Who creates the file speaks for
    all ranks."""
    if os.environ.get("MILEPOST_DEBUG"):
        traceback.print_exception(error)
    if verdict_file is None:
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stderr.write(f"milepost: {error}\n")
        return error.exit_status
    if _leave_verdict(Path(verdict_file), error.exit_status):
        sys.stderr.write(f"milepost: {error}\n")
    return 0


def crash(error: Exception, root: Path) -> int:
    """Tell of an error that a restart may mend, in one line; torchrun sees the status and restarts all workers."""
    rank = os.environ.get("RANK", "0")
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("MILEPOST_DEBUG"):
        sys.stderr.write(trace)
    if isinstance(error, LostRankError) or any(words in str(error) for words in _PEER_GONE):
        sys.stderr.write(f"milepost: rank {rank}: another rank is gone, so this one stops\n")
        return MilepostError.exit_status
    file = root / f"crash_rank_{rank}.txt"
    where = f"traceback in {file}"
    try:
        file.write_text(trace, encoding="utf-8", errors="backslashreplace")
    except OSError:
        where = "for a traceback set MILEPOST_DEBUG=1"
    said = (str(error).strip().splitlines() or [""])[0]
    sys.stderr.write(f"milepost: rank {rank}: {type(error).__name__}: {said} ({where})\n")
    return MilepostError.exit_status


def _leave_verdict(file: Path, status: int) -> bool:
    """Leave the status for the agent, unless another rank has; whether this one spoke."""
    file.parent.mkdir(exist_ok=True)  # what tidies up /tmp may have taken it away from a long run
    try:
        with file.open("x") as out:
            out.write(str(status))
    except FileExistsError:
        return False
    return True
