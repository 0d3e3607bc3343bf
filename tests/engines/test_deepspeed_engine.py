"""The DeepSpeed engine on real ZeRO in real gloo processes: what it shows, what it saves, and who can load that."""

from __future__ import annotations

import math
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import tiny_qwen2

pytest.importorskip("deepspeed")

import zero_engines as zero
from zero_engines import Folder, assert_holds, make, tokens, train, whole

from milepost.engines.base import RNG
from milepost.engines.deepspeed.setup import ZeroSettings
from milepost.engines.deepspeed.state import gaps
from milepost.engines.fsdp import FsdpEngine, Sharding
from milepost.errors import MismatchError
from milepost.layouts import open_directory

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = {"zero_optimization": {"sub_group_size": 700, "stage3_param_persistence_threshold": 0}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
"""As with offload_optimizer=true, but under torch's Adam: DeepSpeed's takes minutes to compile."""
CASES: dict[str, tuple[ZeroSettings, bool]] = {
    "z3": (ZeroSettings(3, FP32), False),
    "z3-bf16": (ZeroSettings(3, BF16), True),
    "z3-subgroups": (ZeroSettings(3, BF16, config=SMALL), False),
    "z2": (ZeroSettings(2, BF16), True),
    "z1": (ZeroSettings(1, BF16), False),
    "z3-offload": (ZeroSettings(3, BF16, config=OFFLOAD), False),
}
"""Name -> how it is laid out, and whether some weights are frozen."""
LOADED = {1: ("z3-offload", "z2"), 3: ("z3-bf16", "z3-subgroups", "z1"), 4: ("z3", "z2")}
"""Number of ranks -> what they load."""
TRAINED = 2


def fsdp(directory: Path) -> FsdpEngine:
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.trainer.models import ModelSource, load_policy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    options: dict[str, Any] = {"dtype": FP32, "sharding": Sharding(), "optimizer": zero.settings(), "seed": 1}
    return load_policy(ModelSource(directory), mesh, zero.CPU, **options)


# Saved by two ranks


def _save(model: Path, out: Path) -> dict[str, Any]:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    torch.use_deterministic_algorithms(True)  # then fresh memory is full of NaN
    from transformers import AutoModelForCausalLM

    rank = dist.get_rank()
    told: dict[str, Any] = {}
    for case, (layout, frozen) in CASES.items():
        engine = make(model, layout, frozen=frozen)
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=layout.dtype)
        with torch.no_grad():
            assert torch.equal(engine.model(input_ids=tokens(2, 5)).logits, reference(input_ids=tokens(2, 5)).logits), (
                case
            )
        train(engine, TRAINED, tokens(4, 3 + rank))
        truth = whole(engine)
        assert_holds(engine, truth, TRAINED)
        _write_through_the_views(engine)
        before = whole(engine)
        _not_finite(engine, before)
        if case == "z3":
            told |= _refusals(engine, out)
        torch.manual_seed(100 + rank)
        engine.save(Folder(out / case))
        told[case, "drawn"] = torch.rand(3).tolist()
        if rank == 0:
            (out / f"{case}.truth").write_bytes(pickle.dumps(before))
        dist.barrier()
        told[case, "next"] = train(engine, 1, tokens(4, 9 + rank))
        # Bitwise what it was, and from there bitwise the same step: as loaded here, and as DeepSpeed itself loads it.
        again = make(model, layout, frozen=frozen)
        assert zero.load(again, out / case) == {}
        told[case, "again drawn"] = torch.rand(3).tolist()
        assert_holds(again, before, TRAINED)
        assert again.learning_rates == (lr_after(TRAINED),)
        told[case, "again"] = train(again, 1, tokens(4, 9 + rank))
        assert_same(whole(again), whole(engine))
        if case in ("z3-bf16", "z1"):
            told[case, "own"] = _with_deepspeed_alone(model, layout, frozen, out / case, before, engine)
    other = fsdp(model)
    train(other, TRAINED, tokens(4, 3 + rank))
    other.save(Folder(out / "fsdp"))
    told["compiled"] = list(Path(out / "compiled").rglob("*"))
    return told


