"""A LoRA run of PEFT goes on with its own adapter, on the same and on another number of ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_qwen2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import milepost
from milepost.checkpoint.manager import CheckpointManager
from milepost.engines.fsdp import FsdpEngine, OptimizerSettings, Sharding, shard

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")


def test_a_lora_run_goes_on_with_its_adapter(tmp_path: Path) -> None:
    base = tiny_qwen2(tmp_path / "base")
    saved = run_ranks(_train_and_save, 2, base, tmp_path / "run")[0]
    trained = {name for name in saved if "lora_" in name}
    # q and v of 2 layers, A and B of each: 8 tensors
    assert len(trained) == 8
    assert all(saved[name].abs().max() > 0 for name in trained if "lora_B" in name)
    for world_size in (2, 3):
        resumed = run_ranks(_resume, world_size, base, tmp_path / "run")[0]
        assert resumed.keys() == saved.keys()  # no second adapter, no other names
        assert all(torch.equal(resumed[name], value) for name, value in saved.items())


def test_its_adapter_and_its_merge_need_nothing_but_the_step(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny_qwen2(tmp_path / "base")
    saved = run_ranks(_train_and_save, 2, base, tmp_path / "run")[0]
    milepost.merge(tmp_path / "run", tmp_path / "kept")
    adapted: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "kept"), tmp_path / "kept" / "lora_adapter"
    )
    assert (adapted.peft_config["default"].r, adapted.peft_config["default"].lora_alpha) == (4, 8)
    loaded = {name: value for name, value in adapted.state_dict().items() if "lora_" in name}
    assert len(loaded) == 8 and all(torch.equal(value, saved[name]) for name, value in loaded.items())
    milepost.merge(tmp_path / "run", tmp_path / "merged", model=milepost.ModelOptions(lora="merge"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)


def _engine(base: Path, mesh: DeviceMesh, seed: int) -> FsdpEngine:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    shard(model, mesh, Sharding())
    settings = OptimizerSettings(1e-2, (0.9, 0.999), 0.0, lambda _: 1.0, 1.0)
    return FsdpEngine(model, mesh, optimizer=settings, companions=base)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))


def _state(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Weights and moments, gathered."""
    whole = {name: _whole(weight) for name, weight in engine.model.state_dict().items()}
    assert engine.optimizer is not None
    for number, state in engine.optimizer.state_dict()["state"].items():
        whole |= {f"{number}/{moment}": _whole(value) for moment, value in state.items()}
    return whole


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _train_and_save(base: Path, root: Path) -> dict[str, torch.Tensor]:
    engine = _engine(base, _mesh(), seed=1)
    with CheckpointManager(root, {"actor": engine}) as manager:
        manager.resume()
        for _ in range(2):
            ids = torch.arange(12).reshape(2, 6)
            engine.backward(engine.model(input_ids=ids, labels=ids).loss, last=True)
            engine.step()
        manager.save(1)
    return _state(engine)


def _resume(base: Path, root: Path) -> dict[str, torch.Tensor]:
    engine = _engine(base, _mesh(), seed=2)
    with CheckpointManager(root, {"actor": engine}) as manager:
        assert manager.resume() == 1
    return _state(engine)
