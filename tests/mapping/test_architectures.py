"""What config.json promises, against what transformers builds and saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from milepost.errors import MismatchError
from milepost.index import TensorIndex, moment_name
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping import Architecture, expected, infer_head, to_saved_form, value_head_config
from milepost.mapping.families import FAMILIES

BUILDERS = {
    "causal-lm": AutoModelForCausalLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "base": AutoModel,
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SPARSE = {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
LATENT = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 6,
    "first_k_dense_replace": 1,
}
# family -> what its tiny config needs beyond TINY, and the variations that change names or shapes
VARIATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        {},
        [
            {"tie_word_embeddings": True},
            {"attention_bias": True, "mlp_bias": True},
            {"head_dim": 8},
            {"num_key_value_heads": None},
        ],
    ),
    "mistral": ({}, [{"head_dim": 8}, {"tie_word_embeddings": True}]),
    "qwen2": ({}, [{"tie_word_embeddings": True}, {"head_dim": 8}]),
    "qwen3": ({}, [{"head_dim": 8, "attention_bias": True}, {"tie_word_embeddings": True}]),
    "gemma": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "gemma2": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "gemma3_text": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "phi3": ({}, [{"num_key_value_heads": None}, {"tie_word_embeddings": True}]),
    "olmo2": ({}, [{"attention_bias": True}, {"tie_word_embeddings": True}]),
    "gpt_neox": ({}, [{"attention_bias": False}, {"tie_word_embeddings": True}]),
    "mixtral": ({"num_local_experts": 3}, [{"head_dim": 8}, {"tie_word_embeddings": True}, {"num_local_experts": 1}]),
    "qwen2_moe": (
        SPARSE,
        [{"qkv_bias": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"tie_word_embeddings": True}],
    ),
    "qwen3_moe": (
        SPARSE,
        [{"head_dim": 8, "attention_bias": True}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}],
    ),
    "deepseek_v3": (
        LATENT,
        [{"q_lora_rank": None}, {"attention_bias": True}, {"n_shared_experts": 2}, {"first_k_dense_replace": 0}],
    ),
}
CASES = [
    pytest.param(family, head, {}, id=f"{family}-{head}") for family in VARIATIONS for head in FAMILIES[family].heads
] + [
    pytest.param(family, "causal-lm", change, id=f"{family}-{'-'.join(f'{k}={v}' for k, v in change.items())}")
    for family, (_, changes) in VARIATIONS.items()
    for change in changes
]


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    return {**TINY, **VARIATIONS[family][0], **changes}


def build(family: str, head: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    config = AutoConfig.for_model(family, **settings)
    return BUILDERS[head].from_config(config)


def save(model: transformers.PreTrainedModel, directory: Path) -> tuple[dict[str, Any], TensorIndex]:
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    return config, TensorIndex(read_safetensors(directory / "model.safetensors"), "huggingface")


def memory_form(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a model holds in memory, as `renamed` and `fused` tell it."""
    shapes = dict(architecture.tensors)
    for name, saved in architecture.renamed.items():
        if saved in shapes:
            shapes[name] = shapes.pop(saved)
    for name, experts in architecture.fused.items():
        parts = [[shapes.pop(part) for part in parts] for parts in experts]
        shapes[name] = (len(parts), sum(rows for rows, _ in parts[0]), parts[0][0][1])
    return shapes


