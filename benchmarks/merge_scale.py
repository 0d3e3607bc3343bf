"""merge of ever larger checkpoints: does its memory stay flat, and its time grow with the bytes alone?

    python benchmarks/merge_scale.py [--sizes 1,4,16] [--work DIR] [--json FILE]

The checkpoints are sparse files of 8 ranks, so they cost no disk to hold; what is written (bfloat16, half of the
float32 size) does. Each merge runs with its data segment limited to 512 MiB, so that memory that grows with the model
is an error and not a number. CPU seconds tell whether time is linear even on a machine that does other work. Sizes that
the disk cannot take are left out, and named.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from making import Shape, make
from measuring import Sample, run, write_json

LIMIT = 512 * 2**20
WORLD_SIZE = 8
# One layer of this width is about 0.27 GB in float32; the number of layers makes the size.
WIDTH = Shape(2048, 8192, 0, 16, 8, 32000)


def main() -> None:
    """Make, merge, print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16", help="float32 gigabytes, separated by commas")
    parser.add_argument("--work", type=Path, help="where files go; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[Sample]]] = {}
    print(
        f"{'float32 GB':>10}{'wall s':>9}{'GB/s':>7}{'cpu s':>8}{'cpu s/GB':>10}{'peak RSS MB':>13}{'anonymous MB':>14}"
    )
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for wanted in (float(text) for text in options.sizes.split(",")):
            free = shutil.disk_usage(work).free
            if free < wanted * 1e9 / 2 * 1.2:
                print(f"{wanted:10.0f}  left out: it writes {wanted / 2:.0f} GB, {free / 1e9:.0f} GB are free")
                continue
            role, out = Path(work) / "actor", Path(work) / "out"
            nbytes = make(role, _shape(wanted), WORLD_SIZE, sparse=True)
            merge = [sys.executable, "-m", "milepost", "merge", "-q", str(role), str(out), "--dtype", "bf16"]
            sample = run(["prlimit", f"--data={LIMIT}", "--", *merge])
            results[f"{wanted:g} GB"] = {"milepost": [sample]}
            rss, anon = sample.peak_rss / 1e6, sample.peak_anon / 1e6
            size, wall, cpu = nbytes / 1e9, sample.wall, sample.cpu
            speed = f"{size:10.1f}{wall:9.1f}{size / wall:7.2f}{cpu:8.1f}{cpu / size:10.2f}"
            print(f"{speed}{rss:13.0f}{anon:14.0f}", flush=True)
            shutil.rmtree(role)
            shutil.rmtree(out)
    if options.json:
        write_json(options.json, **results)


def _shape(gigabytes: float) -> Shape:
    w = WIDTH
    a_layer = 4 * (
        2 * w.hidden * w.hidden + 2 * w.hidden * w.hidden * w.kv_heads // w.heads + 3 * w.hidden * w.intermediate
    )
    layers = max(1, round(gigabytes * 1e9 / a_layer))
    return Shape(w.hidden, w.intermediate, layers, w.heads, w.kv_heads, w.vocabulary)


if __name__ == "__main__":
    main()
