"""Steps of torchtitan and NeMo-RL to Hugging Face: names, order of rows, and companions where those runs leave them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import titan
import torch
from ranks import run_ranks
from safetensors.torch import load_file

import milepost
from milepost.checkpoint.verify import verify
from milepost.errors import MismatchError, NotFoundError
from milepost.jobs.prepare import ModelOptions
from milepost.layouts import open_directory
from milepost.layouts.dcp.reader import DcpLayout

TOKENS = torch.arange(20).reshape(2, 10) % titan.VOCABULARY


def _save_titan(root: Path) -> None:
    """The Llama of `titan` as three ranks save it, each tensor in uneven rows; moments of q, k and v as one tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    weights = titan.native_weights()
    averages = {name: value + 1 for name, value in weights.items()}
    for layer in range(titan.LAYERS):
        q, k, v = (averages.pop(f"layers.{layer}.attention.w{letter}.weight") for letter in "qkv")
        averages[f"layers.{layer}.attention.wqkv.weight"] = titan.fused(q, k, v, titan.KV_HEADS)

    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}

    moments = {"exp_avg": cut(averages), "step": dict.fromkeys(averages, torch.tensor(7.0))}
    freqs = {"freqs_cis": torch.ones(4, 4, dtype=torch.complex64)}
    titan.save_step(root / "outputs" / "checkpoint" / "step-7", cut(weights) | freqs, moments)
    titan.save_step(root / "model_only" / "step-9", {name: value.bfloat16() for name, value in weights.items()})


@pytest.fixture(scope="module")
def titan_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("titan")
    run_ranks(_save_titan, 3, root)
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text(json.dumps(titan.CONFIG))
    return root


def test_a_step_of_torchtitan_computes_what_torchtitan_computes(titan_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = ModelOptions(hf_model_path=titan_run / "hf")
    milepost.merge(titan_run / "outputs", tmp_path / "out", model=options)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    weights = titan.native_weights()
    with torch.no_grad():
        theirs, ours = titan.logits(weights, TOKENS), model(TOKENS).logits
    assert torch.allclose(ours, theirs, atol=1e-5) and theirs.std() > 0.5
    # Bitwise too: the adapter's formula takes what was merged back to what was saved.
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(titan.LAYERS):
        for letter, heads in (("q", titan.HEADS), ("k", titan.KV_HEADS)):
            rows = titan.in_pairs(merged[f"model.layers.{layer}.self_attn.{letter}_proj.weight"], heads)
            assert torch.equal(rows, weights[f"layers.{layer}.attention.w{letter}.weight"])
    assert milepost.test(titan_run / "outputs" / "checkpoint" / "step-7", tmp_path / "out", model=options).ok


def test_a_model_alone_and_a_cast(titan_run: Path, tmp_path: Path) -> None:
    options = ModelOptions(hf_model_path=titan_run / "hf")
    milepost.merge(titan_run / "model_only", tmp_path / "out", model=options)
    milepost.merge(titan_run / "outputs", tmp_path / "cast", model=options, dtype="bf16")
    alone, cast = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "cast"))
    assert alone.keys() == cast.keys()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, cast[name]) for name, value in alone.items())


def test_other_parts_of_the_step_do_no_harm(titan_run: Path) -> None:
    step = titan_run / "outputs" / "checkpoint" / "step-7"
    index = open_directory(step)
    assert not {name for name in index.weights() if "train_state" in name or "dataloader" in name}
    assert index.objects["train_state.ntokens_seen"] == 99
    assert verify(step, deep=True).problems == ()
    said = [DcpLayout().describe(place) for place in (step, titan_run / "model_only" / "step-9")]
    assert said[0] == "a step of torchtitan: model, optimizer, lr_scheduler, dataloader, train_state"
    assert said[1] == "a model of torchtitan"


def test_what_a_step_of_torchtitan_lacks_is_said(titan_run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"step-7: no config\.json .* with --hf_model_path"):
        milepost.merge(titan_run / "outputs", tmp_path / "out")
    other = tmp_path / "hf"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(titan.CONFIG | {"num_attention_heads": 8, "head_dim": 8}))
    with pytest.raises(MismatchError, match=r"q_proj\.weight is \[32, 32\], not \[64, 32\]"):
        milepost.merge(titan_run / "outputs", tmp_path / "out", model=ModelOptions(hf_model_path=other))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def nemo(dcp_checkpoints: Path, tmp_path: Path) -> Path:
    """A step of NeMo-RL with all that its trainer leaves in it, but the model."""
    step = tmp_path / "results" / "step_7"
    shutil.copytree(dcp_checkpoints / "nemo" / "step_7", step)
    (step / "training_info.json").write_text('{"step": 7}')
    tokenizer = step / "policy" / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"version":  "1.0"}')
    (tokenizer / "chat_template.jinja").write_text("the run's own")
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(dcp_checkpoints / "base" / name, base)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (base / name).write_text("the base model's")
    return step


def _names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


EXPORTED = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("place", ["", "policy", "policy/weights"])
def test_nemos_tokenizer_is_the_runs_own(nemo: Path, tmp_path: Path, place: str) -> None:
    options = ModelOptions(hf_model_path=tmp_path / "base")
    milepost.merge(nemo / place, tmp_path / "out", model=options)
    assert _names(tmp_path / "out") == EXPORTED
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "the run's own"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (nemo / "policy/tokenizer/tokenizer.json").read_bytes()


def test_nemos_config_names_the_model(nemo: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"policy: no config\.json in it or in huggingface/; give .*hf_model_path"):
        milepost.merge(nemo, tmp_path / "out")
    config = nemo / "config.yaml"
    config.write_text("policy:\n  model_name: Qwen/Qwen2.5-1.5B\n  tokenizer: {name: Qwen/Qwen2.5-1.5B}\n")
    with pytest.raises(
        NotFoundError, match=r"config\.yaml says that Qwen/Qwen2\.5-1\.5B was trained: give .*hf_model_"
    ):
        milepost.merge(nemo, tmp_path / "out")
    config.write_text(f"policy: {{model_name: {tmp_path / 'base'}}}\nvalue: {{model_name: elsewhere}}\n")
    milepost.merge(nemo, tmp_path / "out")
    assert _names(tmp_path / "out") == EXPORTED
    (nemo / "policy").rename(nemo / "value")
    with pytest.raises(NotFoundError, match="says that elsewhere was trained"):
        milepost.merge(nemo, tmp_path / "out")


@pytest.mark.parametrize("text", ["policy: [", "[1, 2]", "policy: 5", "policy: {model_name: 5}", "\0"])
def test_a_config_of_another_program_says_nothing(nemo: Path, tmp_path: Path, text: str) -> None:
    (nemo / "config.yaml").write_text(text)
    with pytest.raises(NotFoundError, match=r"no config\.json in it or in huggingface/"):
        milepost.merge(nemo, tmp_path / "out")


def test_a_model_without_a_tokenizer_of_its_own_keeps_all_companions(nemo: Path, tmp_path: Path) -> None:
    shutil.rmtree(nemo / "policy" / "tokenizer")
    milepost.merge(nemo, tmp_path / "out", model=ModelOptions(hf_model_path=tmp_path / "base"))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "the base model's"
    assert len(_names(tmp_path / "out")) == len(EXPORTED) + 3
