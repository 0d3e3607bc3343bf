"""Saving a sharded model with its Adam: how long training stands still, and how long until the step is on the disk.

    python benchmarks/save.py [--rounds 5] [--gigabytes 1.0] [--tiny] [--work DIR] [--json FILE]

Two gloo ranks of this machine hold an FSDP2 model whose weights and moments are `--gigabytes` on each. Contenders, each
as its users call it, take turns; a round before the others is not counted:

    milepost            manager.save: hashed, flushed, committed
    milepost async      manager.save(blocking=False), then manager.wait()
    torch.save          one file a rank; not flushed, so the flush is added to its total
    DCP save            torch.distributed.checkpoint.save, which flushes
    DCP async, thread   torch.distributed.checkpoint.async_save, then its future
    DCP async, process
    memcpy              the floor of a stall: this rank's bytes, copied once into memory that is there
    write + fsync       the floor of a total, through the system's cache
    write direct        the same, past it

`stall` is how long the call takes, `total` until all is flushed; both of the slower rank. `CPU s` is processor time
until then, of all threads of that rank, child processes left out. Memory is anonymous and shared, of a rank and its
child processes: `more` is the most beside what they had before the save, `kept` what stays between saves to be used
again.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
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
from measuring import MemoryWatch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

from milepost import CheckpointManager
from milepost.engines.fsdp import MESH_DIM, FsdpEngine, Sharding, shard
from milepost.engines.optim import OptimizerSettings

RANKS = 2
_CHUNK = 8 << 20
_WIDTH = 2048
_STATE_BYTES = 12  # of a parameter: float32, and two moments


@dataclass(frozen=True)
class Sample:
    """One save: seconds of the slower rank; the most memory of a rank beside what it had, and what stayed, in bytes."""

    stall: float
    total: float
    cpu: float
    more: int
    kept: int


class Block(nn.Module):
    """One unit of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))


class Model(nn.Module):
    """Blocks enough for so many bytes of state on each rank."""

    _no_split_modules = ("Block",)

    def __init__(self, nbytes: float, width: int) -> None:
        super().__init__()
        count = max(2, round(nbytes * RANKS / (_STATE_BYTES * width * (width + 1))))
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="state of each rank")
    parser.add_argument("--tiny", action="store_true", help="a few megabytes, to see that it runs")
    parser.add_argument("--work", type=Path, help="where the steps go; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    nbytes = 4e6 if given.tiny else given.gigabytes * 1e9
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        results = on_ranks(__file__, RANKS, work, nbytes, given.rounds)
    print(f"\n{results['nbytes'] / 1e6:.0f} MB on each of {RANKS} ranks, median of {given.rounds}")
    print("\n".join(table(results["samples"], results["kept"], results["nbytes"])))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def table(samples: dict[str, list[dict[str, Any]]], kept: dict[str, int], nbytes: int) -> list[str]:
    """Medians as lines; rates of one rank's bytes; `x`: against memcpy, and against milepost's blocking save."""
    heads = f"{'stall s':>9}{'x memcpy':>10}{'total s':>9}{'MB/s':>8}{'x milepost':>12}{'CPU s':>8}{'more MB':>9}"
    rows = [f"{'':20}{heads}{'kept MB':>9}"]
    copy = statistics.median(sample["stall"] for sample in samples["memcpy"])
    base = statistics.median(sample["total"] for sample in samples["milepost"])
    for name, of_one in samples.items():
        stall, total, cpu = (statistics.median(one[key] for one in of_one) for key in ("stall", "total", "cpu"))
        more = max(sample["more"] for sample in of_one)
        times = f"{stall:9.3f}{stall / copy:10.2f}{total:9.3f}{nbytes / total / 1e6:8.0f}{total / base:12.2f}"
        rows.append(f"{name:20}{times}{cpu:8.3f}{more / 1e6:9.0f}{kept[name] / 1e6:9.0f}")
    return rows


def rank_main(out: Path, work: Path, nbytes: float, rounds: int) -> None:
    """What each rank does: build the model once, then save it again and again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = build(nbytes)
    state = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state_tensors(engine)]
    own = sum(tensor.nbytes for tensor in state)
    manager = CheckpointManager(work / "milepost", {"actor": engine})
    background = CheckpointManager(work / "async", {"actor": engine})
    for one in (manager, background):
        one.resume()
    buffer = torch.empty(own, dtype=torch.uint8)
    buffer.fill_(1)
    contenders: dict[str, Callable[[int], Callable[[], None]]] = {
        "milepost": lambda step: finished(manager.save(step)),
        "milepost async": lambda step: then(background.save(step, blocking=False), background.wait),
        "torch.save": lambda step: then(
            torch_save(engine, work / f"torch{step}"), lambda: flush(work / f"torch{step}")
        ),
        "DCP save": lambda step: finished(dcp.save(dcp_state(engine), checkpoint_id=work / f"dcp{step}")),
        "DCP async, thread": lambda step: dcp_async(engine, work / f"thread{step}", AsyncCheckpointerType.THREAD),
        "DCP async, process": lambda step: dcp_async(engine, work / f"process{step}", AsyncCheckpointerType.PROCESS),
        "memcpy": lambda step: finished(memcpy(state, buffer)),
        "write + fsync": lambda step: finished(raw_write(buffer, work / f"raw{step}_{dist.get_rank()}", 0)),
        "write direct": lambda step: finished(raw_write(buffer, work / f"dir{step}_{dist.get_rank()}", os.O_DIRECT)),
    }
    samples: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    kept: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, save in contenders.items():
            clear(work)
            sample = measured(save, number + 1)
            if dist.get_rank() == 0:
                print(
                    f"  round {number}  {name:20}{sample.stall:8.3f}{sample.total:8.3f} s", file=sys.stderr, flush=True
                )
            if number:
                samples[name].append(asdict(sample))
            else:
                kept[name] = sample.kept
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"nbytes": own, "kept": kept, "samples": samples}))
    for one in (manager, background):
        one.close()
    dist.barrier()
    dist.destroy_process_group()


def build(nbytes: float) -> FsdpEngine:
    """The model, sharded, with moments."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(MESH_DIM,))
    model = Model(nbytes, _WIDTH if nbytes > 1e8 else 128)
    shard(model, mesh, Sharding())
    settings = OptimizerSettings(1e-3, (0.9, 0.95), 0.01, lambda step: 1.0, 1.0)
    engine = FsdpEngine(model, mesh, optimizer=settings)
    with torch.no_grad():
        for tensor in engine.tensors().values():
            for _, view in tensor.boxes:
                view.copy_(torch.randn(view.shape))
    return engine


def state_tensors(engine: FsdpEngine) -> list[Any]:
    """What is saved, as DTensors."""
    optimizer = engine.optimizer
    assert optimizer is not None
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in engine.model.parameters()), *moments]


