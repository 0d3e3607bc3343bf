"""Real torch DCP checkpoints for tests: a small Qwen2 trained for one step, saved as each trainer does.

One launch of three gloo ranks writes all of them. Each folder lies beside `<name>.expected.pt`: the whole weights and
moments as torch itself gathers them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute


class _Plugin:
    """What accelerate's functions ask of its FSDP plugin."""

    state_dict_type = StateDictType.SHARDED_STATE_DICT
    state_dict_config = ShardedStateDictConfig(offload_to_cpu=True)
    optim_state_dict_config = ShardedOptimStateDictConfig(offload_to_cpu=True)

    def __init__(self, version: int) -> None:
        self.fsdp_version = version


class _Accelerator:
    """What accelerate's functions ask of an accelerator."""

    num_processes = 3

    def __init__(self) -> None:
        self.process_index = dist.get_rank()
        self.is_main_process = self.process_index == 0


def write_all(base: str, root: str) -> None:
    """Write every checkpoint; called on each of three ranks."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # asked for, though the group is there already
    PartialState(cpu=True)  # accelerate's logger asks for it
    _write_fsdp2(Path(base), Path(root))
    _write_fsdp1(Path(base), Path(root) / "accelerate_fsdp1")
    _write_tensors(Path(root) / "tensors")


def _model(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.config.use_cache = False
    return model


def _train(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(24).reshape(2, 12) + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return optimizer


def _write_fsdp2(base: Path, root: Path) -> None:
    model = _model(base, torch.bfloat16)
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _train(model)
    weights = get_model_state_dict(model)
    moments = get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    step = {"step": torch.tensor(7, dtype=torch.int32), "losses": [0.5, 0.25]}

    plugin, accelerator = _Plugin(2), _Accelerator()
    trainer = root / "trainer" / "checkpoint-7"
    save_fsdp_model(plugin, accelerator, model, str(trainer))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(trainer))
    # torchtitan puts the model's tensors beside the other parts, and flattens the optimizer.
    dcp.save(
        {**weights, "optimizer": flat, "train_state": step}, checkpoint_id=root / "titan" / "checkpoint" / "step-7"
    )
    policy = root / "nemo" / "step_7" / "policy"
    dcp.save({"model": weights}, checkpoint_id=policy / "weights")
    dcp.save({"optim": {"optim": moments, "sched": {"last_epoch": 7}}}, checkpoint_id=policy / "optimizer")
    dcp.save({"app": {"model": weights, "optimizer": moments}}, checkpoint_id=root / "app")
    dcp.save({"model": weights, "optimizer": optimizer.state_dict()}, checkpoint_id=root / "numbered")
    dcp.save({"model": weights}, checkpoint_id=root / "alone", use_collectives=False)
    dcp.save(
        weights,
        storage_writer=dcp.HuggingFaceStorageWriter(str(root / "shards"), save_distributed=True),
    )
    _expect(root / "fsdp2.expected.pt", weights, moments["state"])


def _write_fsdp1(base: Path, folder: Path) -> None:
    model = FullyShardedDataParallel(
        _model(base),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = _train(model)
    plugin, accelerator = _Plugin(1), _Accelerator()
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    # Gathered from the shards: on CPU, torch's own full optimizer state has the moments mixed up.
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, plugin.state_dict_config, plugin.optim_state_dict_config
    ):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        _expect(folder.with_name("fsdp1.expected.pt"), model.state_dict(), state)


def _write_tensors(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    wide = torch.arange(77.0).reshape(7, 11)
    replica = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
    state = {
        "rows": distribute(wide, mesh, [Shard(0)]),
        "columns": distribute(wide, mesh, [Shard(1)]),
        "turned": distribute(wide.t(), mesh, [Shard(1)]),
        "few": distribute(torch.arange(2.0), mesh, [Shard(0)]),
        "copies": distribute(wide, replica, [Replicate(), Shard(0)]),
        "plain": wide.clone().t(),
        "scalar": torch.tensor(3.5),
        "one": torch.tensor([0.25]),
        "empty": torch.zeros(0, 4),
        "counts": torch.arange(5) * (1 << 40),
        "half": torch.tensor([1.0, -2.0], dtype=torch.float16),
        "byte": torch.arange(3, dtype=torch.uint8).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "nested": {"deep": {"x": torch.arange(3)}},
    }
    dcp.save({"model": state}, checkpoint_id=folder)
    dcp.save({"norm": distribute(torch.ones(6), mesh, [Shard(0)])}, checkpoint_id=folder.with_name("ones"))
    whole = {key: _whole(value) for key, value in state.items() if key != "nested"}
    if dist.get_rank() == 0:
        torch.save({**whole, "nested.deep.x": torch.arange(3)}, folder.with_name("tensors.expected.pt"))


def _whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        whole = torch.empty(tensor.size(), dtype=tensor.dtype)
        tensor.gather(0, whole if dist.get_rank() == 0 else None)
        return whole
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _expect(path: Path, weights: dict[str, Any], state: dict[str, Any]) -> None:
    expected = {name: _whole(tensor).detach().cpu() for name, tensor in weights.items()}
    for name, values in state.items():
        expected |= {f"optim/{name}/{moment}": _whole(value).detach().cpu() for moment, value in values.items()}
    if dist.get_rank() == 0:
        torch.save(expected, path)


def add_configs(base: Path, root: Path) -> None:
    """The config and tokenizer where each trainer's user has them."""
    for folder in (root / "trainer", root / "accelerate_fsdp1"):
        for name in ("config.json", "generation_config.json"):
            (folder / name).write_bytes((base / name).read_bytes())
    (root / "trainer" / "checkpoint-7" / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
