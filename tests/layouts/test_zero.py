"""The DeepSpeed layout on files written by hand after its rules: values for any shapes and ranks, and every fault."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import boxes_in
from tiny import tiny_qwen2
from zero_by_hand import write_zero3, write_zero12

import milepost
from milepost.checkpoint.locate import locate
from milepost.checkpoint.verify import verify
from milepost.errors import CallError, DamagedError, IncompleteError, MilepostError, NotFoundError, RefusedError
from milepost.index import Box, TensorIndex
from milepost.layouts.zero.reader import DeepSpeedLayout
from milepost.transfer import execute, plan

OPTIM_3 = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
OPTIM_2 = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MODEL_2 = "mp_rank_00_model_states.pt"


def _open(directory: Path) -> TensorIndex:
    return DeepSpeedLayout().open(directory)


def _values(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _groups(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    a, b, c, d = _values((5, 3), (4, 2, 3), (7,), (1,), seed=seed)
    return [{"a": a, "b": b}, {"c": c, "d": d}]


def assert_holds(index: TensorIndex, expected: dict[str, torch.Tensor]) -> None:
    """The same names, and under each the same shape, element type and bits."""
    assert set(index) == set(expected)
    index.check_tiling()
    for name, tensor in expected.items():
        read = index[name].read()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(read, tensor), name


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Alter what a file holds."""
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


# Values


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_of_7_10_and_1_elements_come_back_without_padding(tmp_path: Path, world_size: int) -> None:
    # Case 23.
    seven, ten, one = _values((7,), (10,), (1,))
    group = {"seven": seven, "ten": ten, "one": one}
    for folder, write in ((tmp_path / "z3", write_zero3), (tmp_path / "z2", write_zero12)):
        expected = write(folder / "global_step3", [group], world_size)
        assert_holds(_open(folder), expected)


_SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(
    shapes=st.lists(_SHAPES, min_size=1, max_size=6),
    world_size=st.integers(1, 5),
    sub_group_size=st.sampled_from((1, 5, 20, 1_000_000)),
    second=st.integers(0, 3),
    seed=st.integers(0, 100),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_weights_cut_for_any_ranks_are_read_bitwise(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    world_size: int,
    sub_group_size: int,
    second: int,
    seed: int,
    data: st.DataObject,
) -> None:
    weights = {f"w{place}": tensor for place, tensor in enumerate(_values(*shapes, seed=seed))}
    cut = min(second, len(weights) - 1)
    groups = [dict(list(weights.items())[cut:]), dict(list(weights.items())[:cut])]
    groups = [group for group in groups if group]
    root = tmp_path_factory.mktemp("any")
    frozen = {"frozen": _values(data.draw(_SHAPES), seed=seed + 1)[0].bfloat16()}
    found = {
        "z3": write_zero3(root / "z3" / "t", groups, world_size, sub_group_size=sub_group_size, frozen=frozen),
        "z2": write_zero12(
            root / "z2" / "t", groups, world_size, others=frozen, aligned=data.draw(st.sampled_from((1, 4)))
        ),
    }
    for case, expected in found.items():
        index = _open(root / case)
        assert_holds(index, expected)
        for name, tensor in expected.items():
            # Any box, as a resume on other ranks asks for, and every element of it once.
            box = data.draw(boxes_in(tuple(tensor.shape)))
            values = index[name].bits(box).view(np.dtype("<u2") if tensor.dtype == torch.bfloat16 else np.float32)
            wanted = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(values, wanted.numpy()[box.slices()])
            assert len(index[name].chunks) == len(list(index[name].chunks))
    shutil.rmtree(root)


def test_frozen_weights_buffers_and_tied_names_are_all_there_in_the_order_of_the_model(tmp_path: Path) -> None:
    # Case 78.
    frozen, scale = _values((7, 3), (1,), seed=1)
    expected = write_zero3(
        tmp_path / "t", _groups(), 2,
        frozen={"f": frozen.bfloat16()}, buffers={"scale": scale, "counts": torch.arange(3), "empty": torch.zeros(0)},
        shared={"head": "a", "also_frozen": "f"},
    )  # fmt: skip
    index = _open(tmp_path)
    assert_holds(index, expected)
    assert [*index.weights()] == ["a", "b", "c", "d", "f", "head", "also_frozen", "scale", "counts", "empty"]
    assert {name: index[name].alias_of for name in ("head", "also_frozen", "a")} == {
        "head": "a",
        "also_frozen": "f",
        "a": None,
    }
    assert (index["a"].dtype, index["f"].dtype, index["counts"].dtype) == ("float32", "bfloat16", "int64")
    assert index.layout == "deepspeed"
    assert index.world_size == 2


@pytest.mark.parametrize("step", [3, 3.0, 16_777_216])
def test_a_step_is_a_float32_scalar_whether_the_file_has_a_tensor_or_a_number(tmp_path: Path, step: Any) -> None:
    # DeepSpeedCPUAdam counts in an int, torch's AdamW in a tensor.
    for folder, write in ((tmp_path / "z3", write_zero3), (tmp_path / "z2", write_zero12)):
        write(folder / "t", _groups(), 2, step=step)
        entry = _open(folder)["optim/b/step"]
        assert (entry.dtype, entry.shape, entry.read().item()) == ("float32", (), float(step))


def test_a_step_that_is_a_number_moves_into_a_file_like_any_tensor(tmp_path: Path) -> None:
    write_zero3(tmp_path / "t", _groups(), 2, step=5)
    index = _open(tmp_path)
    wanted = index.with_entries({name: index[f"optim/{name}/step"] for name in ("a", "d")})
    with (tmp_path / "steps").open("w+b") as file:

        class Sink:
            """A file with one number after the other."""

            def dtype(self, name: str) -> str:
                return "float32"

            def file_range(self, name: str, box: Box) -> tuple[int, int]:
                return file.fileno(), 4 * [*wanted].index(name)

            def write(self, name: str, box: Box, bits: Any) -> None:
                raise AssertionError

        execute(plan(wanted, [(name, Box((), ())) for name in wanted], 1 << 20), Sink())
    assert np.fromfile(tmp_path / "steps", "<f4").tolist() == [5.0, 5.0]


def test_a_step_that_only_the_parameter_group_notes_is_each_weights(tmp_path: Path) -> None:
    # FusedAdam of old.
    write_zero3(tmp_path / "t", _groups(), 2)

    def edit(state: dict[str, Any]) -> None:
        inner = state["optimizer_state_dict"]["optimizer_state_dict"]
        for number, of_one in inner["state"].items():
            del of_one["step"]
            inner["param_groups"][number]["step"] = 5 + number

    for rank in range(2):
        change(tmp_path / "t" / OPTIM_3.format(rank), edit)
    index = _open(tmp_path)
    assert index["optim/a/step"].read().item() == 5
    assert index["optim/d/step"].read().item() == 6


def test_an_elastic_checkpoint_of_older_deepspeed(tmp_path: Path) -> None:
    expected = write_zero12(tmp_path / "t", _groups(), 3, elastic=True, stage=1)
    assert_holds(_open(tmp_path), expected)


def test_a_partition_of_padding_alone(tmp_path: Path) -> None:
    # 3 elements for 4 ranks: partitions of 2, so the last two have nothing.
    (three,) = _values((3,))
    expected = write_zero12(tmp_path / "t", [{"three": three}], 4)
    assert_holds(_open(tmp_path), expected)
    assert len(_open(tmp_path)["three"].chunks) == 2


def test_objects_are_schedule_hyperparameters_and_each_ranks_generators(tmp_path: Path) -> None:
    write_zero3(tmp_path / "t", _groups(), 2, client={"rng": {"torch": torch.arange(3)}})
    objects = _open(tmp_path).objects
    assert objects["scheduler"] == {"last_epoch": 3}
    assert objects["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.999)}, {"lr": 0.2, "betas": (0.9, 0.999)}]
    assert {rank: state["torch"].tolist() for rank, state in objects["rng"].items()} == {0: [0, 1, 2], 1: [0, 1, 2]}
    # Below stage 3 there is one file for all ranks; stage 3 may name its rank too.
    change(tmp_path / "t" / MODEL_3.format(1), lambda state: state.update(rng={1: "own"}))
    assert _open(tmp_path).objects["rng"][1] == "own"
    write_zero12(tmp_path / "z2" / "t", _groups(), 2)
    assert dict(_open(tmp_path / "z2").objects)["rng"] == {}
    change(tmp_path / "z2" / "t" / MODEL_2, lambda state: state.update(rng={0: "a", 1: "b"}))
    assert _open(tmp_path / "z2").objects["rng"] == {0: "a", 1: "b"}


def test_the_16_bit_copy_is_read_where_lower_stages_lack_their_optimizer_files(tmp_path: Path) -> None:
    expected = write_zero12(tmp_path / "t", _groups(), 2)
    for rank in range(2):
        (tmp_path / "t" / OPTIM_2.format(rank)).unlink()
    index = _open(tmp_path)
    assert_holds(index, {name: value.bfloat16() for name, value in expected.items() if not name.startswith("optim/")})
    assert "no optim_states files" in index.unread[0]
    assert index.world_size == 2


def test_without_zero_the_weights_of_the_model_file_are_read(tmp_path: Path) -> None:
    # Case 80. The file of stage 0: no param_shapes, and the optimizer numbers its moments.
    (weight, buffer) = _values((4, 3), (2,))
    module = {"w": weight, "tied": weight, "buffer": buffer}
    (tmp_path / "t").mkdir()
    torch.save({"module": module, "param_shapes": None, "optimizer": {"state": {}}}, tmp_path / "t" / MODEL_2)
    index = _open(tmp_path)
    assert_holds(index, module)
    assert index["tied"].alias_of == "w"
    assert "names no weights" in index.unread[0]


def test_pieces_of_a_box_are_only_the_runs_that_it_reaches(tmp_path: Path) -> None:
    (big,) = _values((64, 8))
    write_zero3(tmp_path / "t", [{"big": big}], 8)
    index = _open(tmp_path)
    rows = index["big"].chunks[0].box
    assert math.prod(rows.sizes) == 64
    assert {Path(piece.source.file).name for piece in index["big"].pieces(rows)} == {OPTIM_3.format(0)}


# Where it lies


def test_tags(tmp_path: Path) -> None:
    expected = {
        tag: write_zero3(tmp_path / tag, _groups(seed), 2) for seed, tag in enumerate(("global_step9", "global_step10"))
    }
    # The tag's folder, by name.
    for tag, tensors in expected.items():
        assert_holds(_open(tmp_path / tag), tensors)
    # Nothing says which.
    with pytest.raises(CallError, match=r"holds global_step9, global_step10, and no file latest says which counts"):
        _open(tmp_path)
    # `latest` does.
    (tmp_path / "latest").write_text("global_step9\n")
    assert_holds(_open(tmp_path), expected["global_step9"])
    assert "tag global_step9 (named by latest)" in locate(tmp_path).notes[0]
    # A tag that is not there, and no tag at all.
    (tmp_path / "latest").write_text("global_step11")
    with pytest.raises(
        IncompleteError, match=r"latest names global_step11, which is not here .* global_step9, global_step10"
    ):
        _open(tmp_path)
    for name in ("../elsewhere", "..", "", "a/b", "/etc"):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(DamagedError, match="which is no folder here"):
            _open(tmp_path)
    # The only one.
    (tmp_path / "latest").unlink()
    shutil.rmtree(tmp_path / "global_step9")
    assert_holds(_open(tmp_path), expected["global_step10"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="holds no files of DeepSpeed"):
        _open(tmp_path / "empty")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it: tied embeddings."""
    return tiny_qwen2(tmp_path_factory.mktemp("model"), tied=True)


def _state(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def assert_merges_to(reference: Path, source: Path, out: Path, **options: Any) -> None:
    report = milepost.merge(source, out, **options)
    merged, expected = _state(out), _state(reference)
    assert set(merged) == set(expected)
    assert report.tensors == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name


NOT_THE_MODELS = {
    *("latest", "zero_to_fp32.py", "zero_to_torch.py"),
    *("trainer_state.json", "training_args.bin", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"),
}
"""What HF Trainer and DeepSpeed leave in `checkpoint-N` and is none of the model's companions."""


def test_the_run_of_hf_trainer(tmp_path: Path, model: Path) -> None:
    for step in (2, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        write_zero3(
            folder / f"global_step{step}", [_state(model)], 2, shared={"lm_head.weight": "model.embed_tokens.weight"}
        )
        for name in ("config.json", "generation_config.json"):
            shutil.copy(model / name, folder)
        for name in NOT_THE_MODELS:
            (folder / name).write_text("{}")
        (folder / "latest").write_text(f"global_step{step}")
        # The 16-bit model that HF Trainer leaves beside: the trainer's own files come first.
        shutil.copy(model / "model.safetensors", folder)
    for place, source in enumerate((tmp_path / "run", folder, folder / "global_step10")):
        assert_merges_to(model, source, tmp_path / f"out{place}")
        located = locate(source)
        assert (located.layout.name, located.step) == ("deepspeed", 10)
        assert not NOT_THE_MODELS & {path.name for path in (tmp_path / f"out{place}").iterdir()}
    assert "--backend huggingface takes the model beside it" in " ".join(locate(folder).notes)
    assert milepost.test(folder, model).ok
    assert verify(tmp_path / "run", deep=True).ok


def test_the_folders_of_openrlhf(tmp_path: Path, model: Path) -> None:
    state = _state(model)
    critic = {name: tensor + 1 for name, tensor in state.items()} | {"score.weight": _values((1, 16))[0]}
    for role, weights in (("_actor", state), ("_critic", critic)):
        for tag in ("global_step5", "global_step10"):
            write_zero3(tmp_path / role / tag, [weights], 3)
        (tmp_path / role / "latest").write_text("global_step10")
        (tmp_path / role / "zero_to_fp32.py").touch()
    shutil.copytree(model, tmp_path / "global_step10_hf")
    for role in ("actor", "_actor", None):
        assert_merges_to(
            model, tmp_path, tmp_path / f"out{role}", role=role, model=milepost.ModelOptions(hf_model_path=model)
        )
    milepost.merge(tmp_path, tmp_path / "critic", role="critic", model=milepost.ModelOptions(hf_model_path=model))
    merged = _state(tmp_path / "critic")
    assert torch.equal(merged["model.norm.weight"], critic["model.norm.weight"])
    assert merged["score.weight"].shape == (1, 16)


def test_a_role_of_a_step_of_ours(tmp_path: Path, model: Path) -> None:
    role = tmp_path / "global_step_4" / "actor"
    write_zero3(role / "global_step7", [_state(model)], 2)
    (role / "latest").write_text("global_step7")
    shutil.copytree(model, role / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    for place, source in enumerate((tmp_path / "global_step_4", role, role / "global_step7")):
        assert_merges_to(model, source, tmp_path / f"out{place}")
    located = locate(role)
    assert (located.role, located.step) == ("actor", 4)


def test_16_bits_as_asked_are_the_masters_rounded(tmp_path: Path, model: Path) -> None:
    write_zero3(tmp_path / "t", [_state(model)], 2)
    milepost.merge(tmp_path, tmp_path / "out", dtype="bf16", model=milepost.ModelOptions(hf_model_path=model))
    for name, tensor in _state(tmp_path / "out").items():
        assert torch.equal(tensor, _state(model)[name].bfloat16()), name


def test_the_command_line_with_neither_deepspeed_nor_torch(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "checkpoint-3"
    write_zero3(run / "t", [_state(model)], 2, sub_group_size=100)
    shutil.copy(model / "config.json", run)
    script = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'deepspeed', 'transformers'))\n"
        "from milepost.cli import main\n"
        "for words in WORDS:\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, words\n"
    )
    out = str(tmp_path / "out")
    words = [
        ("merge", "--backend", "deepspeed", str(run), out),
        ("test", "--backend", "deepspeed", str(run), out),
        ("inspect", "--backend", "deepspeed", str(run)),
        ("verify", "--deep", "--backend", "deepspeed", str(run)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", script.replace("WORDS", repr(words))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "layout deepspeed, world size 2, step 3" in done.stdout
    assert "good: " in done.stdout


# Faults


@pytest.fixture
def z3(tmp_path: Path) -> Path:
    """A ZeRO-3 tag of three ranks."""
    write_zero3(tmp_path / "t", _groups(), 3, frozen={"f": _values((9,), seed=4)[0]}, sub_group_size=6)
    return tmp_path / "t"


@pytest.fixture
def z2(tmp_path: Path) -> Path:
    """A ZeRO-2 tag of three ranks."""
    write_zero12(tmp_path / "t", _groups(), 3)
    return tmp_path / "t"


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write_zero3(folder, _groups(), 8)
    (folder / OPTIM_3.format(3)).unlink()
    with pytest.raises(IncompleteError, match="optim_states files: expected 8, found 7: rank 3 missing"):
        _open(tmp_path)
    for rank in (0, 1, 6):
        (folder / OPTIM_3.format(rank)).unlink()
    with pytest.raises(IncompleteError, match="expected 8, found 4: ranks 0-1, 3, 6 missing"):
        _open(tmp_path)
    assert not verify(tmp_path).ok
    for rank in range(8):
        (folder / OPTIM_3.format(rank)).unlink(missing_ok=True)
    with pytest.raises(IncompleteError, match="no optim_states files; under ZeRO-3 the trained weights lie in them"):
        _open(tmp_path)


def test_a_missing_model_file_of_a_rank_is_named(z3: Path) -> None:
    (z3 / MODEL_3.format(0)).unlink()
    with pytest.raises(IncompleteError, match="model_states files: expected 3, found 2: rank 0 missing"):
        _open(z3)
    for rank in (1, 2):
        (z3 / MODEL_3.format(rank)).unlink()
    with pytest.raises(IncompleteError, match="no model_states file"):
        _open(z3)


def test_more_ranks_than_the_save_had(z3: Path) -> None:
    shutil.copy(z3 / OPTIM_3.format(2), z3 / OPTIM_3.format(3))
    with pytest.raises(DamagedError, match="optim_states files: expected 3, found 4: rank 3 too many"):
        _open(z3)
    (z3 / OPTIM_3.format(3)).unlink()
    change(z3 / OPTIM_3.format(1), lambda state: state["optimizer_state_dict"].update(partition_count=4))
    with pytest.raises(DamagedError, match=r"was saved by 4 ranks, .*rank_0.* by 3"):
        _open(z3)


def test_two_files_of_one_rank(z3: Path) -> None:
    shutil.copy(z3 / OPTIM_3.format(1), z3 / OPTIM_2.format(1))
    with pytest.raises(DamagedError, match="are both rank 1's; two runs saved under one tag"):
        _open(z3)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda state: state.update(global_steps=4), r"global_steps \(3 and 4\) differ from"),
        (lambda state: state["param_shapes"][0].update(a=torch.Size((3, 5))), "the shapes of weights differ from"),
        (
            lambda state: state["frozen_param_shapes"].update(f=torch.Size((3, 3))),
            "the shapes of frozen weights differ",
        ),
        (lambda state: state.update(mp_world_size=2), "tensor parallelism over 2 ranks"),
        (lambda state: state.update(ds_autoep_layers=[{"x": 1}]), "a mixture of experts"),
        (lambda state: state.update(frozen_param_fragments={}), "the fragment of f is no flat tensor"),
        (lambda state: state.update(frozen_param_fragments={"f": torch.zeros(4)}), "has 4 elements, not 3"),
        (lambda state: state.update(param_shapes="all"), "param_shapes is no list"),
        (lambda state: state.update(module=None), "holds no model's state"),
        (lambda state: state.update(shared_params=[1]), "shared_params is no dictionary of names"),
        (lambda state: state["param_shapes"][0].update(a=(5, -3)), "a shape that is no sequence of sizes"),
    ],
)
def test_model_files_that_contradict_each_other(z3: Path, edit: Any, said: str) -> None:
    change(z3 / MODEL_3.format(1), edit)
    with pytest.raises(MilepostError, match=said):
        _open(z3)


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer_state_dict"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda state: _inner(state).update(zero_stage=2), "ZeRO stage 2, .* stage 3; two runs"),
        (lambda state: _inner(state).update(zero_stage=7), "ZeRO stage 7, which milepost does not know"),
        (lambda state: _inner(state).update(partition_count="3"), "does not say for how many ranks"),
        (lambda state: _inner(state).update(partition_count=10**12), "does not say for how many ranks"),
        (lambda state: _inner(state).update(partition_count=[3, 1]), "a mixture of experts"),
        (lambda state: _inner(state)["fp32_flat_groups"].pop(), "hold other numbers of elements"),
        (lambda state: _inner(state).update(fp32_flat_groups=[torch.zeros(2, 2)]), "no fp32_flat_groups in it"),
        (lambda state: _inner(state)["optimizer_state_dict"]["state"][0].update(step=4), "step differs between"),
        (lambda state: _inner(state)["optimizer_state_dict"]["state"][0].update(step="4"), "step differs between"),
        (lambda state: _inner(state)["optimizer_state_dict"]["state"][0].pop("exp_avg"), "hold different moments"),
        (lambda state: _inner(state)["optimizer_state_dict"]["state"].clear(), "hold different moments"),
        (
            lambda state: _inner(state)["optimizer_state_dict"]["state"][0].update(exp_avg=torch.zeros(2)),
            "exp_avg of a flat group of 13 elements is",
        ),
        (
            lambda state: _inner(state)["optimizer_state_dict"]["state"].update({9: {}}),
            "a state of tensor 9, and 2 flat",
        ),
        (lambda state: _inner(state).update(optimizer_state_dict=[1]), "another form than torch's"),
        (lambda state: state.update(optimizer_state_dict=None), "holds no optimizer's state"),
    ],
)
def test_optimizer_files_that_contradict_each_other(z3: Path, edit: Any, said: str) -> None:
    change(z3 / OPTIM_3.format(1), edit)
    with pytest.raises(MilepostError, match=said):
        _open(z3)