def test_every_family_has_cases() -> None:
    assert set(VARIATIONS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_class_names_exist(family: str) -> None:
    assert [name for name in FAMILIES[family].heads.values() if not hasattr(transformers, name)] == []


@pytest.mark.parametrize(("family", "head", "changes"), CASES)
def test_equals_what_save_pretrained_writes(family: str, head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config, saved = save(build(family, head, tiny(family, **changes)), tmp_path)
    architecture = expected(config)
    assert architecture is not None
    assert architecture.head == head
    assert dict(architecture.tensors) == {name: entry.shape for name, entry in saved.items()}


@pytest.mark.parametrize(
    ("family", "key"),
    [
        (family, key)
        for family, rules in FAMILIES.items()
        for key in sorted({"tie_word_embeddings", "head_dim", "num_key_value_heads", *rules.defaults})
    ],
)
def test_a_key_that_config_lacks_means_what_transformers_takes_it_for(family: str, key: str) -> None:
    settings = {k: v for k, v in tiny(family).items() if k != key}
    with torch.device("meta"):
        model = build(family, "causal-lm", settings)
    architecture = expected({"model_type": family, "architectures": [type(model).__name__], **settings})
    assert architecture is not None
    assert bool(architecture.tied) == model.config.tie_word_embeddings
    in_memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if architecture.tied:
        del in_memory["lm_head.weight"]
    assert memory_form(architecture) == in_memory


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_memory_form_becomes_the_form_of_files_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = build(family, "causal-lm", tiny(family))
    config, saved = save(model, tmp_path)
    architecture = expected(config)
    assert architecture is not None
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "memory.safetensors")
    memory = TensorIndex(read_safetensors(tmp_path / "memory.safetensors"), "fsdp")
    assert set(memory) != set(saved)
    result = to_saved_form(memory, architecture)
    assert set(result) == set(saved)
    for name, entry in saved.items():
        assert (result[name].bits() == entry.bits()).all(), name
    assert set(to_saved_form(saved, architecture)) == set(saved)


def test_moments_of_stacked_experts_are_cut_like_their_weights(tmp_path: Path) -> None:
    settings = tiny("qwen3_moe")
    architecture = expected({"model_type": "qwen3_moe", **settings})
    assert architecture is not None
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    values = torch.arange(3 * 24 * 16, dtype=torch.float32).reshape(3, 24, 16)
    tensors = {moment_name(stacked, "exp_avg"): values, moment_name(stacked, "step"): torch.tensor(7.0)}
    save_file(tensors, tmp_path / "moments.safetensors")
    index = TensorIndex(read_safetensors(tmp_path / "moments.safetensors"), "fsdp")
    result = to_saved_form(index, architecture)
    up = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert (result[moment_name(up, "exp_avg")].numpy() == values[2, 12:].numpy()).all()
    assert result[moment_name(up, "step")].numpy() == 7.0
    assert len(result) == 3 * 2 * 2


def test_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    architecture = expected({"model_type": "qwen3_moe", **tiny("qwen3_moe")})
    assert architecture is not None
    save_file({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 16, 12)}, tmp_path / "a.safetensors")
    index = TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp")
    with pytest.raises(MismatchError, match=r"experts\.down_proj has shape \[4, 16, 12\].*3 experts"):
        to_saved_form(index, architecture)


def test_prediction_layer_of_deepseek_is_ignored_and_rotary_buffers_are() -> None:
    architecture = expected({"model_type": "deepseek_v3", **tiny("deepseek_v3")})
    assert architecture is not None
    assert architecture.ignored == ("*.rotary_emb.inv_freq", "model.layers.2.*")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "brand_new"},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]},
    ],
)
def test_unknown_family_or_class(config: dict[str, Any]) -> None:
    assert expected({**TINY, **config}) is None


def test_config_without_a_size_is_refused_by_key() -> None:
    config = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    with pytest.raises(MismatchError, match="lacks intermediate_size"):
        expected({"model_type": "llama", **config})


def test_number_of_labels_from_id2label_then_num_labels_then_two() -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **TINY}

    def labels(**more: Any) -> int:
        architecture = expected({**config, **more})
        assert architecture is not None
        return architecture.tensors["score.weight"][0]

    assert labels() == 2
    assert labels(num_labels=5) == 5
    assert labels(id2label={"0": "a", "1": "b", "2": "c"}) == 3


@pytest.mark.parametrize(
    ("family", "bias"),
    [
        (family, bias)
        for family in FAMILIES
        for bias in (True, False)
        # the head of GPT-NeoX always has a bias
        if "token-classification" in FAMILIES[family].heads and (bias or family != "gpt_neox")
    ],
)
def test_critic_saved_under_the_policys_config_loads_as_a_value_model(family: str, bias: bool, tmp_path: Path) -> None:
    settings = tiny(family, num_labels=1, token_classification_bias=bias)
    model = build(family, "token-classification", settings)
    config, saved = save(model, tmp_path)
    policys = {
        **{key: value for key, value in config.items() if key not in ("id2label", "token_classification_bias")},
        "architectures": [FAMILIES[family].heads["causal-lm"]],
    }
    for true_config in (infer_head(saved, policys), infer_head(saved, config, is_value_model=True)):
        (tmp_path / "config.json").write_text(json.dumps(true_config))
        loaded, info = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.config.architectures == [type(model).__name__]
        assert loaded.config.num_labels == 1
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        architecture = expected(true_config)
        assert architecture is not None
        assert set(architecture.tensors) == set(saved)


def test_policy_keeps_its_config(tmp_path: Path) -> None:
    config, saved = save(build("qwen2", "causal-lm", tiny("qwen2")), tmp_path)
    assert infer_head(saved, config) == config
    with pytest.raises(MismatchError, match=r"no value model.*score\.weight"):
        infer_head(saved, config, is_value_model=True)


def test_value_config_of_families_that_are_unknown_or_have_no_such_class() -> None:
    config = value_head_config({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8})
    assert config["architectures"] == ["GPT2ForTokenClassification"]
    assert (config["num_labels"], config["id2label"], config["n_embd"]) == (1, {"0": "LABEL_0"}, 8)
    with pytest.raises(MismatchError, match="olmo2"):
        value_head_config({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]})
    with pytest.raises(MismatchError, match="architectures"):
        value_head_config({"model_type": "gpt2"})


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, milepost.mapping; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
