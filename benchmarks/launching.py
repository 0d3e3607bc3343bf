"""The ranks of a benchmark: its own file, started again under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANK = "--rank"
"""The first argument of a file that is started as a rank; the second is the file in which rank 0 leaves its results."""


def on_ranks(program: str, ranks: int, *arguments: object) -> Any:
    """Start `program --rank RESULTS [arguments]` on so many ranks of this machine, a thread each; returns what rank 0
    has written as JSON. Raises CalledProcessError where a rank fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [*torchrun, program, RANK, str(results), *map(str, arguments)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(results.read_text())
