"""What config.json promises, against what transformers builds and saves."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mapping.tiny import TINY, VARIATIONS, build, save, tiny
from safetensors.torch import save_file

from milepost.errors import MismatchError
from milepost.index import TensorIndex, moment_name
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping import Architecture, expected, to_saved_form
from milepost.mapping.families import FAMILIES

CASES = [
    pytest.param(family, head, {}, id=f"{family}-{head}") for family in VARIATIONS for head in FAMILIES[family].heads
] + [
    pytest.param(family, "causal-lm", change, id=f"{family}-{'-'.join(f'{k}={v}' for k, v in change.items())}")
    for family, (_, changes) in VARIATIONS.items()
    for change in changes
]


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


@pytest.mark.parametrize(
    ("model_type", "sizes", "parameters"),
    [
        # hidden, intermediate, layers, heads, key/value heads, vocabulary; parameters as the model cards count them
        pytest.param("llama", (4096, 14336, 32, 32, 8, 128256), 8_030_261_248, id="Llama-3.1-8B"),
        pytest.param("mistral", (4096, 14336, 32, 32, 8, 32000), 7_241_732_096, id="Mistral-7B-v0.1"),
        pytest.param("mixtral", (4096, 14336, 32, 32, 8, 32000), 46_702_792_704, id="Mixtral-8x7B-v0.1"),
        pytest.param("gemma2", (2304, 9216, 26, 8, 4, 256000), 2_614_341_888, id="gemma-2-2b"),
        pytest.param("qwen2", (3584, 18944, 28, 28, 4, 152064), 7_615_616_512, id="Qwen2.5-7B"),
    ],
)
def test_published_models_have_their_published_size(model_type: str, sizes: tuple[int, ...], parameters: int) -> None:
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    architecture = expected({"model_type": model_type, "num_local_experts": 8, **dict(zip(keys, sizes, strict=True))})
    assert architecture is not None
    assert sum(math.prod(shape) for shape in architecture.tensors.values()) == parameters


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


def test_an_expert_on_its_own_and_in_a_stack_is_refused(tmp_path: Path) -> None:
    architecture = expected({"model_type": "qwen3_moe", **tiny("qwen3_moe")})
    assert architecture is not None
    alone = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors = {alone: torch.zeros(16, 12), "model.layers.0.mlp.experts.down_proj": torch.zeros(3, 16, 12)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(MismatchError, match=r"experts\.1\.down_proj\.weight is there twice"):
        to_saved_form(TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp"), architecture)


@pytest.mark.parametrize(
    ("family", "ignored"),
    [
        ("llama", ("*.rotary_emb.inv_freq",)),
        ("gpt_neox", ("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias")),
        # the multi-token prediction layer of a model of 2 layers
        ("deepseek_v3", ("*.rotary_emb.inv_freq", "model.layers.2.*")),
    ],
)
def test_what_old_files_may_hold(family: str, ignored: tuple[str, ...]) -> None:
    architecture = expected({"model_type": family, **tiny(family)})
    assert architecture is not None
    assert architecture.ignored == ignored


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_odd_values_is_refused_by_key_or_understood(family: str) -> None:
    config = {"model_type": family, **tiny(family)}
    for key, value in itertools.product([*config, "num_labels", "id2label"], ODD):
        if key != "model_type":
            try:
                assert expected({**config, key: value}) is not None or key == "architectures"
            except MismatchError as error:
                assert f" {key}" in str(error) or value is None, (key, value, error)


ODD: tuple[Any, ...] = ("64", "", 1.5, True, -3, 0, 10**12, 10**30, [2], [], {}, {"a": 1}, None)


def test_number_of_labels_from_id2label_then_num_labels_then_two() -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **TINY}

    def labels(**more: Any) -> int:
        architecture = expected({**config, **more})
        assert architecture is not None
        return architecture.tensors["score.weight"][0]

    assert labels() == 2
    assert labels(num_labels=5) == 5
    assert labels(id2label={"0": "a", "1": "b", "2": "c"}) == 3
    with pytest.raises(MismatchError, match=r"says \['a', 'b'\] for id2label, which is to be a mapping of labels"):
        labels(id2label=["a", "b"])


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, milepost.mapping; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