def test_optimizer_files_of_another_save_than_the_model(z3: Path, tmp_path: Path) -> None:
    for rank in range(3):
        change(z3 / MODEL_3.format(rank), lambda state: state["param_shapes"][0].update(a=torch.Size((50, 3))))
    with pytest.raises(DamagedError, match=r"a of shape \[50, 3\] finds no place in its flat groups"):
        _open(z3)
    (z3 / "offloaded_tensors").mkdir()
    with pytest.raises(IncompleteError, match="were on NVMe and lie in offloaded_tensors/"):
        _open(z3)
    (z3 / "offloaded_tensors").rmdir()
    for rank in range(3):
        change(z3 / MODEL_3.format(rank), lambda state: state["param_shapes"].pop())
    with pytest.raises(DamagedError, match=r"finds no place|elements belong to no weight"):
        _open(z3)


def test_weights_without_bytes_are_named(z3: Path) -> None:
    for rank in range(3):
        change(
            z3 / MODEL_3.format(rank), lambda state: state.update(frozen_param_shapes=None, frozen_param_fragments=None)
        )
    with pytest.raises(IncompleteError, match=r"no file holds f; .*exclude_frozen_parameters"):
        _open(z3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_ranks_file_copied_over_anothers(request: pytest.FixtureRequest, stage: int) -> None:
    folder: Path = request.getfixturevalue(f"z{stage}")
    name = OPTIM_3 if stage == 3 else OPTIM_2
    shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(DamagedError, match=r"rank_1.*holds the same values as .*rank_0|group_paddings"):
        _open(folder)


def test_a_copied_model_file_with_frozen_weights(z3: Path) -> None:
    shutil.copy(z3 / MODEL_3.format(2), z3 / MODEL_3.format(1))
    with pytest.raises(DamagedError, match=r"rank_2.*holds the same values as .*rank_1"):
        _open(z3)


def test_ranks_that_hold_zeros_alone_are_no_copies(tmp_path: Path) -> None:
    expected = write_zero3(tmp_path / "t", [{"w": torch.zeros(8)}], 2)
    assert_holds(_open(tmp_path), expected)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda state: _inner(state)["single_partition_of_fp32_groups"].pop(), "1 parameter groups, .* has 2"),
        (
            lambda state: _inner(state).update(single_partition_of_fp32_groups=None),
            "no single_partition_of_fp32_groups",
        ),
        (lambda state: _inner(state).update(group_paddings=[99, 0]), "is longer than rank 0's"),
        (lambda state: _inner(state).update(group_paddings=["x", 0]), "a padding of group 0 that is no number"),
        (lambda state: _inner(state).update(base_optimizer_state=[{}]), "optimizer states of 1 groups, of 2"),
        (
            lambda state: _inner(state)["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(1)),
            "1 elements of group 0, of 14; it is of another save",
        ),
    ],
)
def test_partitions_that_contradict_each_other(z2: Path, edit: Any, said: str) -> None:
    change(z2 / OPTIM_2.format(1), edit)
    with pytest.raises(DamagedError, match=said):
        _open(z2)


