"""Filling a Megatron model from a Hugging Face directory: `load_pretrained` by both methods, and the plain way.

    python benchmarks/load.py [--rounds 5] [--tiny] [--work DIR] [--json FILE]

Qwen2-0.5B's shape in bfloat16, on four gloo ranks of this machine, once as TP2 x PP2 and once as TP2 with two
data-parallel ranks. `sharded`: every rank reads its own boxes. `broadcast`: rank 0 reads and sends. `whole`: every rank
reads all files into a state dict and copies its part, as loaders do that know no boxes. The ranks start once and take
the contenders in turn; a round before the others is not counted. A time is that of the slowest rank, memory is what the
largest rank had beside its model.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import RANK, on_ranks
from making import HALF_B, TINY, Shape
from safetensors.torch import load_file, save_file

import milepost
from milepost.engines.megatron.model import build_chunks
from milepost.engines.megatron.parallel import Parallel, start
from milepost.engines.megatron.state import live_tensors
from milepost.layouts.huggingface import read_config
from milepost.mapping import expected

RANKS = 4
LAUNCHES = {"TP2 x PP2": Parallel(tensor=2, pipeline=2), "TP2 x DP2": Parallel(tensor=2)}


@dataclass(frozen=True)
class Sample:
    """One load.

    seconds:   of the slowest rank
    read:      bytes that all ranks together asked of files
    calls:     bytes that passed through their read calls: files, and under broadcast sockets
    received:  bytes that came from other ranks
    memory:    the most that one rank took beside its model, in bytes
    """

    seconds: float
    read: int
    calls: int
    received: int
    memory: int


def main() -> None:
    """Make the model, start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--work", type=Path, help="where the model goes; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        model = Path(work) / "model"
        total = make(model, TINY if given.tiny else HALF_B)
        results = {}
        for name in LAUNCHES:
            results[name] = on_ranks(__file__, RANKS, name, model, given.rounds)
            print(f"\n{name}, {total / 1e6:.0f} MB of weights, median of {given.rounds}")
            print("\n".join(table(results[name])))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def make(directory: Path, shape: Shape) -> int:
    """Write a model of random bfloat16 values in two files; returns the bytes of its weights."""
    directory.mkdir()
    shape.config().save_pretrained(directory)
    architecture = expected(read_config(directory))
    assert architecture is not None
    names = list(architecture.tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        tensors = {name: torch.randn(architecture.tensors[name]).bfloat16() for name in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(2 * torch.Size(shape).numel() for shape in architecture.tensors.values())


def table(samples: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians as lines."""
    rows = [f"{'':12}{'s':>8}{'x':>7}{'asked MB':>10}{'calls MB':>10}{'received MB':>13}{'memory MB':>11}"]
    base = statistics.median(sample["seconds"] for sample in samples["sharded"])
    for name, of_one in samples.items():
        middle = {key: statistics.median(sample[key] for sample in of_one) for key in of_one[0]}
        sizes = (middle["read"], middle["calls"], middle["received"], max(sample["memory"] for sample in of_one))
        shown = "".join(f"{size / 1e6:{width}.0f}" for size, width in zip(sizes, (10, 10, 13, 11), strict=True))
        rows.append(f"{name:12}{middle['seconds']:8.2f}{middle['seconds'] / base:7.2f}{shown}")
    return rows


def rank_main(out: Path, name: str, model: Path, rounds: int) -> None:
    """What each rank does: build the model once, then load it again and again."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    parallel, device = LAUNCHES[name], torch.device("cpu")
    start(parallel, device, 0)
    config = read_config(model)
    chunks = build_chunks(config, parallel, device, torch.bfloat16)
    contenders: dict[str, Callable[[], tuple[int, int]]] = {
        "sharded": lambda: load(chunks, model, "sharded"),
        "broadcast": lambda: load(chunks, model, "broadcast"),
        "whole": lambda: load_whole(chunks, model, config),
    }
    samples: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    checks = []
    for number in range(rounds + 1):
        for contender, act in contenders.items():
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.zero_()
            dist.barrier()
            sample = measured(act)
            checks.append([float(p.double().sum()) for chunk in chunks for p in chunk.parameters()])
            assert checks[-1] == checks[0], contender
            if number:
                samples[contender].append(asdict(sample))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


def load(chunks: list[Any], model: Path, method: str) -> tuple[int, int]:
    """Bytes asked of files, and received."""
    report = milepost.load_pretrained(chunks, model, method=method)
    return report.read, report.received


def load_whole(chunks: list[Any], model: Path, config: dict[str, Any]) -> tuple[int, int]:
    """The plain way: all files into one state dict, and each box copied from it."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= {name: value.clone() for name, value in load_file(file).items()}
    for name, tensor in live_tensors(chunks, config).items():
        for box, view in tensor.boxes:
            view.copy_(weights[name][box.slices()])
    return sum(value.nbytes for value in weights.values()), 0


def measured(act: Callable[[], tuple[int, int]]) -> Sample:
    """One load, over all ranks."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident, calls = _status("VmRSS"), _calls()
    begun = time.perf_counter()
    read, received = act()
    values = torch.tensor(
        [time.perf_counter() - begun, read, _calls() - calls, received, _status("VmHWM") - resident], dtype=torch.double
    )
    everyone = [torch.empty_like(values) for _ in range(RANKS)]
    dist.all_gather(everyone, values)
    stacked = torch.stack(everyone)
    total, largest = stacked.sum(0), stacked.max(0).values
    return Sample(float(largest[0]), *(int(total[n]) for n in (1, 2, 3)), int(largest[4]))


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _calls() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank_main(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
