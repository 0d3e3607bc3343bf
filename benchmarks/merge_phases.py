"""Where the time of one merge to bfloat16 goes; a part of `benchmarks/merge.py`: merge_phases.py CHECKPOINT OUT.

Prints seconds as JSON: start (Python, numpy, milepost's modules), open (headers, and names put right), move (read, cast
and write, with the flush that goes on meanwhile), flush (what is left of it), rest. What runs is the command line
itself, its functions wrapped in clocks.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `milepost` does for itself

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPENT = dict.fromkeys(("open", "move", "flush"), 0.0)


def main() -> None:
    """Merge, then print."""
    born = _born()
    from milepost.cli import app, merging  # noqa: PLC0415  the start is a part of what is measured
    from milepost.jobs import merge  # noqa: PLC0415

    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    merging.found = _timed("open", merging.found)
    merging.prepare = _timed("open", merging.prepare)
    merge.execute = _timed("move", merge.execute)
    os.fsync = _timed("flush", os.fsync)
    status = app.run(["merge", "-q", *sys.argv[1:3], "--dtype", "bf16"])
    rest = time.clock_gettime(time.CLOCK_BOOTTIME) - started - sum(SPENT.values())
    print(json.dumps({"start": started - born, **SPENT, "rest": rest}))
    sys.exit(status)


def _timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            SPENT[phase] += time.perf_counter() - begun

    return call


def _born() -> float:
    """When this process was started, in seconds since boot, to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
