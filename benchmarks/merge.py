"""merge against verl's merger and against `cp` + fsync, on the same FSDP2 checkpoints, and where its time goes.

    python benchmarks/merge.py [--rounds 5] [--cases tiny 0.5B-W2 0.5B-W8] [--work DIR] [--json FILE]

A checkpoint of Qwen2-0.5B's shape on 2 and on 8 ranks, and a tiny one; each contender is a fresh process, imports
included, and they take turns. `cp` copies as many bytes as the export has.

milepost flushes what it writes to disk before it ends, verl does not. So there are two ratios, of the commands as they
are, and with the flush of what a command left unflushed; and a milepost that is kept from flushing (its fsync does
nothing), to be compared with verl as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from making import HALF_B, TINY, make
from measuring import Contender, Sample, alternate, table, write_json

import milepost

UNFLUSHED = (
    "import os\n"
    "os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')\n"
    "os.fsync = lambda fd: None\n"
    "from milepost.transfer import execute\n"
    "execute.start_flush = lambda *_: None\n"
    "from milepost.cli import main\n"
    "main()"
)
PHASES = Path(__file__).with_name("merge_phases.py")
CASES = {"tiny": (TINY, 2), "0.5B-W2": (HALF_B, 2), "0.5B-W8": (HALF_B, 8)}
COPY = "import os, shutil, sys\nshutil.copyfile(*sys.argv[1:])\nfd = os.open(sys.argv[2], os.O_RDONLY)\nos.fsync(fd)"


def main() -> None:
    """Make the checkpoints, measure, print a table a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where the checkpoints go (7 GB); default: a temporary directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for case in options.cases:
            shape, world_size = CASES[case]
            role = Path(work) / "actor"
            nbytes = make(role, shape, world_size)
            print(f"{case}: {nbytes / 1e6:.0f} MB in float32", file=sys.stderr)
            milepost.merge(role, Path(work) / "export")  # what `cp` copies: the export in float32
            results[case] = alternate(_contenders(Path(work), role), options.rounds)
            print(f"\n{case}")
            print("\n".join(table(results[case], "milepost, bf16")))
            print(f"time of bf16: {_phases(role, Path(work) / 'out', options.rounds)}", flush=True)
            shutil.rmtree(role)
            shutil.rmtree(Path(work) / "export")
    if options.json:
        write_json(options.json, **results)


def _contenders(work: Path, role: Path) -> list[Contender]:
    out = work / "out"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def make_room() -> None:
        clear()
        out.mkdir()

    arguments = ["merge", "-q", str(role), str(out)]
    merge = [sys.executable, "-m", "milepost", *arguments]
    unflushed = [sys.executable, "-c", UNFLUSHED, *arguments]
    contenders = [
        Contender("milepost, bf16", [*merge, "--dtype", "bf16"], clear, out),
        Contender("milepost, bf16, unflushed", [*unflushed, "--dtype", "bf16"], clear, out),
        Contender("milepost, keep", merge, clear, out),
        Contender(
            "cp + fsync, float32",
            [sys.executable, "-S", "-c", COPY, str(work / "export" / "model.safetensors"), str(out / "copy")],
            make_room,
            out,
        ),
    ]
    if find_spec("verl"):
        verl = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        paths = ["--local_dir", str(role), "--target_dir", str(out)]
        contenders.append(Contender("verl 0.9.1, bf16", [*verl, *paths], clear, out))
    return contenders


def _phases(role: Path, out: Path, rounds: int) -> str:
    """Medians of the parts of a merge's time, in milliseconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seen: dict[str, list[float]] = {}
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        command = [sys.executable, str(PHASES), str(role), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=600)
        for phase, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            seen.setdefault(phase, []).append(seconds)
    return ", ".join(f"{phase} {statistics.median(seconds) * 1e3:.0f} ms" for phase, seconds in seen.items())


if __name__ == "__main__":
    main()
