"""convert: Hugging Face to Megatron and back, over families; what is refused, and what is left then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import milepost
from milepost.cli.app import run as run_command
from milepost.errors import CallError, DamagedError, IncompleteError, MismatchError, NotFoundError, WriteError
from milepost.jobs import convert as converting
from milepost.jobs.convert import ConvertOptions, check_written, prepare_conversion
from milepost.layouts import open_directory
from milepost.mapping import expected

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,
    "tie_word_embeddings": False,
}
SPARSE = {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
LATENT = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 6,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mqa": {"num_key_value_heads": 1, "head_dim": 8},
    "llama-mha": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 8},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": SPARSE,
    "qwen2_moe-mixed": {**SPARSE, "decoder_sparse_step": 2},
    "qwen3_moe": {**SPARSE, "head_dim": 8},
    "deepseek_v3": LATENT,
    "deepseek_v3-sparse": {**LATENT, "first_k_dense_replace": 0, "q_lora_rank": None},
    "llama-critic": {"architectures": ["LlamaForTokenClassification"], "num_labels": 1},
}


def make(directory: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model of random values, with companions."""
    config = {"model_type": name.partition("-")[0], **SIZES, **MODELS[name], **changes}
    architecture = expected(config)
    assert architecture is not None
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(len(name))
    tensors = {}
    for key, shape in architecture.tensors.items():
        kept = torch.float32 if key.endswith("e_score_correction_bias") else dtype
        tensors[key] = torch.randn(shape, generator=generator).to(kept)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.setdefault("architectures", [architecture.class_name])
    (directory / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    (directory / "tokenizer.json").write_text('{"made": "up"}')
    return directory


def bits(directory: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    found = load_file(directory / "model.safetensors")
    return {name: (value.dtype, value.view(torch.uint8).numpy().tobytes()) for name, value in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_merge_of_a_conversion_is_the_model_bitwise(name: str, tmp_path: Path) -> None:
    """Cases 67, 70, 71: every family, files of a few kilobytes; the merge gets nothing but the output."""
    model = make(tmp_path / "hf", name)
    report = milepost.convert(model, tmp_path / "mcore", test=True, max_shard_size="9kB")
    assert report.tested and len(list((tmp_path / "mcore").glob("*.distcp"))) > 1
    milepost.merge(tmp_path / "mcore", tmp_path / "back", backend="megatron")
    assert bits(tmp_path / "back") == bits(model)
    back, given = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "back", model))
    assert back == given
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert report.tensors == len(bits(model))


def test_cast_on_the_way_and_routing_biases_stay(tmp_path: Path) -> None:
    model = make(tmp_path / "hf", "deepseek_v3")
    report = milepost.convert(model, tmp_path / "mcore", dtype="bf16", test=True)
    index = open_directory(tmp_path / "mcore", "megatron")
    biases = [entry.dtype for key, entry in index.items() if key.endswith("expert_bias")]
    assert biases == ["float32"] and report.dtypes["float32"] == 1
    milepost.merge(tmp_path / "mcore", tmp_path / "back")
    wanted = load_file(model / "model.safetensors")
    found = load_file(tmp_path / "back" / "model.safetensors")
    for key, value in wanted.items():
        cast = value if key.endswith("e_score_correction_bias") else value.bfloat16()
        assert torch.equal(found[key], cast), key
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_megatron_looks_at_first(tmp_path: Path) -> None:
    for name, separate in (("llama", False), ("qwen2_moe-mixed", True), ("deepseek_v3-sparse", True), ("llama", True)):
        asked = name == "llama" and separate
        out = tmp_path / f"{name}-{asked}"
        milepost.convert(make(tmp_path / f"{name}-{asked}-hf", name), out, separate_layers=asked, test=True)
        assert json.loads((out / "metadata.json").read_text()) == {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        common = torch.load(out / "common.pt", weights_only=True)
        assert common["checkpoint_version"] == 3.0
        assert common["content_metadata"]["non_homogeneous_layers"] is separate
        keys = set(open_directory(out, "dcp"))
        assert ("decoder.layers.0.self_attention.linear_proj.weight" in keys) is separate
        assert ("decoder.layers.self_attention.linear_proj.weight" in keys) is not separate


def test_norms_lie_under_both_names_and_take_no_room(tmp_path: Path) -> None:
    """What Transformer Engine fuses and what is a module of its own."""
    milepost.convert(make(tmp_path / "hf", "qwen3_moe"), tmp_path / "out")
    index = open_directory(tmp_path / "out", "dcp")
    pairs = {
        "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    }
    for one, other in pairs.items():
        assert list(index[one].chunks) == list(index[other].chunks)
    extra = {key for key in index.objects if "_extra_state" in key}
    for key in (
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.2_2.3",
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_2",
        "decoder.final_layernorm._extra_state/shard_0_1",
    ):
        assert key in extra
    assert not any("router" in key or "embedding" in key or "output_layer" in key for key in extra)


def test_no_torch_and_no_megatron_is_needed(tmp_path: Path) -> None:
    model = make(tmp_path / "hf", "mixtral")
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'transformers'): sys.modules[name] = None\n"
        "from milepost.cli import main\nmain()"
    )
    call = [sys.executable, "-c", program, "convert", "-q", "--test", model, tmp_path / "out"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'out'}\n", "")


def test_a_config_of_another_shape_is_refused_before_work(tmp_path: Path) -> None:
    """Case 74."""
    for number, (name, changes) in enumerate(
        (
            ("llama", {"hidden_size": 32}),
            ("llama", {"num_hidden_layers": 3}),
            ("llama", {"num_hidden_layers": 1}),
            ("llama", {"vocab_size": 32}),
            ("llama", {"num_key_value_heads": 4}),
            ("mixtral", {"num_local_experts": 4}),
            ("qwen2", {"tie_word_embeddings": False}),
        )
    ):
        model = make(tmp_path / str(number), name)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises((MismatchError, IncompleteError), match=f"^{model}: .*config") as raised:
            milepost.convert(model, tmp_path / "out")
        assert "--allow-missing" not in str(raised.value)
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_what_is_no_model_of_a_known_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "hf", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "olmo2"}))
    with pytest.raises(MismatchError, match=r"a model of type olmo2; .*known are llama, mistral"):
        milepost.convert(model, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"has no config\.json with weights"):
        milepost.convert(tmp_path / "empty", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match=r"hf download Qwen/Qwen2-0\.5B --local-dir"):
        milepost.convert("Qwen/Qwen2-0.5B", tmp_path / "out")


