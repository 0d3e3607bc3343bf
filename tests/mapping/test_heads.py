"""config.json of a value model, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mapping.tiny import build, save, tiny
from transformers import AutoModelForTokenClassification

from milepost.errors import MismatchError
from milepost.mapping import expected, infer_head, value_head_config
from milepost.mapping.families import FAMILIES


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
    with_both = saved.with_entries({**saved, "score.weight": saved["model.norm.weight"]})
    assert infer_head(with_both, config) == config
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
