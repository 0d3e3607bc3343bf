"""What saves cost training: seconds a step with none, with one at every step behind its back, and with one that blocks.

    python benchmarks/train_overhead.py [--rounds 15] [--steps 1] [--tiny] [--work DIR] [--json FILE]

Two gloo ranks of this machine train an actor and a critic of a Qwen2 shape under FSDP2 on random tokens, with the
passes that a step of PPO makes of them: log-probabilities, values, then an update of each. The engines, the optimizer
and the manager are those of `milepost train`; there is no rollout, which would only make a step longer. A block is some
steps of one kind, each begun with its save, and ends once the last save is durable. Kinds take turns; a round before
the others is not counted.

Cores that train have no time to spare, so what a save costs them is its processor time, which a machine that is shared
blurs far less than the clock: `CPU s` is that of all threads of both ranks. Each cost is the median of the rounds' own
ratios to `none`, with the middle half of them behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import RANK, on_ranks
from making import Shape
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from milepost import CheckpointManager
from milepost.engines.fsdp import MESH_DIM, FsdpEngine, Sharding, shard
from milepost.engines.optim import OptimizerSettings

RANKS = 2
KINDS = ("none", "background", "blocking")


@dataclass(frozen=True)
class Work:
    """The models, and what a rank's step goes through: sequences of so many tokens."""

    shape: Shape
    sequences: int
    tokens: int


FULL = Work(Shape(384, 1024, 6, 6, 2, 4096), 8, 256)
TINY = Work(Shape(64, 128, 2, 4, 2, 256), 2, 32)


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps of a block")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--work", type=Path, help="where the steps go; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        size = "tiny" if given.tiny else "full"
        results = on_ranks(__file__, RANKS, work, size, given.rounds, given.steps)
    print(f"\n{results['nbytes'] / 1e6:.0f} MB of state on each of {RANKS} ranks, {given.steps} steps a block")
    print("\n".join(table(results["seconds"], results["cpu"], results["stalls"])))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def table(seconds: dict[str, list[float]], cpu: dict[str, list[float]], stalls: dict[str, list[float]]) -> list[str]:
    """Medians as lines."""
    heads = f"{'s a step':>10}{'cost % (middle half)':>24}{'CPU s':>9}{'cost % (middle half)':>24}{'stall s':>9}"
    rows = [f"{'a save at every step':22}{heads}"]
    for kind in KINDS:
        stall = statistics.median(stalls[kind]) if stalls[kind] else 0.0
        clock, processor = (
            f"{statistics.median(of[kind]):{width}.3f}{cost(of[kind], of['none']):>24}"
            for of, width in ((seconds, 10), (cpu, 9))
        )
        rows.append(f"{kind:22}{clock}{processor}{stall:9.3f}")
    return rows


def cost(samples: list[float], base: list[float]) -> str:
    """By how much more than the base of its round each sample is, in per cent: the median and the middle half."""
    ratios = sorted(100 * (one / other - 1) for one, other in zip(samples, base, strict=True))
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.2f} ({ratios[quarter]:.1f} to {ratios[-1 - quarter]:.1f})"


def rank_main(out: Path, work: Path, size: str, rounds: int, steps: int) -> None:
    """What each rank does: build the models once, then train block after block."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = TINY if size == "tiny" else FULL
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(MESH_DIM,))
    torch.manual_seed(0)
    roles = {name: build(given.shape, mesh) for name in ("actor", "critic")}
    nbytes = sum(
        view.nbytes for engine in roles.values() for tensor in engine.tensors().values() for _, view in tensor.boxes
    )
    root = work / "run"
    manager = CheckpointManager(root, roles, keep_last=1)
    manager.resume()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    stalls: dict[str, list[float]] = {kind: [] for kind in KINDS}
    done = 0
    for number in range(rounds + 1):
        for kind in KINDS:
            dist.barrier()
            if dist.get_rank() == 0:
                os.sync()
            dist.barrier()
            begun, before = time.perf_counter(), time.process_time()
            for _ in range(steps):
                done += 1
                if kind != "none":
                    stall = timed(lambda: manager.save(done, blocking=kind == "blocking"))  # noqa: B023  called at once
                    if number:
                        stalls[kind].append(stall)
                for engine in roles.values():
                    step(engine, given, done)
            manager.wait()
            taken = torch.tensor((time.perf_counter() - begun) / steps, dtype=torch.double)
            busy = torch.tensor((time.process_time() - before) / steps, dtype=torch.double)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(busy)
            if dist.get_rank() == 0:
                said = f"{float(taken):8.3f} s a step, {float(busy):8.3f} s of CPU"
                print(f"  round {number}  {kind:12}{said}", file=sys.stderr, flush=True)
            if number:
                seconds[kind].append(float(taken))
                cpu[kind].append(float(busy))
    manager.close()
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"nbytes": nbytes, "seconds": seconds, "cpu": cpu, "stalls": stalls}))
        shutil.rmtree(root)
    dist.barrier()
    dist.destroy_process_group()


def build(shape: Shape, mesh: DeviceMesh) -> FsdpEngine:
    """A model of the shape, sharded."""
    model: nn.Module = AutoModelForCausalLM.from_config(shape.config())
    shard(model, mesh, Sharding())
    settings = OptimizerSettings(1e-5, (0.9, 0.95), 0.01, lambda step: 1.0, 1.0)
    return FsdpEngine(model, mesh, optimizer=settings)


def step(engine: FsdpEngine, given: Work, seed: int) -> None:
    """One pass without gradients over all sequences, then one update in two micro-batches."""
    generator = torch.Generator().manual_seed(seed * RANKS + dist.get_rank())
    ids = torch.randint(given.shape.vocabulary, (given.sequences, given.tokens), generator=generator)
    halves: tuple[Any, ...] = ids.chunk(2)
    with torch.no_grad():
        for part in halves:
            engine.model(input_ids=part)
    for part in halves:
        logits = engine.forward(input_ids=part).logits
        engine.backward(logits.logsumexp(-1).mean(), last=part is halves[-1])
    engine.step()
    engine.advance_schedule()


def timed(act: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
