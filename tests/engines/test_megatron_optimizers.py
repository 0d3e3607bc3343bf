"""Megatron's optimizers, in four real processes over gloo: float32 masters of a model in bfloat16, Megatron's own
DistributedOptimizer, their files, and the files that it writes by itself.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

pytest.importorskip("megatron.core")

pytest.importorskip("deepspeed")

import megatron_engines as made
import torch
import torch.distributed as dist
import zero_engines

from milepost.engines.base import Inputs
from milepost.engines.deepspeed.setup import ZeroSettings
from milepost.engines.megatron.parallel import Parallel
from milepost.engines.megatron.state import View
from milepost.engines.megatron.updates import Part
from milepost.errors import IncompleteError
from milepost.index import Box, moment_name
from milepost.layouts import open_directory
from milepost.layouts.huggingface import read_config
from milepost.layouts.megatron import buckets as megatron_buckets
from milepost.layouts.megatron import buffers as megatron_buffers
from milepost.layouts.megatron import numbered as megatron_numbered
from milepost.mapping import to_huggingface

ALONE, TP2, PP2, VPP2 = Parallel(), Parallel(2), Parallel(1, 2), Parallel(1, 2, 2)
EP2, EP2_PP2 = Parallel(1, 1, None, 2), Parallel(1, 2, None, 2)
FP32, BF16 = torch.float32, torch.bfloat16
ROWS, MORE = made.sequences(12, 5), made.sequences(12, 8)
SAVED = {
    "fsdp": (),
    "shared": ("classic", "dist", "megatron", "buckets"),  # TP2, float32
    "shared-bf16": ("classic", "dist", "megatron", "buckets"),  # VPP2, its tied embedding in a bucket of its own
    "whole-bf16": ("classic", "dist", "megatron"),  # TP2
    "experts": ("classic", "dist", "megatron", "buckets"),  # EP2, float32, with an optimizer of their own
    "whole-experts": ("megatron",),  # EP2, bfloat16
}
"""What is saved, and in which forms; `megatron` and `buckets` are what Megatron-LM would write."""
INTO = {
    "vpp2-bf16": {"parallel": VPP2, "distributed": True, "dtype": BF16},
    "tp2": {"parallel": TP2, "distributed": True},
    "dp4": {"parallel": ALONE, "distributed": True},
    "pp2-whole-bf16": {"parallel": PP2, "dtype": BF16},
}


MEGATRONS = {"megatron": made.save_as_megatron, "buckets": made.save_buckets}
INTO_FSDP = ("shared-dist", "shared-bf16-buckets", "shared-bf16-classic", "whole-bf16-dist", "whole-bf16-megatron")
INTO_ZERO = ("whole-bf16-dist", "shared-classic", "shared-bf16-buckets")
_FRESH = {
    "megatron": ["RNG", "learning-rate schedule", "optimizer"],
    "buckets": ["RNG", "learning-rate schedule"],
}
"""What of a run lies in no file of a form, as `load_objects` names it."""
BUFFERS = [
    ([int(size) for size in np.random.default_rng(seed).integers(1, 400, 12)], [n in own for n in range(12)], bucket)
    for seed, bucket in enumerate((None, 1, 130, 500, 1000))
    for own in ((), (0,), (11,), (0, 5))
]
"""Sizes of parameters, which of them have a bucket of their own, and how many elements a bucket may take."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def told(out: Path) -> list[dict[Any, Any]]:
    # Megatron itself cannot save buckets where the one before a tied embedding's ends at no multiple of 128.
    made.save_model(out / "qwen2", "qwen2", intermediate_size=28)
    made.save_model(out / "qwen3_moe", "qwen3_moe")
    return run_ranks(_optimizers, 4, out)


def _optimizers(out: Path) -> dict[Any, Any]:
    torch.use_deterministic_algorithms(True)  # then fresh memory is full of NaN
    return {**dict(_dense(out / "qwen2", out)), **dict(_experts(out / "qwen3_moe", out))}


