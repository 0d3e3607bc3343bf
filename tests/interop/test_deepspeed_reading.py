"""Checkpoints that real DeepSpeed wrote, stages 0 to 3, read without it: against its live state and its own tool."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_checkpoints
from safetensors.torch import load_file
from zero_by_hand import write_zero3, write_zero12
from zero_checkpoints import CASES

import milepost
from milepost.checkpoint.verify import verify
from milepost.errors import IncompleteError
from milepost.index import TensorIndex
from milepost.layouts import open_directory

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

LAYERS = [f"layers.{number}.{part}" for number in range(3) for part in ("weight", "bias")]
NET = ["cube", "one", "scale", "counts", "emb.weight", *LAYERS, "head.weight", "frozen.weight", "frozen.bias"]
NETS = [name for name, case in CASES.items() if case.model == "net"]
ZERO = [name for name, case in CASES.items() if case.stage]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every case; see `zero_checkpoints`. Read only."""
    return zero_checkpoints.make(tmp_path_factory.mktemp("zero"))


def _index(root: Path, name: str) -> TensorIndex:
    return open_directory(root / name)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_moments_are_those_of_the_live_model(root: Path, name: str) -> None:
    index = _index(root, name)
    truth: dict[str, dict[str, torch.Tensor]] = torch.load(root / name / "truth.pt")
    index.check_tiling()
    assert (index.layout, index.world_size) == ("deepspeed", CASES[name].world_size)
    left_out = {"frozen.weight", "frozen.bias"} if CASES[name].save else set()
    assert truth["sixteen"].keys() - left_out <= index.keys()
    for tensor, value in truth["weights"].items():
        if tensor not in left_out:
            assert torch.equal(index[tensor].read().float(), value.float()), tensor
    for moment in ("exp_avg", "exp_avg_sq"):
        assert bool(truth[moment]) == (CASES[name].stage > 0 and "round_robin" not in name)
        for tensor, value in truth[moment].items():
            assert value.any(), tensor
            assert torch.equal(index[f"optim/{tensor}/{moment}"].read(), value), tensor
            assert index[f"optim/{tensor}/step"].read().item() == zero_checkpoints.STEPS


@pytest.mark.parametrize("name", CASES)
def test_masters_rounded_are_the_16_bit_weights_that_deepspeed_trains_with(root: Path, name: str) -> None:
    index = _index(root, name)
    for tensor, value in torch.load(root / name / "truth.pt")["sixteen"].items():
        if tensor in index:
            assert torch.equal(index[tensor].read().to(value.dtype), value), tensor
    trained = {"bf16": "float32" if CASES[name].stage else "bfloat16", "fp32": "float32"}[CASES[name].dtype]
    assert index["emb.weight" if CASES[name].model != "pair" else "policy.lm_head.weight"].dtype == trained


@pytest.mark.parametrize("name", ZERO)
def test_equal_to_what_zero_to_fp32_reads(root: Path, name: str) -> None:
    index = _index(root, name)
    theirs: dict[str, Any] = torch.load(root / name / "fp32.pt")
    for tensor, value in theirs["weights"].items():
        assert torch.equal(index[tensor].read().float(), value.float()), tensor
    lacking = set(index.weights()) - set(theirs["weights"])
    if name == "z1_bf16_optimizer_w2":
        assert "is not a zero checkpoint" in theirs["error"]  # the files of BF16_Optimizer note no stage
    elif CASES[name].stage == 1:
        assert lacking == {"frozen.weight", "frozen.bias"}  # it drops frozen weights of stage 1
    else:
        assert not lacking


@pytest.mark.parametrize("name", NETS)
def test_frozen_weights_buffers_and_the_tied_name_are_there(root: Path, name: str) -> None:
    # Case 78.
    index = _index(root, name)
    expected = [n for n in NET if not (CASES[name].save and n.startswith("frozen"))]
    assert sorted(index.weights()) == sorted(expected)
    assert index["head.weight"].alias_of == "emb.weight"
    assert torch.equal(index["scale"].read(), torch.tensor([1.5]))
    assert torch.equal(index["counts"].read(), torch.arange(3))
    assert verify(root / name, deep=True).ok


