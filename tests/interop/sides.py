"""What milepost's side and a peer's side of an interop test have in common: training steps and what is compared.

Both sides hold their roles as objects with `model`, `optimizer`, `scheduler`, `backward`, `step` and
`advance_schedule`, as `FsdpEngine` has them, and make the same steps on the same data. Attention dropout is on, so that
a step comes out the same, bit for bit, only where weights, moments, learning rate and the rank's generator are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny import tiny_qwen2
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from milepost.engines.fsdp import FsdpEngine, OptimizerSettings, Sharding
from milepost.index import moment_name
from milepost.trainer.base_model import build_tokenizer
from milepost.trainer.models import ModelSource, load_critic, load_policy
from milepost.trainer.schedule import lr_factor

CPU = torch.device("cpu")
LR = 1e-2
TOTAL_STEPS = 10  # of the cosine schedule without warm-up, which both sides know
SAVED_STEP = 3

Facts = dict[str, Any]
"""A role as it stands: "tensors" (gathered whole by torch's own means), "lr", "last_epoch", "groups"."""


def base_model(directory: Path, *, tied: bool) -> Path:
    """A tiny Qwen2 with dropout in its attention, and a tokenizer."""
    tiny_qwen2(directory, tied=tied, attention_dropout=0.25)
    build_tokenizer().save_pretrained(directory)
    return directory


def mesh_of(size: int) -> DeviceMesh:
    """A mesh over the first ranks; every rank of the launch makes it."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("fsdp",))


def settings(lr: float = LR, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.05) -> OptimizerSettings:
    """The optimizer and the schedule of both sides."""
    factor = partial(lr_factor, kind="cosine", total_steps=TOTAL_STEPS)
    return OptimizerSettings(lr, betas, weight_decay, factor, grad_clip=1.0)


def engines(base: Path, mesh: DeviceMesh, optimizer: OptimizerSettings) -> dict[str, FsdpEngine]:
    """milepost's actor and critic."""
    options: dict[str, Any] = {"dtype": torch.float32, "sharding": Sharding(), "optimizer": optimizer, "seed": 5}
    roles = {
        "actor": load_policy(ModelSource(base), mesh, CPU, **options),
        "critic": load_critic(ModelSource(base), mesh, CPU, **options),
    }
    for engine in roles.values():
        engine.model.train()
    return roles


def seed_rank() -> None:
    """Give each rank generators of its own."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)


def tokens(seed: int) -> torch.Tensor:
    """Three rows of seven tokens."""
    return torch.randint(33, (3, 7), generator=torch.Generator().manual_seed(seed))


def train(roles: Mapping[str, Any], *steps: int) -> None:
    """Optimizer steps of every role, each rank on rows of its own."""
    for step in steps:
        for role in roles.values():
            logits = role.model(input_ids=tokens(10 * step + dist.get_rank())).logits
            role.backward(logits.logsumexp(-1).mean() + logits.square().mean(), last=True)
            role.step()
            role.advance_schedule()


def facts(roles: Mapping[str, Any]) -> dict[str, Facts]:
    """Every role as it stands. All ranks of its mesh call it."""
    return {name: _facts(role) for name, role in roles.items()}


def _facts(role: Any) -> Facts:
    for module in role.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {}
    for name, weight in role.model.named_parameters():
        tensors[name] = _whole(weight)
        for moment, value in role.optimizer.state[weight].items():
            tensors[moment_name(name, moment)] = _whole(value)
    return {
        "tensors": tensors,
        "lr": role.optimizer.param_groups[0]["lr"],
        "last_epoch": role.scheduler.last_epoch,
        "groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in role.optimizer.param_groups
        ],
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_same(found: Mapping[str, Facts], expected: Mapping[str, Facts]) -> None:
    """All roles equal, every tensor bit for bit."""
    assert list(found) == list(expected)
    for role, wanted in expected.items():
        assert_same_tensors(found[role]["tensors"], wanted["tensors"])
        for fact in ("lr", "last_epoch", "groups"):
            assert found[role][fact] == wanted[fact], f"{role}: {fact}"


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, and under each the same shape, element type and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bits(other), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights_of(role: Facts) -> dict[str, torch.Tensor]:
    """The gathered weights, without moments."""
    return {name: tensor for name, tensor in role["tensors"].items() if not name.startswith("optim/")}


def draws() -> list[float]:
    """The next numbers of this rank's generators."""
    return [*torch.rand(3).tolist(), *np.random.rand(3).tolist(), random.random()]