@pytest.mark.parametrize("paddings", [7, [[0, 0]], [[0], [0]], [[0, -1], [0, 0]], [["x", 0], [0, 0]]])
def test_paddings_that_are_none(z2: Path, paddings: Any) -> None:
    change(z2 / OPTIM_2.format(0), lambda state: _inner(state).update(param_alignment_paddings=paddings))
    with pytest.raises(DamagedError, match="paddings of other weights than the model_states file names"):
        _open(z2)


@pytest.mark.parametrize("step", ["4", True, 10**60, [3]])
def test_a_step_that_is_no_number(z3: Path, step: Any) -> None:
    def edit(state: dict[str, Any]) -> None:
        _inner(state)["optimizer_state_dict"]["state"][0]["step"] = step

    for rank in range(3):
        change(z3 / OPTIM_3.format(rank), edit)
    with pytest.raises(DamagedError, match="step is neither a tensor nor a number"):
        _open(z3)


def test_partitions_that_hold_more_than_the_weights(z2: Path) -> None:
    change(z2 / MODEL_2, lambda state: state["param_shapes"][0].update(b=torch.Size((2, 2))))
    with pytest.raises(DamagedError, match="group 0 holds more than the 19 elements"):
        _open(z2)
    change(z2 / MODEL_2, lambda state: state["param_shapes"][0].update(b=torch.Size((2, 4, 3))))
    with pytest.raises(DamagedError, match=r"b has shape \[4, 2, 3\] in module and \[2, 4, 3\] in param_shapes"):
        _open(z2)