def _with_deepspeed_alone(
    model: Path, layout: ZeroSettings, frozen: bool, folder: Path, before: dict[str, np.ndarray], engine: Any
) -> list[float]:
    """The same next step where DeepSpeed's own `load_checkpoint` reads the files, schedule included."""
    own = make(model, layout, frozen=frozen)
    own.engine.lr_scheduler = own.scheduler
    path, client = own.engine.load_checkpoint(str(folder))
    own.engine.lr_scheduler = None
    assert str(path).startswith(str(folder / "global_step3"))
    assert client["rng"][dist.get_rank()].keys() >= {"cpu", "numpy", "random"}
    assert (own.engine.global_steps, own.scheduler.last_epoch) == (TRAINED + 1, TRAINED)  # one update was skipped
    assert own.learning_rates == (lr_after(TRAINED),)
    assert_holds(own, before, TRAINED)
    norms = train(own, 1, tokens(4, 9 + dist.get_rank()))
    assert_same(whole(own), whole(engine))
    return norms


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


def lr_after(step: int) -> float:
    return zero.LR * (1 / (1 + step))


def _write_through_the_views(engine: Any) -> None:
    """What is written into a view is what DeepSpeed updates next, and what its forward computes with."""
    name = "model.layers.1.mlp.down_proj.weight"
    for box, view in engine.tensors()[name].boxes:
        view.copy_(torch.arange(384.0).reshape(16, 24)[box.slices()] / 1000)
    engine.finish_load()
    np.testing.assert_array_equal(whole(engine)[name], np.arange(384, dtype=np.float32).reshape(16, 24) / 1000)


def _not_finite(engine: Any, before: dict[str, np.ndarray]) -> None:
    """A gradient that is not finite on one rank changes nothing on any."""
    weight = math.nan if dist.get_rank() == 1 else 1.0
    engine.backward(engine.forward(input_ids=tokens(2, 1)).logits.float().sum() * weight, last=True)
    assert not math.isfinite(engine.step())
    assert_holds(engine, before, TRAINED)


