"""Writes the checkpoints beside this file, with whatever torch runs it: what older versions put into their files.

    torchrun --standalone --nproc-per-node 4 tests/layouts/data/write.py

Values are `expected` of this module: arithmetic, so that a test needs no torch of that version.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SHAPES = {"up.weight": (32, 2), "up.bias": (32,), "down.weight": (2, 32), "norm.weight": (3,)}


def expected(name: str) -> torch.Tensor:
    """The values of a weight; of a moment: its weight's values times 0.1 (first), or their squares times 0.001."""
    weight, _, moment = name.removeprefix("optim/").partition("/")
    shape = SHAPES[weight]
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * len(weight)
    if moment == "step":
        return torch.tensor(1.0)
    if moment == "exp_avg":
        return torch.zeros(shape).lerp(values, 1 - 0.9)
    if moment == "exp_avg_sq":
        return torch.zeros(shape).mul(0.999).addcmul(values, values, value=1 - 0.999)
    return values


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    root = Path(__file__).parent / f"torch-{torch.__version__.split('+')[0]}"
    for name, size in (("fsdp", 2), ("tp", 4)):
        model = nn.Module()
        model.up, model.down, model.norm = nn.Linear(2, 32), nn.Linear(32, 2, bias=False), nn.RMSNorm(3)
        model.load_state_dict({weight: expected(weight) for weight in SHAPES})
        model.register_buffer("scale", torch.tensor(3.5, dtype=torch.bfloat16))
        if name == "tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["dp"]
        else:
            mesh = torch.distributed.DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
        if rank >= size:
            continue
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
        for weight in model.parameters():
            weight.grad = weight.detach().clone()
        optimizer.step()
        (root / name).mkdir(parents=True, exist_ok=True)
        for kind, state in (("model", model.state_dict()), ("optim", optimizer.state_dict())):
            torch.save(state, root / name / f"{kind}_world_size_{size}_rank_{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
