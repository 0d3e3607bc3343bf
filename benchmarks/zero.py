"""merge of a ZeRO-3 checkpoint against DeepSpeed's own zero_to_fp32.py, on the same files.

    python benchmarks/zero.py [--rounds 5] [--world-size 2] [--work DIR] [--json FILE]

A checkpoint of Qwen2-0.5B's shape in DeepSpeed's files; each contender is a fresh process, imports included, and they
take turns. Before the first round both exports are compared, tensor by tensor. The files are written with torch.save in
DeepSpeed's structure and hold no moments, which neither side reads. milepost flushes what it writes to disk before it
ends, `zero_to_fp32` does not, so there are two ratios, as in `merge.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from making import HALF_B, TINY, Shape, make_zero3
from measuring import Contender, Sample, alternate, run, table, write_json

TAG = "global_step1"
COPY = "import os, shutil, sys\nshutil.copyfile(*sys.argv[1:])\nfd = os.open(sys.argv[2], os.O_RDONLY)\nos.fsync(fd)"


def main() -> None:
    """Make the checkpoint, compare the exports, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where the checkpoints go (8 GB); default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if find_spec("deepspeed") is None:
        raise SystemExit("deepspeed is not installed: pip install 'milepost[deepspeed]'")
    results: dict[str, dict[str, list[Sample]]] = {}
    cases: list[tuple[str, Shape]] = [("tiny", TINY), ("0.5 B", HALF_B)]
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name, shape in cases:
            case = f"{name}, W={options.world_size}"
            role = Path(work) / "checkpoint"
            nbytes = make_zero3(role, TAG, shape, options.world_size)
            print(f"{case}: {nbytes / 1e6:.0f} MB in float32", file=sys.stderr)
            results[case] = _measure(Path(work), role, options.rounds)
            print(f"\n{case}")
            print("\n".join(table(results[case], "milepost, keep")), flush=True)
            shutil.rmtree(role)
            shutil.rmtree(Path(work) / "export")
    if options.json:
        write_json(options.json, **results)


def _measure(work: Path, role: Path, rounds: int) -> dict[str, list[Sample]]:
    out = work / "out"
    merge = [sys.executable, "-m", "milepost", "merge", "-q", "--backend", "deepspeed", str(role)]
    script = shutil.copy(_script(), role)  # where DeepSpeed puts it
    theirs = [sys.executable, script, str(role)]
    run([*merge, str(work / "export")])
    run([*theirs, str(work / "theirs")])
    _compare(work / "export", work / "theirs")
    shutil.rmtree(work / "theirs")

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def make_room() -> None:
        clear()
        out.mkdir()

    copied = [str(work / "export" / "model.safetensors"), str(out / "copy")]
    samples = alternate(
        [
            Contender("milepost, keep", [*merge, str(out)], clear, out),
            Contender("milepost, bf16", [*merge, str(out), "--dtype", "bf16"], clear, out),
            Contender("cp + fsync, float32", [sys.executable, "-S", "-c", COPY, *copied], make_room, out),
            Contender("zero_to_fp32", [*theirs, str(out)], clear, out),
        ],
        rounds,
    )
    clear()
    return samples


def _script() -> str:
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "utils" / "zero_to_fp32.py")


def _compare(ours: Path, theirs: Path) -> None:
    """Raise unless both exports hold the same bits under the same names; a tied name counts once."""
    import torch  # noqa: PLC0415  the contenders have it for themselves
    from safetensors.torch import load_file  # noqa: PLC0415

    found = load_file(ours / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}
    for file in sorted(theirs.glob("pytorch_model*.bin")):
        expected |= torch.load(file, mmap=True)
    if not expected.keys() - found.keys() <= {"lm_head.weight"} or found.keys() - expected.keys():
        raise SystemExit(f"the exports hold other names: {sorted(expected.keys() ^ found.keys())[:5]}")
    for name, tensor in found.items():
        if not torch.equal(tensor, expected[name]):
            raise SystemExit(f"the exports differ in {name}")


if __name__ == "__main__":
    main()
