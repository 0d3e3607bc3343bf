"""Real FSDP2 checkpoints for tests: a small model trained for one step on device meshes of many forms.

One launch of four gloo ranks writes all of them; the smaller world sizes use a part of the ranks. Each checkpoint lies
in a directory of its own beside `<name>.expected.pt`: the whole weights as they were given to the model before it was
sharded, and the moments as torch itself gathers them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD_SIZES = {"w1": 1, "w1_plain": 1, "w2": 2, "w3": 3, "w4": 4, "w2_unnamed": 2, "w1_unnamed": 1, "hsdp": 4, "tp": 4}
"""Every checkpoint, and the number of ranks that wrote it.

w<N>         FSDP2 on N ranks: every weight a DTensor, also on one
w1_plain     one rank without FSDP2: plain tensors
..._unnamed  as verl saves: the optimizer was given parameters without names
hsdp         2 replicas of 2 shards
tp           tensor parallelism 2, and FSDP2 on 2 over it: `_StridedShard`, uneven shards, weights on a part of the mesh
"""


class Layer(nn.Module):
    """A normalised two-layer network with a residual; 30 rows are 15 a tensor-parallel rank, then 8 and 7."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 30)
        self.down = nn.Linear(30, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(self.norm(x))))


class Model(nn.Module):
    """A tiny language model: tied embedding of 33 rows, a weight with fewer rows than ranks, one cut along its columns,
    and buffers that every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.wide = nn.Linear(12, 5, bias=False)
        self.gain = nn.Parameter(torch.empty(2))
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.5))
        self.register_buffer("one", torch.tensor([0.25]))
        self.register_buffer("counts", torch.arange(5) * (1 << 40))
        self.register_buffer("slopes", torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean() * self.gain.sum() + self.wide(x[..., :12]).square().mean()


def whole_weights() -> dict[str, torch.Tensor]:
    """What the model's weights are: distinct values, and ones where a model has ones (RMSNorm)."""
    weights = {}
    for number, (name, weight) in enumerate(Model().named_parameters()):
        values = torch.arange(weight.numel(), dtype=torch.float32).reshape(weight.shape)
        weights[name] = torch.ones(weight.shape) if "norm" in name else (values + 1000 * number) / 65536 - 0.01
    return weights


def write_all(root: str) -> None:
    """Write every checkpoint of `WORLD_SIZES` below `root`. Called on four ranks."""
    everywhere = Path(root)
    for size in (1, 2, 3, 4):
        mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("fsdp",))
        if torch.distributed.get_rank() < size:
            _write(everywhere, f"w{size}", lambda model, mesh=mesh: _shard(model, mesh))
    if torch.distributed.get_rank() == 0:
        _write(everywhere, "w1_plain", lambda model: model)
        _write(everywhere, "w1_unnamed", lambda model: model, named=False)
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
    if torch.distributed.get_rank() < 2:
        _write(everywhere, "w2_unnamed", lambda model: _shard(model, pair), named=False)
    hybrid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ddp", "fsdp"))
    _write(everywhere, "hsdp", lambda model: _shard(model, hybrid))
    both = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    _write(everywhere, "tp", lambda model: _shard(_tensor_parallel(model, both["tp"]), both["dp"]))


def _shard(model: Model, mesh: DeviceMesh) -> nn.Module:
    def columns(weight: nn.Parameter) -> Shard | None:
        return Shard(1) if weight is model.wide.weight else None

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, shard_placement_fn=columns)


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _write(everywhere: Path, name: str, shard: Callable[[Model], nn.Module], *, named: bool = True) -> None:
    rank, size = torch.distributed.get_rank(), WORLD_SIZES[name]
    model = Model()
    model.load_state_dict(whole_weights(), strict=False)
    sharded = shard(model)
    parameters = list(sharded.named_parameters())
    # The learning rate is 0, so that the weights stay what they were set to while moments arise.
    optimizer = torch.optim.AdamW(
        parameters if named else [weight for _, weight in parameters], lr=0.0, weight_decay=0.0, foreach=False
    )
    sharded(torch.arange(24).reshape(2, 12)).backward()
    optimizer.step()
    directory = everywhere / name
    directory.mkdir(exist_ok=True)
    state = optimizer.state_dict()
    extra = {
        "lr_scheduler": {"last_epoch": 1, "_last_lr": [0.1], "base_lrs": (0.5,)},
        "rng": {
            "cpu": torch.Generator().manual_seed(rank).get_state(),
            "numpy": np.random.RandomState(rank).get_state(),
            "random": random.Random(rank).getstate(),
        },
    }
    for kind, value in (("model", sharded.state_dict()), ("optim", state), ("extra_state", extra)):
        torch.save(value, directory / f"{kind}_world_size_{size}_rank_{rank}.pt")
    expected: dict[str, Any] = whole_weights()
    expected["head.weight"] = expected["embed.weight"]
    expected |= dict(model.named_buffers())
    for number, (weight, _) in enumerate(parameters):
        for moment, value in state["state"][number].items():
            expected[f"optim/{weight}/{moment}"] = value.full_tensor() if isinstance(value, DTensor) else value
    if rank == 0:
        torch.save(expected, everywhere / f"{name}.expected.pt")
        config = {"FSDP_version": 2, "world_size": size}
        (directory / "fsdp_config.json").write_text(json.dumps(config))