def test_types_that_differ_between_layers(tmp_path: Path) -> None:
    """In one tensor of Megatron there is one type: said, or made so."""
    model = make(tmp_path / "hf", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MismatchError, match=r"layers\.1\.self_attention\.linear_proj.*--dtype makes"):
        milepost.convert(model, tmp_path / "out")
    milepost.convert(model, tmp_path / "out", dtype="bf16", test=True)


def test_targets(tmp_path: Path) -> None:
    model = make(tmp_path / "hf", "llama")
    out = tmp_path / "out"
    milepost.convert(model, out, max_shard_size="9kB")
    with pytest.raises(WriteError, match=r"not empty; choose another --output_path, or .*--overwrite"):
        milepost.convert(model, out)
    milepost.convert(model, out, overwrite=True)
    assert len(list(out.glob("*.distcp"))) == 1  # the old one is gone as a whole
    milepost.merge(out, tmp_path / "merged")
    with pytest.raises(WriteError, match="does not look like a dist checkpoint"):
        milepost.convert(model, tmp_path / "merged", overwrite=True)
    with pytest.raises(CallError, match="holds the model that is being converted"):
        milepost.convert(model, model, overwrite=True)
    assert bits(tmp_path / "merged") == bits(model)


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "hf", "llama")
    written = converting.DcpWriter.write
    calls = iter(range(100))

    def fails(self: Any, *arguments: Any) -> None:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        written(self, *arguments)

    monkeypatch.setattr(converting.DcpWriter, "write", fails)
    with pytest.raises(WriteError, match="the disk is full"):
        milepost.convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_wrong_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """By `--test`, before the output stands; by a later check; and by verify, without the source."""
    model = make(tmp_path / "hf", "llama")
    written = converting.DcpWriter.write

    def alters(self: Any, name: str, box: Any, elements: Any) -> None:
        wrong = elements.copy()
        if name == "decoder.layers.1.mlp.linear_fc2.weight":
            wrong.flat[3] ^= 1
        written(self, name, box, wrong)

    with monkeypatch.context() as altered:
        altered.setattr(converting.DcpWriter, "write", alters)
        with pytest.raises(DamagedError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is not what .* 1 of 21"):
            milepost.convert(model, tmp_path / "out", test=True)
        assert not (tmp_path / "out").exists()
    milepost.convert(model, tmp_path / "out")
    index = open_directory(tmp_path / "out", "megatron")
    chunk = next(iter(index["decoder.layers.mlp.linear_fc2.weight"].chunks))
    content = bytearray(Path(chunk.source.file).read_bytes())
    content[chunk.source.start()] ^= 1
    Path(chunk.source.file).write_bytes(content)
    options = ConvertOptions()
    with pytest.raises(DamagedError, match=r"model\.layers\.0\.mlp\.down_proj\.weight is not what"):
        check_written(prepare_conversion(model, options).model, tmp_path / "out", options)
    assert run_command(["verify", "--deep", str(tmp_path / "out")]) == 1
    assert "CRC-32" in capfd.readouterr().out


def test_ranks_share_out_the_files(tmp_path: Path) -> None:
    model = make(tmp_path / "hf", "qwen2_moe")
    milepost.convert(model, tmp_path / "alone", max_shard_size="9kB")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call = [*torchrun, "-m", "milepost", "convert", model, tmp_path / "out", "--max_shard_size", "9kB", "--test"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out'}\n"
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for file in (tmp_path / "alone").glob("*.*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "alone", "out"}


def test_progress_comes_to_its_end(tmp_path: Path) -> None:
    model = make(tmp_path / "hf", "qwen2")
    options = ConvertOptions(test=True)
    conversion = prepare_conversion(model, options)
    told: list[int] = []
    converting.write_conversion(conversion, tmp_path / "out", options, progress=told.append)
    assert sum(told) == converting.bytes_to_move(conversion, options) > 0
