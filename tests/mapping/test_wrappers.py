"""Policy and value model in one state dict, taken apart by their names alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.errors import CallError, MismatchError
from milepost.index import TensorIndex
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping.wrappers import take_part

PAIR = {
    "policy.model.embed_tokens.weight": 1.0,
    "policy.lm_head.weight": 2.0,
    "value_model.model.embed_tokens.weight": 3.0,
    "value_model.score.weight": 4.0,
    "critic_backbone.embed_tokens.weight": 3.0,
}
HEAD = {"model.embed_tokens.weight": 1.0, "v_head.summary.weight": 2.0, "v_head.summary.bias": 3.0}


@pytest.fixture
def index_of(tmp_path: Path) -> Any:
    def make(tensors: dict[str, float]) -> TensorIndex:
        save_file(
            {name: np.full((2, 2), value, np.float32) for name, value in tensors.items()}, tmp_path / "a.safetensors"
        )
        return TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp")

    return make


def values(index: Any) -> dict[str, float]:
    return {name: float(entry.numpy()[0, 0]) for name, entry in index.items()}


def test_each_of_a_pair(index_of: Any) -> None:
    assert values(take_part(index_of(PAIR), "policy").index) == {
        "model.embed_tokens.weight": 1.0,
        "lm_head.weight": 2.0,
    }
    value = take_part(index_of(PAIR), "value")
    assert values(value.index) == {"model.embed_tokens.weight": 3.0, "score.weight": 4.0}
    assert any("1 critic_backbone.* tensors" in note for note in value.notes)


def test_a_backbone_that_only_its_second_name_holds_is_taken(index_of: Any) -> None:
    only = {name: value for name, value in PAIR.items() if not name.startswith("value_model.model.")}
    assert values(take_part(index_of(only), "value").index) == {"model.embed_tokens.weight": 3.0, "score.weight": 4.0}
    neox = take_part(index_of(only), "value", base="gpt_neox")
    assert set(neox.index) == {"gpt_neox.embed_tokens.weight", "score.weight"}


def test_two_backbones_that_differ_are_refused(index_of: Any) -> None:
    with pytest.raises(MismatchError, match="two names of one backbone"):
        take_part(index_of({**PAIR, "critic_backbone.embed_tokens.weight": 3.5}), "value")


def test_an_alias_across_the_parts_becomes_a_tensor_of_its_own(index_of: Any) -> None:
    index = index_of(PAIR)
    shared = "policy.model.embed_tokens.weight"
    entries = {
        n: replace(e, alias_of=shared) if "value_model" in n else e for n, e in index.items() if "critic" not in n
    }
    value = take_part(index.with_entries(entries), "value").index
    assert [entry.alias_of for entry in value.values()] == [None, "model.embed_tokens.weight"]


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
def test_a_value_head_stays_beside_the_model(prefix: str, index_of: Any) -> None:
    index = index_of({name if "v_head" in name else prefix + name: value for name, value in HEAD.items()})
    policy, value = take_part(index, "policy"), take_part(index, "value")
    assert values(policy.index) == values(value.index) == {"model.embed_tokens.weight": 1.0}
    assert not policy.beside and values(value.beside) == {"v_head.summary.weight": 2.0, "v_head.summary.bias": 3.0}
    assert any("2 v_head.* tensors" in note for note in policy.notes)


@pytest.mark.parametrize(
    ("tensors", "part", "says"),
    [
        (PAIR, None, "--role policy or --role value"),
        (HEAD, None, "--role policy or --role value"),
        (PAIR, "actor", "choose from policy, value"),
        ({"policy.a.weight": 1.0}, "value", r"holds no value_model\.\*"),
        ({"pretrained_model.a.weight": 1.0}, "value", r"holds no v_head\.\*"),
        ({"model.a.weight": 1.0}, "policy", "holds one model"),
    ],
)
def test_what_cannot_be_chosen_is_said(tensors: dict[str, float], part: str | None, says: str, index_of: Any) -> None:
    with pytest.raises(CallError, match=says):
        take_part(index_of(tensors), part)


def test_names_of_one_model_stay(index_of: Any) -> None:
    index = index_of({"model.a.weight": 1.0, "policy_head.weight": 2.0, "policy.weight": 3.0})
    assert take_part(index, None).index is index
