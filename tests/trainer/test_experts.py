"""Models whose experts lie one by one in files and stacked in memory: filled, and resumed across the two forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mapping.tiny import build, tiny
from ranks import run_ranks

from milepost.layouts.huggingface import read_safetensors

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


def _engine(directory: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.engines.fsdp import OptimizerSettings, Sharding
    from milepost.trainer.models import ModelSource, load_policy

    settings = OptimizerSettings(1e-2, (0.9, 0.95), 0.0, lambda step: 1.0, 1.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    return load_policy(
        ModelSource(directory),
        mesh,
        torch.device("cpu"),
        dtype=torch.float32,
        sharding=Sharding(),
        optimizer=settings,
        seed=1,
    )


def _whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().full_tensor() for name, weight in engine.model.named_parameters()}


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    moments = {}
    for name, weight in engine.model.named_parameters():
        for moment, value in engine.optimizer.state[weight].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            moments[f"optim/{name}/{moment}"] = full
    return moments


def _fill(root: Path) -> Any:
    from transformers import AutoModelForCausalLM

    found = {}
    for family in FAMILIES:
        theirs = dict(AutoModelForCausalLM.from_pretrained(root / family, dtype=torch.float32).named_parameters())
        ours = _whole(_engine(root / family))
        found[family] = sorted(ours) == sorted(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    torch.manual_seed(3)
    for family in FAMILIES:
        build(family, "causal-lm", tiny(family)).save_pretrained(root / family)
    return root


def test_an_engine_with_stacked_experts_is_filled_as_transformers_fills_it(models: Path) -> None:
    for family in FAMILIES:
        names = read_safetensors(models / family / "model.safetensors")
        assert any(".experts.0." in name for name in names)  # one by one in the files
    assert run_ranks(_fill, 2, models) == [dict.fromkeys(FAMILIES, True)] * 2


def _resume(directory: Path, role: Path) -> Any:
    """Train one engine, write its state as an engine of single experts would, and resume another from that."""
    import torch.distributed as dist

    from milepost.checkpoint import restore
    from milepost.layouts.huggingface import read_config
    from milepost.mapping import expected

    trained, fresh = _engine(directory), _engine(directory)
    logits = trained.model(input_ids=torch.arange(14).reshape(2, 7)).logits
    trained.backward(logits.square().mean(), last=True)
    trained.step()
    weights, moments = _whole(trained), _moments(trained)
    architecture = expected(read_config(directory))
    assert architecture is not None
    if dist.get_rank() == 0:
        role.mkdir(parents=True)
        (role / "config.json").write_bytes((directory / "config.json").read_bytes())
        single, names = {}, []
        for name, tensor in weights.items():
            parts = architecture.fused.get(name, ((architecture.renamed.get(name, name),),))
            cut = tensor.flatten(0, 1).chunk(sum(map(len, parts))) if name in architecture.fused else [tensor]
            for part, value in zip([part for of_expert in parts for part in of_expert], cut, strict=True):
                single[part] = value.clone()
                names.append((part, name))
        places = {part: place for place, (part, _) in enumerate(names)}
        state: dict[int, dict[str, torch.Tensor]] = {place: {} for place in places.values()}
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            for name in weights:
                own = [part for part, whole in names if whole == name]
                value = moments[f"optim/{name}/{kind}"]
                cut = value.flatten(0, 1).chunk(len(own)) if value.dim() == 3 else [value] * len(own)
                for part, piece in zip(own, cut, strict=True):
                    state[places[part]][kind] = piece.clone()
        torch.save(single, role / "model_world_size_1_rank_0.pt")
        groups = [{"lr": 1e-2, "params": list(state)}]
        torch.save({"state": state, "param_groups": groups}, role / "optim_world_size_1_rank_0.pt")
    dist.barrier()
    fitted = restore.fit("actor", restore.open_for(role, fresh.tensors()), fresh.tensors())
    restore.fill(fitted, fresh)
    again = _whole(fresh) | _moments(fresh)
    return fitted.casts, sorted(n for n, v in (weights | moments).items() if not torch.equal(again[n], v))


def test_a_checkpoint_of_single_experts_resumes_into_stacks(models: Path, tmp_path: Path) -> None:
    assert run_ranks(_resume, 2, models / "mixtral", tmp_path / "actor") == [("", [])] * 2