def _dense(directory: Path, out: Path) -> Iterator[tuple[Any, Any]]:
    held: dict[str, dict[str, np.ndarray]] = {}
    fsdp = made.make_fsdp(directory)
    steps = {"fsdp": made.train(fsdp, 2, *ROWS)}
    fsdp.save(made.Folder(out / "fsdp"))
    held["fsdp"] = made.whole(fsdp)
    going: dict[str, Any] = {}
    for name, options in {
        "shared": {"parallel": TP2, "distributed": True},
        "shared-bf16": {"parallel": VPP2, "distributed": True, "dtype": BF16},
        "whole-bf16": {"parallel": TP2, "dtype": BF16},
    }.items():
        engine = made.make(directory, **options)
        steps[name] = made.train(engine, 2, *ROWS)
        held |= dict.fromkeys(_save(engine, directory, out, name), made.whole(engine))
        yield ("copies", name), _copies(engine)
        if name != "whole-bf16":
            torch.manual_seed(5)
            going[name] = (made.train(engine, 2, *MORE), made.whole(engine))
            yield ("nan", name), _not_finite(engine)
    yield "layouts", [_megatrons_layout(*case) for case in BUFFERS]
    yield "steps", steps
    yield "close", {name: _largest_difference(held[name], held["fsdp"]) for name in held}
    for place, (target, options) in enumerate(INTO.items()):
        engine = made.make(directory, **options)
        made.train(engine, 1, *MORE)
        for number, (name, truth) in enumerate(held.items()):
            if (number // 2 + place) % 2:
                continue  # a file is one picture whoever reads it, so each goes into half of the layouts
            remarks = made.load(engine, out / name)
            yield ("load", name, target), (_differing(made.whole(engine), truth), sorted(remarks), _copies(engine)[0])
            again = {("shared-dist", "tp2"): "shared", ("shared-bf16-classic", "vpp2-bf16"): "shared-bf16"}
            if (name, target) in again:
                wanted, whole = going[again[name, target]]
                yield ("going", target), (made.train(engine, 2, *MORE) == wanted, _differing(made.whole(engine), whole))
        if target == "dp4":
            yield "mutant", _shifted(engine)
    for name in INTO_FSDP:
        truth = held[name]
        remarks = made.load(fsdp, out / name)
        yield ("load", name, "fsdp"), (_differing(made.whole(fsdp), truth), sorted(remarks), 0)
    yield from _under_zero(directory, out, held)
    engine = made.make(directory, TP2, distributed=True, dtype=BF16)
    _load_by_megatron(engine, out / "shared-bf16-dist")
    yield ("megatron", "qwen2"), _differing(made.whole(engine), held["shared-bf16-dist"])


def _under_zero(directory: Path, out: Path, held: Mapping[str, Mapping[str, np.ndarray]]) -> Iterator[tuple[Any, Any]]:
    """Into ZeRO-3, as DeepSpeed itself tells what it holds, and from there into Megatron."""
    engine = zero_engines.make(directory, ZeroSettings(3, FP32))
    zero_engines.train(engine, 1, zero_engines.tokens(4, 5))
    for name in INTO_ZERO:
        truth = held[name]
        remarks = made.load(engine, out / name)
        wanted = {moment: value for moment, value in truth.items() if not moment.endswith("/step")}
        differing = _differing(zero_engines.whole(engine), wanted)
        for moment, count in made.whole(engine).items():
            if moment.endswith("/step") and count != truth[moment]:
                differing.append(moment)
        yield ("load", name, "zero"), (differing, sorted(remarks), 0)
    zero_engines.train(engine, 1, zero_engines.tokens(4, 6))
    engine.save(zero_engines.Folder(out / "zero"))
    truth = zero_engines.whole(engine)
    dist.barrier()
    megatron = made.make(directory, VPP2, distributed=True, dtype=BF16)
    remarks = made.load(megatron, out / "zero")
    found = {name: value for name, value in made.whole(megatron).items() if not name.endswith("/step")}
    yield ("load", "zero", "vpp2-bf16"), (_differing(found, truth), sorted(remarks), _copies(megatron)[0])


def _experts(directory: Path, out: Path) -> Iterator[tuple[Any, Any]]:
    bf16 = made.make(directory, EP2, dtype=BF16)
    made.train(bf16, 1, *ROWS)
    held = dict.fromkeys(_save(bf16, directory, out, "whole-experts"), made.whole(bf16))
    whole = made.remake(directory, EP2)
    steps = made.train(whole, 2, *ROWS)
    engine = made.remake(directory, EP2, distributed=True)
    yield (
        "expert steps",
        (steps, made.train(engine, 2, *ROWS), _largest_difference(made.whole(engine), made.whole(whole))),
    )
    truth = made.whole(engine)
    held |= dict.fromkeys(_save(engine, directory, out, "experts"), truth)
    again = made.remake(directory, EP2, distributed=True)
    _load_by_megatron(again, out / "experts-dist")
    yield ("megatron", "qwen3_moe"), _differing(made.whole(again), truth)
    other = made.make(directory, EP2_PP2, distributed=True, dtype=BF16)
    for name, truth in held.items():
        remarks = made.load(other, out / name)
        yield ("load", name, "ep2-pp2-bf16"), (_differing(made.whole(other), truth), sorted(remarks), 0)


def _save(engine: Any, directory: Path, out: Path, name: str) -> list[str]:
    names = []
    for form in SAVED[name]:
        names.append(f"{name}-{form}")
        if form in MEGATRONS:
            MEGATRONS[form](engine, out / names[-1])
            if dist.get_rank() == 0:
                (out / names[-1] / "huggingface").mkdir()
                shutil.copy(directory / "config.json", out / names[-1] / "huggingface")
        else:
            engine.form = form
            engine.save(made.Folder(out / names[-1]))
    dist.barrier()
    return names


def _megatrons_layout(sizes: list[int], alone: list[bool], bucket: int | None) -> tuple[list[int], int]:
    """Where a buffer of Megatron's own has parameters of these sizes, without what pads buckets, as in its files."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.process_groups_config import ProcessGroupCollection

    from milepost.engines.megatron.model import on_device

    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter, own in zip(parameters, alone, strict=True):
        parameter.shared_embedding = own
    groups = ProcessGroupCollection()
    groups.tp, groups.dp_cp = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    named = "params_with_names" in signature(_ParamAndGradBuffer).parameters  # since megatron-core 0.17
    with on_device(made.CPU):
        buffer = _ParamAndGradBuffer(
            *(
                config,
                FP32,
                FP32,
                [(p, "") for p in parameters] if named else parameters,
                groups.dp_cp,
                bucket,
                dict.fromkeys(parameters, ""),
                1.0,
            ),
            *(list(range(len(sizes))), False, groups),
        )
    before = np.cumsum([0, *(held.numel_unpadded for held in buffer.buckets)])
    places = [buffer.param_index_map[parameter] for parameter in parameters]
    starts = [int(before[number]) + start - buffer.buckets[number].offset for start, _, number in places]
    return starts, buffer.numel_unpadded


def _copies(engine: Any) -> tuple[int, int, str]:
    """How many numbers of the model's parameters are not their masters', rounded; how many masters are no numbers of
    bfloat16; the type in which gradients are gathered."""
    wrong = fine = 0
    for name, part in engine.updates.parts().items():
        parameter = engine._tensors[name]
        own = parameter.detach().view(-1)[part.start : part.stop]
        wrong += int((own != part.values.reshape(-1).to(own.dtype)).sum())
        fine += int((part.values.to(BF16).float() != part.values).sum())
    return wrong, fine, str(parameter.main_grad.dtype)


def _shifted(engine: Any) -> str:
    """What is said of shares that are shown one element before their place."""
    parts = engine.updates.parts
    engine.updates.parts = lambda: {n: replace(part, start=max(0, part.start - 1)) for n, part in parts().items()}
    try:
        made.whole(engine)
    except AssertionError as error:
        return str(error)
    finally:
        engine.updates.parts = parts
    return ""


def _not_finite(engine: Any) -> tuple[float, list[str]]:
    """A gradient that is not finite, on one data-parallel rank only."""
    before = made.whole(engine)

    def loss(_: int, outputs: Any) -> Any:
        return outputs.logits.float().sum() * (math.nan if engine.data_rank else 1.0), None

    engine.forward_backward([Inputs(*MORE, 3)], loss)
    return engine.step(), _differing(made.whole(engine), before)


def _load_by_megatron(engine: Any, folder: Path) -> None:
    """Megatron's own loader and DistributedOptimizer, with which it reads what was `fully_reshardable`.

    With torch's AdamW, which it takes where there is neither Apex nor Transformer Engine, its loader asks for a count
    of steps for every parameter, which no file of its own has; it lies there as one number.
    """
    from megatron.core import dist_checkpointing, parallel_state

    from milepost.engines.megatron.model import on_device

    engine.tensors()
    optimizer = engine.updates.megatron
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    (chunk,) = engine.model.chunks
    with on_device(made.CPU), torch.no_grad():
        weights = chunk.sharded_state_dict(metadata=metadata)
        wanted = [
            inner.sharded_state_dict(weights, is_loading=True, metadata=metadata)["param_state"]
            for inner in optimizer.chained_optimizers
        ]
        asked = {"model": weights, "states": wanted}
        loaded = dist_checkpointing.load(asked, str(folder / "dist_ckpt"))
        chunk.load_state_dict(loaded["model"])
        common = dist_checkpointing.load_common_state_dict(str(folder / "dist_ckpt"))
        (group,) = common["optimizer"]["optimizer"]["param_groups"]
        for inner, state in zip(optimizer.chained_optimizers, loaded["states"], strict=True):
            given = inner._set_main_param_and_optimizer_states
            inner._set_main_param_and_optimizer_states = lambda parameter, tensors, given=given: given(
                parameter, {**tensors, "step": torch.tensor(group["step"])}
            )
            inner.load_parameter_state_from_fully_reshardable(state)
    engine.updates.refresh()


def _differing(found: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> list[str]:
    """Names of which not every bit is the same."""
    return sorted(set(found) ^ set(truth)) + [
        n for n in truth if n in found and found[n].tobytes() != truth[n].tobytes()
    ]


def _largest_difference(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    assert set(found) == set(truth)
    return max(float(np.abs(found[name] - truth[name]).max()) for name in truth if not name.startswith("optim/"))


# Training


def test_the_distributed_optimizer_takes_the_steps_of_fsdp(told: list[dict[Any, Any]]) -> None:
    steps, close = told[0]["steps"], told[0]["close"]
    assert steps["fsdp"][0][1] > 1  # so the clipping is seen too
    np.testing.assert_allclose(steps["shared"], steps["fsdp"], rtol=2e-6)
    assert close["shared-classic"] < made.SAME_STEPS


def test_experts_have_an_optimizer_of_their_own_and_take_the_same_steps(told: list[dict[Any, Any]]) -> None:
    whole, shared, difference = told[0]["expert steps"]
    np.testing.assert_allclose(shared, whole, rtol=2e-6)
    assert difference < 1e-6


def test_masters_are_float32_and_the_model_is_what_they_round_to(told: list[dict[Any, Any]]) -> None:
    steps, close = told[0]["steps"], told[0]["close"]
    for name in ("shared-bf16", "whole-bf16"):
        for rank in told:
            wrong, fine, gradients = rank["copies", name]
            assert wrong == 0 and fine > 1000 and gradients == "torch.float32"
        np.testing.assert_allclose(steps[name], steps["fsdp"], rtol=2e-2)
        assert 1e-4 < close[f"{name}-classic"] < 0.05  # a bfloat16 has 8 bits
    np.testing.assert_allclose(steps["shared-bf16"], steps["whole-bf16"], rtol=2e-2)


@pytest.mark.parametrize("name", ["shared", "shared-bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(told: list[dict[Any, Any]], name: str) -> None:
    for rank in told:
        norm, changed = rank["nan", name]
        assert math.isnan(norm) and changed == []


# Boxes


def test_a_share_is_shown_where_it_lies() -> None:
    """Rows 2 and 3 of a tensor [4, 3] lie in a parameter from its element 6 on; a rank holds elements 8 to 10."""
    view = View(Box((2, 0), (2, 3)), 6, (3, 1))
    boxes = list(view.within(Part(8, torch.tensor([8.0, 9.0, 10.0]))))
    assert [box for box, _ in boxes] == [Box((2, 2), (1, 1)), Box((3, 0), (1, 2))]
    assert [part.tolist() for _, part in boxes] == [[[8.0]], [[9.0, 10.0]]]
    assert list(view.within(Part(0, torch.zeros(6)))) == []


def test_a_share_of_a_tensor_whose_rows_lie_apart() -> None:
    """Two rows of two, each the first half of a row of four; a rank holds elements 1 to 4."""
    boxes = list(View(Box((0, 0), (2, 2)), 0, (4, 1)).within(Part(1, torch.tensor([1.0, 2.0, 3.0, 4.0]))))
    assert [box for box, _ in boxes] == [Box((0, 1), (1, 1)), Box((1, 0), (1, 1))]
    assert [part.tolist() for _, part in boxes] == [[[1.0]], [[4.0]]]


def test_shares_in_a_wrong_place_do_not_fit_together(told: list[dict[Any, Any]]) -> None:  # a mutant
    assert all("ranks differ" in rank["mutant"] or "not all of it" in rank["mutant"] for rank in told)


# Files


def test_masters_and_moments_are_bitwise_there_in_every_layout_and_engine(told: list[dict[Any, Any]]) -> None:
    cases = [key for key in told[0] if key[0] == "load"]
    experts, dense = (
        sum(max(1, len(forms)) for name, forms in SAVED.items() if ("experts" in name) == which)
        for which in (True, False)
    )
    assert len(cases) == dense * len(INTO) // 2 + len(INTO_FSDP) + len(INTO_ZERO) + 1 + experts
    for key in cases:
        for rank in told:
            differing, remarks, wrong = rank[key]
            assert (differing, wrong) == ([], 0), key
            assert remarks == _FRESH.get(key[1].rpartition("-")[2], []), key


@pytest.mark.parametrize("target", ["tp2", "vpp2-bf16"])
def test_a_resumed_run_goes_on_bitwise(told: list[dict[Any, Any]], target: str) -> None:
    assert [rank["going", target] for rank in told] == [(True, [])] * 4


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_megatrons_own_loader_reads_the_dist_form(told: list[dict[Any, Any]], kind: str) -> None:
    assert [rank["megatron", kind] for rank in told] == [[]] * 4


@pytest.mark.parametrize("form", SAVED["shared-bf16"])
def test_a_merge_takes_the_models_own_weights(told: list[dict[Any, Any]], out: Path, form: str) -> None:
    folder = out / f"shared-bf16-{form}"
    index = to_huggingface(open_directory(folder), read_config(folder / "huggingface")).index
    name = "model.layers.3.self_attn.k_proj.weight"
    master = index[moment_name(name, "param")]
    assert (index[name].dtype, master.dtype) == ("bfloat16", "float32")
    assert np.array_equal(torch.tensor(master.numpy()).to(BF16).float().numpy(), index[name].numpy())
    assert not np.array_equal(master.numpy(), index[name].numpy())


def test_each_data_parallel_rank_saves_its_own_share(told: list[dict[Any, Any]], out: Path) -> None:
    sizes = {}
    for path in (out / "shared-classic" / "optim").glob("distrib_optim_*.pt"):
        state = torch.load(path)["state"]
        sizes[path.name] = sum(moments["exp_avg"].numel() for moments in state.values())
    assert sorted(sizes) == [f"distrib_optim_pp0_tp{tp}_cp0_dp{dp}.pt" for tp in (0, 1) for dp in (0, 1)]
    assert max(sizes.values()) < 0.6 * (
        sizes["distrib_optim_pp0_tp0_cp0_dp0.pt"] + sizes["distrib_optim_pp0_tp0_cp0_dp1.pt"]
    )


def test_a_missing_share_is_named(told: list[dict[Any, Any]], out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "shared-classic", tmp_path / "step")
    (tmp_path / "step" / "optim" / "distrib_optim_pp0_tp1_cp0_dp1.pt").unlink()
    with pytest.raises(IncompleteError, match=r"distrib_optim_pp0_tp1_cp0_dp1\.pt is missing"):
        open_directory(tmp_path / "step")


# Megatron's own flat buffers


def test_buffers_are_laid_out_as_megatron_does_it(told: list[dict[Any, Any]]) -> None:
    assert told[0]["layouts"] == [megatron_buffers.layout(sizes, alone, 64, bucket) for sizes, alone, bucket in BUFFERS]


@pytest.mark.parametrize("name", ["shared-megatron", "shared-bf16-megatron", "experts-megatron"])
def test_a_wrong_order_of_the_flat_buffers_does_not_pass(
    told: list[dict[Any, Any]], out: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: parameters in the model's order, not the opposite. No moment may come of it."""
    right = open_directory(out / name)
    assert any(entry.startswith("optim/") for entry in right)
    assert not any("optimizer" in line for line in right.unread)
    layout = megatron_buffers.layout

    def forwards(sizes: Any, alone: Any, *rules: Any) -> Any:
        starts, end = layout(sizes[::-1], alone[::-1], *rules)
        return starts[::-1], end

    monkeypatch.setattr(megatron_buffers, "layout", forwards)
    wrong = open_directory(out / name)
    assert not any(entry.startswith("optim/") for entry in wrong)
    assert "distrib_optim.pt" in wrong.unread[-1] and "in no order" in wrong.unread[-1]


@pytest.mark.parametrize("name", ["whole-bf16-megatron", "whole-experts-megatron"])
def test_a_wrong_order_of_numbers_does_not_pass(
    told: list[dict[Any, Any]], out: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: numbers counted in the opposite order."""
    assert any(entry.startswith("optim/") for entry in open_directory(out / name))
    usual = megatron_numbered.parameters_of
    monkeypatch.setattr(megatron_numbered, "parameters_of", lambda *of: usual(*of)[::-1])
    wrong = open_directory(out / name)
    assert not any(entry.startswith("optim/") for entry in wrong)
    assert "numbers its parameters, in no order" in wrong.unread[-1]


@pytest.mark.parametrize("name", ["shared-buckets", "shared-bf16-buckets", "experts-buckets"])
def test_a_wrong_order_of_buckets_does_not_pass(
    told: list[dict[Any, Any]], out: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the same places, the parameters that go there in the model's order."""
    assert any(entry.startswith("optim/") for entry in open_directory(out / name))
    usual = megatron_buckets.places
    monkeypatch.setattr(megatron_buckets, "places", lambda sizes, buckets: (usual(sizes, buckets) or [])[::-1] or None)
    wrong = open_directory(out / name)
    assert not any(entry.startswith("optim/") for entry in wrong)
    assert "name no weights" in wrong.unread[-1] and "in no order" in wrong.unread[-1]


def test_buffers_of_another_step_do_not_pass(told: list[dict[Any, Any]], out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "shared-megatron", tmp_path / "step")
    path = tmp_path / "step" / "mp_rank_01" / "distrib_optim.pt"
    state = torch.load(path)
    state[0][FP32, FP32]["param"] *= 1.0001
    torch.save(state, path)
    index = open_directory(tmp_path / "step")
    assert not any(entry.startswith("optim/") for entry in index) and "mp_rank_01" in index.unread[-1]


def test_buffers_without_a_count_of_steps_are_left_with_a_reason(
    told: list[dict[Any, Any]], out: Path, tmp_path: Path
) -> None:
    """As verl before 0.4 saves: the same buffers under another name, and nothing of the optimizer beside them."""
    for rank in ("mp_rank_00", "mp_rank_01"):
        state = torch.load(out / "shared-megatron" / rank / "model_optim_rng.pt", weights_only=False)
        (tmp_path / "model" / rank).mkdir(parents=True)
        torch.save([state["model"]], tmp_path / "model" / rank / "model.pt")
        (tmp_path / "optim").mkdir(exist_ok=True)
        name = f"distrib_optim_pp0_tp{int(rank[-2:])}_cp0_dp0.pt"
        shutil.copy(out / "shared-megatron" / rank / "distrib_optim.pt", tmp_path / "optim" / name)
    reason = "optimizer state: the files of the ranks have no count of its steps, which AdamW needs"
    assert open_directory(tmp_path).unread[-1] == reason
