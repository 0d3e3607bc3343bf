"""verl and milepost on each other's Megatron checkpoints: what verl's checkpoint manager saves is merged here, and what
is converted here verl's own merger merges."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("verl")

import megatron_checkpoints as writer
import torch
from interop.verl_megatron import save_and_merge
from ranks import run_ranks
from safetensors.torch import load_file

import milepost
from milepost.jobs.prepare import ModelOptions


def test_each_merges_what_the_other_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's folder is that of its version 0.9: model/dist_ckpt, extra/dist_ckpt, and no config without its bridge. It
    writes bfloat16 alone."""
    monkeypatch.setattr(writer, "MODELS", {"qwen2": writer.MODELS["qwen2"]})
    writer.make_models(tmp_path)
    model = tmp_path / "models" / "qwen2"
    saved, converted = tmp_path / "verl" / "global_step_3" / "actor", tmp_path / "ours"
    milepost.convert(model, converted / "model" / "dist_ckpt")
    shutil.copytree(converted / "model" / "dist_ckpt" / "huggingface", converted / "model" / "huggingface")
    run_ranks(save_and_merge, 1, str(model), str(saved), str(converted), str(tmp_path / "theirs"))
    wanted = load_file(model / "model.safetensors")
    assert {path.name for path in saved.iterdir()} >= {"model", "extra", "ckpt_contents.json"}
    milepost.merge(saved.parent, tmp_path / "merged", model=ModelOptions(hf_model_path=model))
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: torch.equal(found[name], value) for name, value in wanted.items()} == dict.fromkeys(wanted, True)
    assert set(found) == set(wanted)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert set(theirs) == set(wanted)
    assert all(torch.equal(theirs[name], value.bfloat16()) for name, value in wanted.items())
