"""Names become Hugging Face's, and whatever does not is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorIndex
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping import (
    Architecture,
    check,
    check_layers,
    drop_ignored,
    expected,
    strip_wrappers,
    ties,
    to_huggingface,
    untie,
)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 5,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
TIED = {OUTPUT: EMBEDDING}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    architecture = expected(config)
    assert architecture is not None
    return architecture


@pytest.fixture
def index_of(tmp_path: Path) -> Any:
    def make(tensors: Mapping[str, Any]) -> TensorIndex:
        save_file({name: np.asarray(value, np.float32) for name, value in tensors.items()}, tmp_path / "a.safetensors")
        return TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp")

    return make


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.full(shape, number, np.float32)
        for number, (name, shape) in enumerate(architecture_of(config).tensors.items())
    }


# wrappers


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.model.layers.0.mlp.up_proj.weight",
        "module.module.model.layers.0.mlp.up_proj.weight",
        "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "model.layers.0._orig_mod.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "_orig_mod.module._fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_wrappers_go_from_weights_and_moments(wrapped: str, index_of: Any) -> None:
    index = strip_wrappers(index_of({wrapped: [1.0], f"optim/{wrapped}/exp_avg": [2.0], f"optim/{wrapped}/step": 3.0}))
    plain = "model.layers.0.mlp.up_proj.weight"
    assert {name: float(entry.numpy().sum()) for name, entry in index.items()} == {
        plain: 1.0,
        f"optim/{plain}/exp_avg": 2.0,
        f"optim/{plain}/step": 3.0,
    }


def test_module_within_a_name_and_look_alikes_stay(index_of: Any) -> None:
    names = {"model.module.weight", "module_list.weight", "model._orig_modal.weight"}
    assert set(strip_wrappers(index_of(dict.fromkeys(names, 0.0)))) == names


def test_two_tensors_under_one_name_are_refused(index_of: Any) -> None:
    with pytest.raises(MismatchError, match=r"module\.a\.weight and|and module\.a\.weight"):
        strip_wrappers(index_of({"module.a.weight": [0.0], "a.weight": [1.0]}))


# tied weights


def test_alias_is_dropped_unread_and_equal_copy_after_comparison(index_of: Any) -> None:
    index = index_of({EMBEDDING: [[1.0, 2.0]], OUTPUT: [[1.0, 2.0]]})
    alias = index.with_entries({**index, OUTPUT: replace(index[EMBEDDING], alias_of=EMBEDDING)})
    backwards = index.with_entries({OUTPUT: index[OUTPUT], EMBEDDING: replace(index[OUTPUT], alias_of=OUTPUT)})
    for case in (index, alias, backwards):
        result = untie(case, TIED)
        assert list(result) == [EMBEDDING]
        assert result[EMBEDDING].alias_of is None
        assert result[EMBEDDING].numpy().tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("other", [[[1.0, 2.5]], [[1.0], [2.0]]])
def test_copies_that_differ_are_refused_by_name(other: Any, index_of: Any) -> None:
    with pytest.raises(MismatchError, match=rf"{OUTPUT} and {EMBEDDING} differ.*tie_word_embeddings"):
        untie(index_of({EMBEDDING: [[1.0, 2.0]], OUTPUT: other}), TIED)


def test_a_difference_beyond_the_first_window_is_found(index_of: Any) -> None:
    values = np.zeros((3000, 1024), np.float32)
    changed = values.copy()
    changed[-1, -1] = 1e-30
    with pytest.raises(MismatchError, match="differ"):
        untie(index_of({EMBEDDING: values, OUTPUT: changed}), TIED)


def test_only_the_alias_is_there_with_its_moments(index_of: Any) -> None:
    result = untie(index_of({OUTPUT: [[3.0]], f"optim/{OUTPUT}/exp_avg": [[4.0]]}), TIED)
    assert {name: entry.numpy().item() for name, entry in result.items()} == {
        EMBEDDING: 3.0,
        f"optim/{EMBEDDING}/exp_avg": 4.0,
    }


def test_untied_aliases_each_get_their_own_bytes(index_of: Any) -> None:
    index = index_of({EMBEDDING: [[1.0]]})
    result = untie(index.with_entries({**index, OUTPUT: replace(index[EMBEDDING], alias_of=EMBEDDING)}), {})
    assert set(result) == {EMBEDDING, OUTPUT}
    assert [entry.alias_of for entry in result.values()] == [None, None]
    assert result.nbytes == 8


def test_ties_of_an_unknown_family(index_of: Any) -> None:
    plain = index_of({EMBEDDING: [[1.0]], OUTPUT: [[1.0]]})
    aliased = plain.with_entries({OUTPUT: plain[OUTPUT], EMBEDDING: replace(plain[OUTPUT], alias_of=OUTPUT)})
    assert ties(plain, {"tie_word_embeddings": True}, None) == TIED
    assert ties(plain, {}, None) == {}
    assert ties(aliased, {}, None) == TIED
    assert ties(aliased, {"tie_word_embeddings": False}, None) == {}
    assert ties(aliased, LLAMA, expected(LLAMA)) == {}


# the check


def test_exact_set_passes_whatever_moments_are_there(index_of: Any) -> None:
    check(index_of({**whole(LLAMA), "optim/x/step": 1.0}), architecture_of(LLAMA))


def test_missing_expert_and_missing_layer_are_named(index_of: Any) -> None:
    tensors = {
        name: value
        for name, value in whole(MIXTRAL).items()
        if not name.startswith(("model.layers.0.block_sparse_moe.experts.2.", "model.layers.1."))
    }
    with pytest.raises(IncompleteError) as caught:
        check(index_of(tensors), architecture_of(MIXTRAL))
    message = str(caught.value)
    assert "missing: model.layers.0.block_sparse_moe.experts.2.* (3 tensors), model.layers.1.* (16 tensors)" in message
    assert message.count("\n") == 1
    allowed = ["model.layers.0.block_sparse_moe.experts.2.*", "model.layers.1.*"]
    check(index_of(tensors), architecture_of(MIXTRAL), allowed)


def test_everything_wrong_is_said_at_once(index_of: Any) -> None:
    tensors = whole(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(6)
    tensors[OUTPUT] = np.zeros((8, 4))
    with pytest.raises(MismatchError) as caught:
        check(index_of(tensors), architecture_of(LLAMA))
    message = str(caught.value)
    for part in (
        "LlamaForCausalLM",
        "missing: model.layers.1.mlp.up_proj.weight;",
        "not of this model: model.layers.0.mlp.up_proj.bias;",
        "of another shape: lm_head.weight is [8, 4], not [5, 4].",
    ):
        assert part in message


def test_long_lists_are_cut(index_of: Any) -> None:
    config = {**LLAMA, "num_hidden_layers": 12}
    tensors = {name: value for name, value in whole(config).items() if "o_proj" not in name}
    with pytest.raises(IncompleteError, match=r"layers\.9\.self_attn\.o_proj\.weight and 2 more"):
        check(index_of(tensors), architecture_of(config))


def test_ignored_names_are_dropped_and_told(index_of: Any) -> None:
    tensors = {**whole(LLAMA), "model.layers.0.self_attn.rotary_emb.inv_freq": [0.0], "model.extra": [0.0]}
    index, ignored = drop_ignored(index_of(tensors), architecture_of(LLAMA))
    assert ignored == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert set(index) == {*whole(LLAMA), "model.extra"}


def test_unknown_family_is_checked_for_its_layers_only(index_of: Any) -> None:
    config = {"model_type": "brand_new", "num_hidden_layers": 3}
    names = [f"transformer.h.{layer}.w" for layer in range(3)] + ["visual.blocks.0.w", "wte.weight"]
    assert "only the presence of its 3 layers" in check_layers(index_of(dict.fromkeys(names, 0.0)), config)
    assert "not checked" in check_layers(index_of({"wte.weight": [0.0]}), config)
    with pytest.raises(IncompleteError, match=r"transformer\.h\.1\.\*"):
        check_layers(index_of(dict.fromkeys([n for n in names if ".h.1." not in n], 0.0)), config)


# all of it


def test_to_huggingface_of_a_wrapped_tied_model(index_of: Any) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = whole(config)
    tensors[OUTPUT] = tensors[EMBEDDING]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = [0.0]
    mapped = to_huggingface(index_of({f"_orig_mod.module.{name}": value for name, value in tensors.items()}), config)
    assert set(mapped.index) == set(whole(config))
    assert mapped.config == config
    assert mapped.architecture == expected(config)
    assert mapped.notes == ("left out, as the model does not need them: model.layers.0.self_attn.rotary_emb.inv_freq",)


def test_to_huggingface_of_a_critic_and_of_an_unknown_family(index_of: Any) -> None:
    critic = {name: value for name, value in whole(LLAMA).items() if name != OUTPUT}
    critic |= {"score.weight": np.zeros((1, 4)), "score.bias": np.zeros(1)}
    mapped = to_huggingface(index_of(critic), LLAMA)
    assert mapped.config["architectures"] == ["LlamaForTokenClassification"]
    assert mapped.config["num_labels"] == 1
    assert "LlamaForTokenClassification" in mapped.notes[0]
    weak = to_huggingface(index_of(critic), {"model_type": "brand_new", "num_hidden_layers": 2})
    assert weak.architecture is None
    assert "unknown to milepost" in weak.notes[-1]


def test_to_huggingface_leaves_an_incomplete_model_to_who_asks_for_it(index_of: Any) -> None:
    index = index_of({f"module.{EMBEDDING}": np.zeros((5, 4))})
    with pytest.raises(IncompleteError):
        to_huggingface(index, LLAMA)
    assert list(to_huggingface(index, LLAMA, complete=False).index) == [EMBEDDING]
