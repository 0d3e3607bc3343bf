"""The engines of a job, by kind: their state follows from the step, so that every bit can be checked.

tiny        `tiny_engine`: plain tensors; two roles, cheap enough for hundreds of jobs
fsdp, deepspeed, megatron    real engines of a small model; one role
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.jobs import Job

PATIENCE = 4.0
"""Seconds for which ranks wait for one that does not come to a save: enough on a busy machine, and not long."""


def preload(kinds: Sequence[str]) -> None:
    """Import what forked jobs will need."""
    import tiny_engine  # noqa: F401
    import torch.distributed

    torch.set_num_threads(1)
    if "fsdp" in kinds:
        import milepost.engines.fsdp
    if "deepspeed" in kinds:
        import milepost.trainer.models  # noqa: F401
    if "megatron" in kinds:
        import megatron.core.models.gpt  # noqa: F401
        import megatron_engines  # noqa: F401


def run(job: Job, rank: int) -> Any:
    """This rank's view of the job's run: `manager`, `reach(step)`, which sets the state, and `is_at(step)`."""
    from tiny_engine import Run

    from milepost.checkpoint.comm import TorchCommunicator

    timeout = job.patience or 3 * job.options.get("save_timeout", 600.0)
    comm = TorchCommunicator(timeout, PATIENCE) if job.ranks > 1 else None
    if job.kind == "tiny":
        return Run(job.root, rank=rank, world_size=job.ranks, comm=comm, **job.options)
    return _RealRun(job, KINDS[job.kind](job.model), comm)


class _RealRun:
    """A run of one role, whose every tensor is set from its name and the step."""

    def __init__(self, job: Job, engine: Any, comm: Any) -> None:
        from milepost.checkpoint.manager import CheckpointManager

        self.engine = engine
        self.manager = CheckpointManager(job.root, {"actor": engine}, comm=comm, **job.options)

    def reach(self, step: int) -> None:
        for tensor in self.engine.tensors().values():
            whole = _values(tensor, step)
            for box, view in tensor.boxes:
                view.copy_(whole[box.slices()])
        self.engine.finish_load()

    def is_at(self, step: int) -> bool:
        import torch

        return all(
            torch.equal(view.detach(), _values(tensor, step)[box.slices()])
            for tensor in self.engine.tensors().values()
            for box, view in tensor.boxes
        )


def _values(tensor: Any, step: int) -> Any:
    import torch

    dtype = getattr(torch, tensor.dtype)
    if tensor.name.endswith("/step"):
        return torch.full(tensor.shape, step, dtype=dtype)
    seed = int.from_bytes(hashlib.sha256(f"{tensor.name} {step}".encode()).digest()[:4], "big")
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _settings() -> Any:
    from milepost.engines.optim import OptimizerSettings

    return OptimizerSettings(1e-2, (0.9, 0.95), 0.01, lambda step: 1 / (1 + step), 1.0)


def _fsdp(model: Path | None) -> Any:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.engines.fsdp import MESH_DIM, FsdpEngine, Sharding, shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(MESH_DIM,))
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    shard(network, mesh, Sharding())
    torch.manual_seed(0)
    return FsdpEngine(network, mesh, optimizer=_settings())


def _deepspeed(model: Path | None) -> Any:
    import zero_engines

    from milepost.engines.deepspeed.setup import ZeroSettings

    assert model is not None
    return zero_engines.make(model, ZeroSettings())


def _megatron(model: Path | None) -> Any:
    import megatron_engines

    from milepost.engines.megatron.parallel import Parallel

    assert model is not None
    return megatron_engines.make(model, Parallel(tensor=2))


KINDS: Mapping[str, Callable[[Path | None], Any]] = {"fsdp": _fsdp, "deepspeed": _deepspeed, "megatron": _megatron}
