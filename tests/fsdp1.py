"""Real FSDP1 checkpoints for tests: the model of `checkpoints`, wrapped by FullyShardedDataParallel in many ways.

One launch of four gloo ranks writes all of them. Each lies in a directory of its own beside `<name>.expected.pt`: the
weights as they were given to the model, and the moments as FSDP gathers them whole.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import Layer, Model, whole_weights
from tiny import tiny_qwen2
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

HYBRID = ShardingStrategy.HYBRID_SHARD
WORLD_SIZES = {
    "w2": 2, "w3": 3, "w4": 4, "orig": 4, "frozen": 2, "no_shard": 2, "bf16": 2, "mesh": 4, "hsdp": 4, "hsdp_groups": 4,
    "named": 4, "named_mesh": 4, "named_hsdp": 4, "orig_mesh": 4, "orig_hsdp": 4, "orig_groups": 4,
}  # fmt: skip
"""Every checkpoint of the model, and the number of ranks that wrote it.

w<N>            ShardedTensor: no device mesh; uneven on 2, 3 and 4 ranks, and on 4 ranks some have no shard of `gain`
orig...         use_orig_params=True: with a process group, a mesh, replicas by a mesh, and replicas by process groups
frozen          the same, with the embedding frozen
no_shard        every rank has everything: plain tensors
bf16            weights in bfloat16
mesh            DTensor: a one-dimensional mesh of an odd name
hsdp(_groups)   2 replicas of 2 shards, by a mesh of odd names; by process groups
named...        the optimizer's file is FSDP.optim_state_dict, elsewhere optimizer.state_dict()
"""


def write_all(root: str) -> None:
    """Write every checkpoint of `WORLD_SIZES` and the role directory `qwen2` below `root`. Called on four ranks."""
    warnings.simplefilter("ignore")
    rank, everywhere = dist.get_rank(), Path(root)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    flat = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("everybody",))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copies", "parts"))
    for name, size in WORLD_SIZES.items():
        settings: dict[str, Any] = {"process_group": groups[size]}
        if "mesh" in name:
            settings = {"device_mesh": flat}
        elif name.endswith("_groups"):
            settings = {"process_group": (shards[rank // 2], replicas[rank % 2]), "sharding_strategy": HYBRID}
        elif "hsdp" in name:
            settings = {"device_mesh": square, "sharding_strategy": HYBRID}
        elif name == "no_shard":
            settings["sharding_strategy"] = ShardingStrategy.NO_SHARD
        if rank < size:
            _write(everywhere, name, settings)
    if rank < 2:
        _write_qwen2(everywhere / "qwen2", groups[2])


def _wrapped(module: nn.Module, layer: type[nn.Module], settings: dict[str, Any]) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        module, auto_wrap_policy=ModuleWrapPolicy({layer}), device_id=torch.device("cpu"), **settings
    )


def _sharded_state(model: FullyShardedDataParallel) -> None:
    """Ask for the state dict that verl saves."""
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def _write(everywhere: Path, name: str, settings: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), WORLD_SIZES[name]
    model = Model()
    model.load_state_dict(whole_weights(), strict=False)
    if name == "bf16":
        model.to(torch.bfloat16)
    if name == "frozen":
        model.embed.weight.requires_grad_(False)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    sharded = _wrapped(model, Layer, settings | {"use_orig_params": name.startswith("orig") or name == "frozen"})
    # The learning rate is 0, so that the weights stay what they were set to while moments arise.
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    sharded(torch.arange(24).reshape(2, 12)).backward()
    optimizer.step()
    directory = everywhere / name
    directory.mkdir(exist_ok=True)
    _sharded_state(sharded)
    named = name.startswith("named")
    state = FullyShardedDataParallel.optim_state_dict(sharded, optimizer) if named else optimizer.state_dict()
    for kind, value in (("model", sharded.state_dict()), ("optim", state)):
        torch.save(value, directory / f"{kind}_world_size_{size}_rank_{rank}.pt")
    if name.startswith("orig"):
        # Gathered from the shards: on CPU, torch's own full optimizer state of such a model has the moments mixed up.
        for weight, moments in FullyShardedDataParallel.optim_state_dict(sharded, optimizer)["state"].items():
            expected |= {f"optim/{weight}/{moment}": _whole(value) for moment, value in moments.items()}
    if named:
        FullyShardedDataParallel.set_state_dict_type(
            sharded,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(rank0_only=False),
        )
        whole = FullyShardedDataParallel.optim_state_dict(sharded, optimizer)
        for weight, moments in whole["state"].items():
            expected |= {f"optim/{weight}/{moment}": value for moment, value in moments.items()}
    if rank == 0:
        torch.save(expected, everywhere / f"{name}.expected.pt")
        if name != "w3":  # as old verl left it
            (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": size}))


def _whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        whole = torch.empty(tensor.size(), dtype=tensor.dtype)
        # Rank 0 of the run alone saves what is expected; torch cannot gather in a group that does not begin with it.
        if dist.get_rank(tensor._process_group) == dist.get_rank():
            tensor.gather(0, whole if dist.get_rank() == 0 else None)
        return whole
    gathered: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def _write_qwen2(directory: Path, group: Any) -> None:
    """A tiny Qwen2 as transformers saved it (`reference`), and as FSDP1 under verl saves it (`actor`)."""
    from transformers import Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    rank, actor = dist.get_rank(), directory / "actor"
    if rank == 0:
        reference = tiny_qwen2(directory / "reference", tied=True)
        (actor / "huggingface").mkdir(parents=True)
        shutil.copy(reference / "config.json", actor / "huggingface")
    dist.barrier(group)
    model = Qwen2ForCausalLM.from_pretrained(directory / "reference")
    sharded = _wrapped(model, Qwen2DecoderLayer, {"process_group": group})
    _sharded_state(sharded)
    torch.save(sharded.state_dict(), actor / f"model_world_size_2_rank_{rank}.pt")