def test_moments_under_round_robin_are_those_without_it(root: Path) -> None:
    # The sum of two gradients is the same in any order, so both runs are one.
    plain, mixed = _index(root, "z2_bf16_w2"), _index(root, "z2_round_robin_w2")
    assert set(plain) == set(mixed)
    for name in plain:
        assert torch.equal(plain[name].read(), mixed[name].read()), name
    assert [*torch.load(_model(root, "z2_round_robin_w2"), weights_only=False)["param_shapes"][0]] != [
        *torch.load(_model(root, "z2_bf16_w2"), weights_only=False)["param_shapes"][0]
    ]


def _model(root: Path, name: str) -> Path:
    return root / name / f"global_step{zero_checkpoints.STEPS}" / "mp_rank_00_model_states.pt"


def test_schedule_hyperparameters_and_generators(root: Path) -> None:
    for name in ("z3_bf16_w3", "z2_bf16_w2"):
        objects = _index(root, name).objects
        assert objects["scheduler"]["last_epoch"] == zero_checkpoints.STEPS
        assert [group["weight_decay"] for group in objects["param_groups"]] == [0.1, 0.0]
        assert not any("params" in group for group in objects["param_groups"])
        ranks = range(CASES[name].world_size) if CASES[name].stage == 3 else (0,)
        assert {rank: state["python"] for rank, state in objects["rng"].items()} == {rank: [rank, 7] for rank in ranks}


@pytest.mark.parametrize("part", ["policy", "value"])
def test_policy_and_value_model_out_of_one_wrapper(root: Path, tmp_path: Path, part: str) -> None:
    module = "policy" if part == "policy" else "value_model"
    config = root / "pair_w2" / module
    for dtype in ("keep", "bf16"):
        out = tmp_path / dtype
        milepost.merge(root / "pair_w2", out, role=part, dtype=dtype, model=milepost.ModelOptions(hf_model_path=config))
        truth = torch.load(root / "pair_w2" / "truth.pt")["weights" if dtype == "keep" else "sixteen"]
        merged = load_file(out / "model.safetensors")
        assert {f"{module}.{name}" for name in merged} == {name for name in truth if name.startswith(f"{module}.")}
        for name, tensor in merged.items():
            assert torch.equal(tensor, truth[f"{module}.{name}"]), name


def test_export_where_deepspeeds_own_tool_fails_with_tied_weights(root: Path, tmp_path: Path) -> None:
    assert "share memory" in torch.load(root / "z3_bf16_w2" / "fp32.pt")["safetensors_error"]
    (tmp_path / "config.json").write_text('{"model_type": "net", "architectures": ["Net"]}')
    milepost.merge(root / "z3_bf16_w2", tmp_path / "out", model=milepost.ModelOptions(hf_model_path=tmp_path))
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted([*merged, "head.weight"]) == sorted(NET)


def test_a_missing_rank_of_a_real_checkpoint_is_named(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root / "z3_bf16_w3", copy)
    next(copy.glob("*/*rank_1_mp_rank_00_optim*")).unlink()
    with pytest.raises(IncompleteError, match="optim_states files: expected 3, found 2: rank 1 missing"):
        open_directory(copy)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_written_by_hand_are_what_deepspeed_takes_for_its_own(tmp_path: Path, stage: int) -> None:
    """The files of the tests of the layout: DeepSpeed's own reader sees the same weights in them."""
    from deepspeed.utils.zero_to_fp32 import _get_fp32_state_dict_from_zero_checkpoint as read

    generator = torch.Generator().manual_seed(0)
    groups = [{"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator)},
              {"c": torch.randn(2, 3, 4, generator=generator), "d": torch.randn(1, generator=generator)}]  # fmt: skip
    frozen = {"f": torch.randn(3, 3, generator=generator)}
    if stage == 3:
        expected = write_zero3(tmp_path, groups, 3, sub_group_size=6, frozen=frozen, shared={"tied": "a"})
    else:
        expected = write_zero12(tmp_path, groups, 3, aligned=4)
    theirs = {name: tensor.contiguous() for name, tensor in read(str(tmp_path), False).items()}
    assert set(theirs) == {name for name in expected if not name.startswith("optim/")}
    for name, tensor in theirs.items():
        assert torch.equal(tensor, expected[name]), name
