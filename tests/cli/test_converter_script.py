"""scripts/converter_hf_to_mcore.py: every option that verl's script of that name has, and its habits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from milepost.layouts import open_directory
from milepost.mapping import expected

SCRIPT = Path(__file__).parents[2] / "scripts" / "converter_hf_to_mcore.py"
CONFIG = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,
    "num_experts": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "tie_word_embeddings": False,
}


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)


def test_verls_options_and_habits(tmp_path: Path) -> None:
    model, out = tmp_path / "hf", tmp_path / "out"
    model.mkdir()
    architecture = expected(CONFIG)
    assert architecture is not None
    save_file({name: torch.randn(shape) for name, shape in architecture.tensors.items()}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(CONFIG))
    paths = ("--hf_model_path", model, "--output_path", out)
    done = script(*paths, "--use_cpu_initialization", "--test", "--trust_remote_code", "--pp_size", "2", "--ep_size=2")
    assert done.returncode == 0, done.stderr
    for option in ("--trust_remote_code", "--use_cpu_initialization", "--pp_size", "--ep_size"):
        assert done.stderr.count(f"{option} has no meaning here") == 1
    dtypes = {entry.dtype for entry in open_directory(out, "megatron").values()}
    assert dtypes == {"bfloat16"}  # as verl's

    before = (out / "__0_0.distcp").read_bytes()
    done = script(*paths)
    assert done.returncode == 0 and f"Output path {out} is not empty, skipping conversion" in done.stderr
    done = script("-q", *paths)
    assert done.returncode == 0 and f"Output path {out} is not empty, skipping conversion" in done.stderr
    assert script(*paths, "--test").returncode == 0
    assert (out / "__0_0.distcp").read_bytes() == before
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, model / "model.safetensors")
    done = script(*paths, "--test")
    assert done.returncode == 1 and "model.norm.weight is not what" in done.stderr

    assert script("--output_path", tmp_path / "other").returncode == 2
    done = script("--help")
    assert done.returncode == 0 and "--hf_model_path" in done.stdout
