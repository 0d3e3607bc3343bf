"""torchrun's agent with milepost's exit status: starts the workers of one machine, and restarts them when one dies.

    python -m milepost.trainer.agent <torchrun's arguments>

torchrun itself ends every failed run with status 1 and a page of traceback, and would restart a worker that found, say,
a damaged checkpoint. A worker that knows that no restart can help leaves its status in a file instead.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from milepost.errors import MilepostError
from milepost.trainer.launch import VERDICT_FILE


def main(arguments: Sequence[str]) -> int:
    """Run to the end; returns 0, a worker's verdict, 3 for workers that kept failing, or 128 + a signal's number."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
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
            return 128 + int(signalled.sigval)
        return int(verdict.read_text()) if verdict.exists() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
