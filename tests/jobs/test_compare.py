"""test: each kind of difference is told apart, named and measured."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import milepost
from milepost.errors import CallError


@pytest.fixture
def reference(zoo: Path, tmp_path: Path) -> Path:
    """A copy of the model that transformers saved, to be altered."""
    shutil.copytree(zoo / "untied" / "reference", tmp_path / "reference")
    return tmp_path / "reference"


def alter(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = directory / "model.safetensors"
    state = load_file(file) | {name: value for name, value in change.items() if value is not None}
    save_file({n: t for n, t in state.items() if change.get(n, t) is not None}, file, metadata={"format": "pt"})


def test_an_equal_model_passes(zoo: Path, reference: Path) -> None:
    report = milepost.test(zoo / "untied" / "actor", reference)
    assert report.ok and report.differences == ()
    assert report.tensors == len(load_file(reference / "model.safetensors"))


def test_five_kinds_of_difference(zoo: Path, reference: Path) -> None:
    state = load_file(reference / "model.safetensors")
    value = state["model.norm.weight"].clone()
    value[3] += 1e-3  # the norm is ones: 1.001, and the relative difference is 0.001 / 1.001
    alter(
        reference,
        {
            "model.norm.weight": value,
            "model.layers.0.mlp.up_proj.weight": None,
            "model.extra.weight": torch.zeros(2),
            "lm_head.weight": state["lm_head.weight"][:-1].clone(),
            "model.embed_tokens.weight": state["model.embed_tokens.weight"].double(),
        },
    )
    report = milepost.test(zoo / "untied" / "actor", reference)
    found = {difference.name: difference for difference in report.differences}
    assert {name: difference.kind for name, difference in found.items()} == {
        "model.norm.weight": "value",
        "model.layers.0.mlp.up_proj.weight": "extra",
        "model.extra.weight": "missing",
        "lm_head.weight": "shape",
        "model.embed_tokens.weight": "dtype",
    }
    norm = found["model.norm.weight"]
    assert norm.elements == 1
    assert math.isclose(norm.max_abs, 1e-3, rel_tol=1e-3) and math.isclose(norm.max_rel, 1e-3 / 1.001, rel_tol=1e-3)
    assert found["model.embed_tokens.weight"].elements == 0  # another type, the same numbers
    assert "[33, 16]" in found["lm_head.weight"].detail and "[32, 16]" in found["lm_head.weight"].detail


def test_tolerances(zoo: Path, reference: Path) -> None:
    value = load_file(reference / "model.safetensors")["model.norm.weight"].clone()
    value[3] += 1e-3
    alter(reference, {"model.norm.weight": value})
    role = zoo / "untied" / "actor"
    assert not milepost.test(role, reference, atol=0.9e-3).ok
    assert milepost.test(role, reference, atol=1.1e-3).ok
    assert not milepost.test(role, reference, rtol=0.9e-3).ok
    assert milepost.test(role, reference, rtol=1.1e-3).ok
    with pytest.raises(CallError, match="0 or more"):
        milepost.test(role, reference, atol=float("nan"))


def test_bits_count_where_no_tolerance_is_given(zoo: Path, reference: Path) -> None:
    norm = load_file(reference / "model.safetensors")["model.norm.weight"]
    zero, minus, nan = norm.clone(), norm.clone(), norm.clone()
    zero[0], minus[0], nan[0] = 0.0, -0.0, float("nan")
    alter(reference, {"model.norm.weight": nan})
    report = milepost.test(zoo / "untied" / "actor", reference, atol=1e9)
    assert [d.max_abs for d in report.differences] == [math.inf]  # a number is never near a NaN
    other = reference.parent / "other"
    for value, other_value, equal in ((zero, minus, False), (nan, nan, True)):
        alter(reference, {"model.norm.weight": value})
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(reference, other)
        alter(other, {"model.norm.weight": other_value})
        assert milepost.test(reference, other, backend="huggingface").ok is equal


def test_a_cast_export_is_compared_as_it_was_cast(zoo: Path, tmp_path: Path) -> None:
    milepost.merge(zoo / "untied" / "actor", tmp_path / "bf16", dtype="bf16")
    assert milepost.test(zoo / "untied" / "actor", tmp_path / "bf16", dtype="bf16").ok
    plain = milepost.test(zoo / "untied" / "actor", tmp_path / "bf16")
    assert {difference.kind for difference in plain.differences} == {"dtype"}
    # random weights lose at most half a unit in the 8th binary digit when rounded to bfloat16
    assert 0 < max(difference.max_rel for difference in plain.differences) <= 2**-8


def test_an_incomplete_checkpoint_is_a_difference_not_an_error(zoo: Path) -> None:
    report = milepost.test(zoo / "headless" / "actor", zoo / "tied" / "reference")
    assert {d.kind for d in report.differences} == {"missing"}
    assert all(d.name.startswith("model.layers.1.") for d in report.differences) and len(report.differences) == 12
