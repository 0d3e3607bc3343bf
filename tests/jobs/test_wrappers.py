"""Policy and value in one state dict, and configs within configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import milepost
from milepost.cli.app import run
from milepost.errors import CallError, MismatchError
from milepost.jobs.prepare import ModelOptions


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], value) for name, value in right.items())


def test_f61_policy_of_a_pair(wrapped: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    milepost.merge(wrapped / "pair" / "actor", tmp_path / "out", role="policy")
    assert_equal(weights(tmp_path / "out"), torch.load(wrapped / "pair" / "policy.pt"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(12)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(wrapped / "pair" / "policy")(ids).logits
        assert torch.equal(model(ids).logits, theirs)
    assert milepost.test(wrapped / "pair" / "actor", wrapped / "pair" / "policy", role="policy").ok


def test_f64_value_of_a_pair(wrapped: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    milepost.merge(wrapped / "pair" / "actor", tmp_path / "out", role="value")
    assert_equal(weights(tmp_path / "out"), torch.load(wrapped / "pair" / "value.pt"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 16)
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        theirs = AutoModelForSequenceClassification.from_pretrained(wrapped / "pair" / "value")(ids).logits
        assert torch.equal(model(ids).logits, theirs)


def test_a_value_model_of_another_size_asks_for_its_config(wrapped: Path, tmp_path: Path) -> None:
    config = json.loads((wrapped / "pair" / "value" / "config.json").read_text())
    (tmp_path / "policys").mkdir()
    (tmp_path / "policys" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    role = tmp_path / "actor"
    role.mkdir()
    for file in (wrapped / "pair" / "actor").glob("*.pt"):
        (role / file.name).hardlink_to(file)
    shutil.copytree(tmp_path / "policys", role / "huggingface")
    with pytest.raises(MismatchError, match="value model's own with --hf_model_path"):
        milepost.merge(role, tmp_path / "out", role="value")
    own = ModelOptions(hf_model_path=wrapped / "pair" / "value")
    assert milepost.merge(role, tmp_path / "out", role="value", model=own).tensors == 21


@pytest.mark.parametrize("case", ["pair", "head", "head_prefixed"])
def test_which_of_both_must_be_said(wrapped: Path, tmp_path: Path, case: str) -> None:
    with pytest.raises(CallError, match="--role policy or --role value"):
        milepost.merge(wrapped / case / "actor", tmp_path / "out")
    assert run(["merge", str(wrapped / case / "actor"), str(tmp_path / "out")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["head", "head_prefixed"])
def test_f63_model_with_a_value_head(wrapped: Path, tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    milepost.merge(wrapped / case / "actor", tmp_path / "policy", role="policy")
    reference = weights(wrapped / "head" / "policy")
    assert_equal(weights(tmp_path / "policy"), reference)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not any(info.values()), info
    milepost.merge(wrapped / case / "actor", tmp_path / "value", role="value")
    # What TRL loads: the causal model by its Auto class, and from the same file what begins with v_head.
    head = torch.load(wrapped / case / "v_head.pt")
    assert set(head) == {"v_head.summary.weight", "v_head.summary.bias"}
    assert_equal(weights(tmp_path / "value"), reference | head)
    assert milepost.test(wrapped / case / "actor", tmp_path / "value", role="value").ok
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "value", output_loading_info=True)
    assert not info["missing_keys"] and set(info["unexpected_keys"]) == set(head)


def test_f63_two_trained_heads_differ(wrapped: Path, tmp_path: Path) -> None:
    step = tmp_path / "later" / "actor"
    step.mkdir(parents=True)
    for file in (wrapped / "head" / "actor").glob("*.pt"):
        state = torch.load(file, weights_only=False)
        state["v_head.summary.weight"]._local_tensor.add_(1.0)
        torch.save(state, step / file.name)
    options = ModelOptions(hf_model_path=wrapped / "head" / "policy")
    milepost.merge(wrapped / "head" / "actor", tmp_path / "first", role="value")
    milepost.merge(step, tmp_path / "second", role="value", model=options)
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert {name for name in first if not torch.equal(first[name], second[name])} == {"v_head.summary.weight"}
    assert torch.allclose(second["v_head.summary.weight"], first["v_head.summary.weight"] + 1.0)


def test_notes_count_what_is_left_out(wrapped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["merge", str(wrapped / "pair" / "actor"), str(tmp_path / "out"), "--role", "value", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    # 2 layers of 9 tensors, the embedding and the last norm
    assert any("20 critic_backbone.* tensors" in note for note in printed["notes"])
    assert printed["role"] == "value" and printed["tensors"] == 21


def test_role_of_a_step_and_role_of_a_state_dict(wrapped: Path, zoo: Path, tmp_path: Path) -> None:
    step = tmp_path / "global_step_3"
    step.mkdir()
    (step / "actor").symlink_to(wrapped / "pair" / "actor", target_is_directory=True)
    (step / "critic").symlink_to(zoo / "critic" / "actor", target_is_directory=True)
    milepost.merge(step, tmp_path / "policy", role="policy")
    assert "lm_head.weight" in weights(tmp_path / "policy")
    milepost.merge(step, tmp_path / "critic", role="critic")
    assert "score.weight" in weights(tmp_path / "critic")
    with pytest.raises(CallError, match="holds one model"):
        milepost.merge(zoo / "untied" / "actor", tmp_path / "out", role="policy")
    # a directory of that name is the role, as in every step
    (step / "policy").symlink_to(zoo / "untied" / "actor", target_is_directory=True)
    milepost.merge(step, tmp_path / "directory", role="policy")
    assert_equal(weights(tmp_path / "directory"), weights(zoo / "untied" / "reference"))


def test_a_model_with_nested_configs(wrapped: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    milepost.merge(wrapped / "vlm" / "actor", tmp_path / "out")
    milepost.merge(wrapped / "vlm" / "actor", tmp_path / "bf16", dtype="bf16")
    reference = AutoModelForImageTextToText.from_pretrained(wrapped / "vlm" / "reference")
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert_equal(dict(model.state_dict()), dict(reference.state_dict()))
    assert "lm_head.weight" not in weights(tmp_path / "out")  # tied
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    said = [one.get("dtype", "bfloat16") for one in (config, config["text_config"], config["vision_config"])]
    assert said == ["bfloat16"] * 3


def test_each_part_of_a_model_says_its_own_type(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    tensors = {
        "model.visual.blocks.0.norm.weight": torch.ones(4),
        "model.language_model.layers.0.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    part = {"num_hidden_layers": 1, "dtype": "float16"}
    config = {"model_type": "new_vl", "dtype": "float16", "text_config": part, "vision_config": part}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def said(out: str, dtype: str) -> list[str]:
        milepost.merge(tmp_path / "model", tmp_path / out, dtype=dtype)
        written = json.loads((tmp_path / out / "config.json").read_text())
        return [one["dtype"] for one in (written, written["text_config"], written["vision_config"])]

    # the model as a whole has the type of most of its bytes
    assert said("kept", "keep") == ["float32", "bfloat16", "float32"]
    assert said("cast", "fp16") == ["float16"] * 3