def finished(_: Any) -> Callable[[], None]:
    """Nothing is left to wait for."""
    return lambda: None


def then(_: Any, wait: Callable[[], None]) -> Callable[[], None]:
    """What is left to wait for."""
    return wait


def torch_save(engine: FsdpEngine, folder: Path) -> None:
    """As most trainers save: every rank its own file."""
    folder.mkdir(exist_ok=True)
    assert engine.optimizer is not None
    state = {"model": engine.model.state_dict(), "optim": engine.optimizer.state_dict()}
    torch.save(state, folder / f"rank_{dist.get_rank()}.pt")


def flush(folder: Path) -> None:
    """This rank's file, to the disk."""
    with (folder / f"rank_{dist.get_rank()}.pt").open("rb") as file:
        os.fsync(file.fileno())


def dcp_state(engine: FsdpEngine) -> dict[str, Any]:
    """The state as DCP's guide has it."""
    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    return {"model": model, "optim": optimizer}


def dcp_async(engine: FsdpEngine, folder: Path, kind: AsyncCheckpointerType) -> Callable[[], None]:
    """Begin; returns what waits for the end."""
    begun = dcp.async_save(dcp_state(engine), checkpoint_id=folder, async_checkpointer_type=kind)
    future = getattr(begun, "upload_completion", begun)

    def wait() -> None:
        future.result()

    return wait


def memcpy(state: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Every tensor into one buffer."""
    at = 0
    for tensor in state:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        buffer[at : at + flat.nbytes].copy_(flat)
        at += flat.nbytes


def raw_write(buffer: torch.Tensor, path: Path, flags: int) -> None:
    """The same bytes from one buffer into one file, flushed. O_DIRECT takes whole blocks: a last part is left out."""
    memory = memoryview(buffer.numpy())
    if flags:
        size = len(memory) // _CHUNK * _CHUNK or mmap.PAGESIZE
        aligned = -buffer.data_ptr() % mmap.PAGESIZE
        memory = memory[aligned : aligned + size - (mmap.PAGESIZE if aligned else 0)]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    for at in range(0, len(memory), _CHUNK):
        os.write(fd, memory[at : at + _CHUNK])
    os.fsync(fd)
    os.close(fd)


def clear(work: Path) -> None:
    """Remove what was saved, and let the disk come to rest."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in work.iterdir():
            if path.is_file():
                path.unlink()
            elif path.name in ("milepost", "async"):
                for step in path.glob("global_step_*"):
                    shutil.rmtree(step)
            elif path.is_dir():
                shutil.rmtree(path)
        os.sync()
    dist.barrier()


def measured(save: Callable[[int], Callable[[], None]], step: int) -> Sample:
    """One save, over all ranks."""
    watch = MemoryWatch(os.getpid())
    before = MemoryWatch.now(os.getpid())
    begun, before_cpu = time.perf_counter(), time.process_time()
    wait = save(step)
    stall = time.perf_counter() - begun
    wait()
    total, cpu = time.perf_counter() - begun, time.process_time() - before_cpu
    watch.stop()
    memory = [max(watch.peak_anon - before, 0), max(MemoryWatch.now(os.getpid()) - before, 0)]
    values = torch.tensor([stall, total, cpu, *memory], dtype=torch.double)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return Sample(float(values[0]), float(values[1]), float(values[2]), int(values[3]), int(values[4]))


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