def test_stages_that_lie_together(z3: Path, tmp_path: Path) -> None:
    write_zero12(tmp_path / "other", _groups(), 3)
    shutil.copy(tmp_path / "other" / MODEL_2, z3)
    with pytest.raises(DamagedError, match="which ZeRO stages 0 to 2 write, and 3 model files of stage 3"):
        _open(z3)
    for rank in range(3):
        (z3 / MODEL_3.format(rank)).unlink()
    with pytest.raises(DamagedError, match="optimizer files of ZeRO stage 3, and a model in one file for all ranks"):
        _open(z3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "mixture of experts"),
        ("expert_3_mp_rank_00_model_states.pt", "mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture of experts"),
        ("layer_03-model_00-model_states.pt", "pipeline parallelism"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", r"tensor parallelism \(mp_rank 1\)"),
        ("mp_rank_01_model_states.pt", r"tensor parallelism \(mp_rank 1\)"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", r"tensor parallelism \(mp_rank 1\)"),
    ],
)
def test_what_is_not_read_is_refused_by_name(z3: Path, name: str, said: str) -> None:
    (z3 / name).touch()
    with pytest.raises(CallError, match=f"{re.escape(name)}: .*{said}"):
        _open(z3)


@pytest.mark.parametrize("name", [OPTIM_3.format(1), MODEL_3.format(1)])
def test_a_truncated_file(z3: Path, name: str) -> None:
    path = z3 / name
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedError, match=f"{re.escape(name)}: not a whole torch.save archive"):
        _open(z3)


