"""From the names in files to those in memory: judged by the models that transformers builds, and by going both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mapping.tiny import build, save, tiny

from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorEntry, TensorIndex, moment_name
from milepost.layouts import open_directory
from milepost.mapping import expected, to_live_form
from milepost.mapping.names import to_saved_form

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_neox", "llama")


def _index(directory: Path, state: dict[str, torch.Tensor]) -> TensorIndex:
    directory.mkdir(exist_ok=True)
    torch.save(state, directory / "pytorch_model.bin")
    return open_directory(directory, "huggingface")


def _assert_holds(index: TensorIndex, state: dict[str, torch.Tensor]) -> None:
    assert sorted(index) == sorted(state)
    assert [name for name, value in state.items() if not torch.equal(index[name].read(), value)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_files_give_the_tensors_of_the_live_model_and_back(family: str, tmp_path: Path) -> None:
    model = build(family, "causal-lm", tiny(family, tie_word_embeddings=False))
    config, files = save(model, tmp_path / "files")
    live = model.state_dict()
    _assert_holds(to_live_form(files, config, live), live)
    # A model that holds experts one by one, and a checkpoint of one that stacks them.
    in_memory = _index(tmp_path / "memory", live)
    _assert_holds(to_live_form(in_memory, config, set(files)), {n: e.read() for n, e in files.items()})
    # What has the form already stays the same object.
    assert to_live_form(in_memory, config, live) is in_memory


def _with_moments(index: TensorIndex, steps: dict[str, TensorEntry]) -> TensorIndex:
    moments = {moment_name(name, "exp_avg"): entry for name, entry in index.items()}
    return index.with_entries({**index, **moments, **{moment_name(n, "step"): e for n, e in steps.items()}})


def test_moments_go_with_their_weights(tmp_path: Path) -> None:
    model = build("mixtral", "causal-lm", tiny("mixtral"))
    config, files = save(model, tmp_path / "files")
    same, other = (_index(tmp_path / n, {"step": torch.tensor(float(n))})["step"] for n in ("3", "4"))
    again = _index(tmp_path / "3 again", {"step": torch.tensor(3.0)})["step"]
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    live = to_live_form(_with_moments(files, dict.fromkeys(files, same) | {expert: again}), config, model.state_dict())
    assert {n for n in live if n.startswith("optim/")} == {
        moment_name(name, moment) for name in model.state_dict() for moment in ("exp_avg", "step")
    }
    assert torch.equal(live[moment_name(stacked, "exp_avg")].read(), model.state_dict()[stacked])
    assert live[moment_name(stacked, "step")].read() == 3
    architecture = expected(config)
    assert architecture is not None
    assert to_saved_form(live, architecture)[moment_name(expert, "step")].read() == 3
    with pytest.raises(MismatchError, match=r"w3.weight/step and .*w1.weight/step differ, but the optimizer counts"):
        to_live_form(_with_moments(files, dict.fromkeys(files, same) | {expert: other}), config, model.state_dict())


def test_experts_that_make_no_stack_are_named(tmp_path: Path) -> None:
    model = build("qwen3_moe", "causal-lm", tiny("qwen3_moe"))
    config, files = save(model, tmp_path / "files")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"

    def changed(**entries: Any) -> TensorIndex:
        return files.with_entries({n: e for n, e in {**files, **entries}.items() if e is not None})

    with pytest.raises(IncompleteError, match=rf"{name} is missing, which is a part of .*experts\.gate_up_proj"):
        to_live_form(changed(**{name: None}), config, model.state_dict())
    other = files["model.layers.0.mlp.experts.1.down_proj.weight"]
    with pytest.raises(MismatchError, match=rf"{name} is float32\[16, 12\], not float32\[12, 16\]"):
        to_live_form(changed(**{name: other}), config, model.state_dict())


def test_an_unknown_family_is_left_alone(tmp_path: Path) -> None:
    index = _index(tmp_path, {"a": torch.ones(2)})
    assert to_live_form(index, {"model_type": "of tomorrow"}, {"b"}) is index