def _refusals(engine: Any, out: Path) -> dict[str, Any]:
    """A disk that refuses on one rank keeps no rank waiting; counts that differ are refused by name."""
    told = {}
    try:
        engine.save(Folder(out / "full", broken=dist.get_rank() == 1))
    except OSError as error:
        told["full"] = str(error)
    live = engine.tensors()
    live["optim/model.norm.weight/step"].boxes[0][1].fill_(7)
    with pytest.raises(MismatchError) as caught:
        engine.finish_load()
    told["counts"] = str(caught.value)
    engine.tensors()  # shows the optimizer's own counts again
    return told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, so that one weight has two names."""
    return tiny_qwen2(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("saved")
    return out, run_ranks(_save, 2, model, out)


@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_goes_on_bitwise(saved: tuple[Path, list[dict[str, Any]]], case: str) -> None:
    for rank in saved[1]:
        assert rank[case, "next"] == rank[case, "again"] == rank.get((case, "own"), rank[case, "next"])
        assert rank[case, "drawn"] == rank[case, "again drawn"]
    assert saved[1][0][case, "drawn"] != saved[1][1][case, "drawn"]
    assert saved[1][0][case, "next"] == saved[1][1][case, "next"]


def test_the_files_are_deepspeeds_own(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    def names(case: str) -> list[str]:
        folder = saved[0] / case
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    scripts = ["zero_to_fp32.py", "zero_to_torch.py"]
    companions = ["huggingface/config.json", "huggingface/generation_config.json", "latest"]
    assert names("z3-bf16") == [
        *(f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)),
        *(f"global_step3/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)),
        *companions,
        *scripts,
    ]
    assert names("z1") == [
        *(f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)),
        "global_step3/mp_rank_00_model_states.pt",
        *companions,
        *scripts,
    ]
    assert (saved[0] / "z3/latest").read_text() == "global_step3"


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_tool_and_the_reader_find_the_same_weights(
    saved: tuple[Path, list[dict[str, Any]]], case: str
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    truth = pickle.loads((saved[0] / f"{case}.truth").read_bytes())
    tool = get_fp32_state_dict_from_zero_checkpoint(str(saved[0] / case))
    index = open_directory(saved[0] / case)
    for name, value in truth.items():
        np.testing.assert_array_equal(index[name].read().float().numpy(), value, err_msg=name)
        if not name.startswith("optim/"):
            np.testing.assert_array_equal(tool[name].detach().float().numpy(), value, err_msg=name)


def test_a_disk_that_refuses_on_one_rank_is_told_there_and_nobody_waits(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert "No space left" in saved[1][1]["full"]
    assert "full" not in saved[1][0]


def test_weights_that_are_updated_together_but_count_otherwise_are_refused_by_name(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in saved[1]:
        assert re.match(r"optim/model.norm.weight/step is 7 and optim/\S+/step is 2: DeepSpeed", rank["counts"])


def test_nothing_was_compiled(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["compiled"] for rank in saved[1]] == [[], []]


# Loaded by other numbers of ranks, and by other engines


def _load(model: Path, out: Path) -> None:
    torch.use_deterministic_algorithms(True)
    size = dist.get_world_size()
    truths = {case: pickle.loads((out / f"{case}.truth").read_bytes()) for case in CASES}
    for case in LOADED[size]:
        layout, frozen = CASES[case]
        engine = make(model, layout, frozen=frozen)
        train(engine, 1, tokens(4, 9))
        remarks = zero.load(engine, out / case)
        assert_holds(engine, truths[case], TRAINED)
        assert list(remarks) == [RNG] and f"saved by 2 ranks, now {size}" in remarks[RNG]
        assert engine.learning_rates == (lr_after(TRAINED),) and engine.scheduler.last_epoch == TRAINED
        assert math.isfinite(train(engine, 1, tokens(4, 4))[0])
        # What pads the flat tensors is zero, not what the memory held: equal states give equal files.
        flats, runs = engine._zero.flats(), engine._zero.runs()
        padding = [flats[number].detach()[offset : offset + length] for number, offset, length in gaps(runs, flats)]
        assert not any(part.any() for part in padding)
        if (size, case, dist.get_rank()) == (3, "z3-bf16", 2):
            assert padding


def _cross(model: Path, out: Path) -> None:
    """Another stage, and the other engine, in both directions."""
    truths = {"z3": pickle.loads((out / "z3.truth").read_bytes())}
    engine = make(model, ZeroSettings(2, FP32))
    zero.load(engine, out / "z3")
    assert_holds(engine, truths["z3"], TRAINED)
    other = fsdp(model)
    zero.load(other, out / "z3")
    assert_holds(other, truths["z3"], TRAINED)
    assert other.lr == lr_after(TRAINED)
    index = open_directory(out / "fsdp")
    expected = {n: entry.numpy() for n, entry in index.items() if n != "lm_head.weight" and not n.endswith("/step")}
    # From the same state every layout makes the same steps as FSDP2, but for rounding.
    zero.load(other, out / "fsdp")
    rows = tokens(8, 8)[4 * dist.get_rank() :][:4]
    theirs = train(other, 2, rows)
    weights = {name: weight.detach().full_tensor().numpy() for name, weight in other.model.named_parameters()}
    for layout in (
        ZeroSettings(3, FP32),
        ZeroSettings(3, FP32, config=OFFLOAD),
        *(ZeroSettings(n, FP32) for n in (2, 1)),
    ):
        engine = make(model, layout)
        zero.load(engine, out / "fsdp")
        assert_holds(engine, expected, TRAINED)
        np.testing.assert_allclose(train(engine, 2, rows), theirs, rtol=1e-5, err_msg=str(layout))
        mine = whole(engine)
        for name, value in weights.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{layout}: {name}")


@pytest.mark.parametrize("size", LOADED)
def test_another_number_of_ranks_holds_bitwise_the_same(
    model: Path, saved: tuple[Path, list[dict[str, Any]]], size: int
) -> None:
    run_ranks(_load, size, model, saved[0])


def test_another_stage_and_another_engine_hold_bitwise_the_same_and_make_the_same_step(
    model: Path, saved: tuple[Path, list[dict[str, Any]]]
) -> None:
    run_ranks(_cross, 2, model, saved[0])