def test_altered_bytes_are_found_by_verify_deep(z3: Path) -> None:
    index = _open(z3)
    chunk = index["a"].chunks[0]
    with Path(chunk.source.file).open("r+b") as file:
        file.seek(chunk.source.start())
        file.write(b"\x7f")
    assert verify(z3).ok
    (problem,) = verify(z3, deep=True).problems
    assert "the CRC-32 differs" in problem


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("name", [OPTIM_3.format(1), MODEL_3.format(1)])
def test_code_in_a_file_is_refused_and_not_run(z3: Path, name: str) -> None:
    change(z3 / name, lambda state: state.update(more=_Evil()))
    with pytest.raises(RefusedError, match=r"asks for posix\.system.*nothing was run"):
        _open(z3)


def test_files_with_altered_bytes_raise_nothing_but_our_errors(z3: Path) -> None:
    generator = random.Random(0)
    names = sorted(path.name for path in z3.iterdir())
    whole = {name: (z3 / name).read_bytes() for name in names}
    for _ in range(150):
        name = generator.choice(names)
        data = bytearray(whole[name])
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        (z3 / name).write_bytes(data)
        try:
            index = _open(z3)
            index.check_tiling()
            dict(index.objects)
            for entry in index.values():
                entry.bits()
        except MilepostError:
            pass
        (z3 / name).write_bytes(whole[name])
