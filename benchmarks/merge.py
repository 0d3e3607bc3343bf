"""merge against verl's merger and against `cp` + fsync, on the same FSDP2 checkpoints.

    python benchmarks/merge.py [--rounds 5] [--work DIR] [--json FILE]

A checkpoint of Qwen2-0.5B's shape on 2 and on 8 ranks, and a tiny one; each contender is a fresh process, imports
included, and they take turns. `cp` copies as many bytes as the export has.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from making import HALF_B, TINY, make
from measuring import Contender, Sample, alternate, table, write_json

import milepost

COPY = "import os, shutil, sys\nshutil.copyfile(*sys.argv[1:])\nfd = os.open(sys.argv[2], os.O_RDONLY)\nos.fsync(fd)"


def main() -> None:
    """Make the checkpoints, measure, print a table a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where the checkpoints go (7 GB); default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for case, shape, world_size in (("tiny, W=2", TINY, 2), ("0.5 B, W=2", HALF_B, 2), ("0.5 B, W=8", HALF_B, 8)):
            role = Path(work) / "actor"
            nbytes = make(role, shape, world_size)
            print(f"{case}: {nbytes / 1e6:.0f} MB in float32", file=sys.stderr)
            milepost.merge(role, Path(work) / "export")  # what `cp` copies: the export in float32
            results[case] = alternate(_contenders(Path(work), role), options.rounds)
            print(f"\n{case}")
            print("\n".join(table(results[case], "milepost, bf16")), flush=True)
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

    merge = [sys.executable, "-m", "milepost", "merge", "-q", str(role), str(out)]
    contenders = [
        Contender("milepost, bf16", [*merge, "--dtype", "bf16"], clear),
        Contender("milepost, keep", merge, clear),
        Contender(
            "cp + fsync, float32",
            [sys.executable, "-S", "-c", COPY, str(work / "export" / "model.safetensors"), str(out / "copy")],
            make_room,
        ),
    ]
    if find_spec("verl"):
        verl = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        paths = ["--local_dir", str(role), "--target_dir", str(out)]
        contenders.append(Contender("verl 0.9.1, bf16", [*verl, *paths], clear))
    return contenders


if __name__ == "__main__":
    main()
