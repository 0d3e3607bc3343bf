"""The FSDP2 engine in real gloo processes: what it shows, what it saves, and what other world sizes make of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import tiny_qwen2
from torch import nn

from milepost.checkpoint.live import LiveSink
from milepost.engines import rng
from milepost.engines.base import OPTIMIZER, RNG, SCHEDULE
from milepost.engines.fsdp import FsdpEngine, OptimizerSettings, Sharding, materialise, shard
from milepost.errors import IncompleteError, MismatchError
from milepost.index import Box, moment_name
from milepost.layouts import open_directory
from milepost.trainer.models import ModelSource, load_critic, load_policy
from milepost.transfer import execute, plan

CPU = torch.device("cpu")
LR = 1e-2


def settings(lr: float = LR, grad_clip: float = 1.0) -> OptimizerSettings:
    return OptimizerSettings(lr, (0.9, 0.95), 0.01, lambda step: 1 / (1 + step), grad_clip)


def sub_mesh(size: int) -> Any:
    """A mesh over the first ranks of the world; every rank makes it."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("fsdp",))


def policy(directory: Path, mesh: Any, **kwargs: Any) -> FsdpEngine:
    kwargs = {"dtype": torch.float32, "sharding": Sharding(), "optimizer": settings(), "seed": 1, **kwargs}
    return load_policy(ModelSource(directory), mesh, CPU, **kwargs)


def critic(directory: Path, mesh: Any) -> FsdpEngine:
    return load_critic(
        ModelSource(directory), mesh, CPU, dtype=torch.float32, sharding=Sharding(), optimizer=settings(), seed=1
    )


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(33, (rows, 7), generator=torch.Generator().manual_seed(seed))


def train(engine: FsdpEngine, steps: int, rows: torch.Tensor) -> list[float]:
    """Some optimizer steps of any kind; returns the gradient norms."""
    norms = []
    for _ in range(steps):
        logits = engine.model(input_ids=rows).logits
        engine.backward(logits.float().logsumexp(-1).mean() + logits.square().mean(), last=True)
        norms.append(engine.step())
        engine.advance_schedule()
    return norms


def gathered(engine: FsdpEngine) -> dict[str, np.ndarray]:
    """Every tensor whole, by torch's own means."""
    whole = {n: p.detach().full_tensor().numpy() for n, p in engine.model.named_parameters()}
    for name, weight in engine.model.named_parameters():
        for moment, value in engine.optimizer.state[weight].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            whole[moment_name(name, moment)] = full.numpy()
    return whole


def assert_holds(engine: FsdpEngine, whole: dict[str, np.ndarray]) -> None:
    live = engine.tensors()
    assert set(live) == set(whole)
    for name, tensor in live.items():
        assert tensor.shape == whole[name].shape
        for box, view in tensor.boxes:
            assert view.shape == box.sizes
            np.testing.assert_array_equal(view.numpy(), whole[name][box.slices()], err_msg=name)


class Folder:
    """The plainest RoleFiles."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.directory / name).open("xb") as file:
            yield file

    def save(self, name: str, state: Any) -> None:
        with self.create(name) as file:
            torch.save(state, file)


def load(engine: FsdpEngine, directory: Path) -> Mapping[str, str]:
    index = open_directory(directory)
    sink = LiveSink(engine.tensors())
    execute(plan(index, sink.wanted(), 1 << 20), sink)
    remarks = engine.load_objects(index.objects)
    engine.finish_load()
    return remarks


# Reading a model directory


def _logits(directory: Path, tied: Path) -> None:
    from transformers import AutoModelForCausalLM

    for source in (directory, tied):
        mesh = sub_mesh(3)
        if torch.distributed.get_rank() < 3:
            engine = policy(source, mesh, optimizer=None)
            reference = AutoModelForCausalLM.from_pretrained(source)
            rows = tokens(2, 5)
            with torch.no_grad():
                assert torch.equal(engine.model(input_ids=rows).logits, reference(input_ids=rows).logits)
            assert not any(p.requires_grad for p in engine.model.parameters())
            assert engine.lr == 0.0
            assert not any(name.startswith("optim/") for name in engine.tensors())


def test_a_model_read_in_parts_says_what_transformers_says(tmp_path: Path) -> None:
    run_ranks(_logits, 4, tiny_qwen2(tmp_path / "a"), tiny_qwen2(tmp_path / "tied", tied=True))


def _bf16(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = policy(directory, sub_mesh(2), dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    for name, weight in engine.model.state_dict().items():
        assert torch.equal(weight.full_tensor(), reference[name])
    assert {t.dtype for n, t in engine.tensors().items() if not n.endswith("/step")} == {"bfloat16"}


def test_weights_are_rounded_to_the_dtype_that_is_asked_for_as_torch_rounds_them(tmp_path: Path) -> None:
    run_ranks(_bf16, 2, tiny_qwen2(tmp_path))


def _critic_heads(directory: Path) -> list[Any]:
    heads = []
    for size in (1, 2, 4):
        mesh = sub_mesh(size)
        if torch.distributed.get_rank() < size:
            engine = critic(directory, mesh)
            heads.append([p.detach().full_tensor() for n, p in engine.model.named_parameters() if "score" in n])
    return heads


def test_a_new_value_head_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, two, four = run_ranks(_critic_heads, 4, tiny_qwen2(tmp_path))[0]
    assert one[0].shape == (1, 16) and one[0].std() > 0 and one[1].tolist() == [0.0]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, four, strict=True))


def _refusals(directory: Path) -> list[str]:
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    said = []
    for kind, change in (
        (IncompleteError, {name: None}),
        (MismatchError, {"model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}),
        (MismatchError, {name: torch.zeros(5, 16)}),
    ):
        save_file({n: t for n, t in {**good, **change}.items() if t is not None}, file)
        with pytest.raises(kind) as caught:
            policy(directory, sub_mesh(1))
        said.append(str(caught.value))
    return said


def test_a_directory_that_does_not_fit_its_config_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = run_ranks(_refusals, 1, tiny_qwen2(tmp_path))
    assert "lack model.layers.1.mlp.up_proj.weight, which Qwen2ForCausalLM needs" in said[0]
    assert "model.layers.2.mlp.up_proj.weight in it is no weight of Qwen2ForCausalLM" in said[1]
    assert "up_proj.weight has shape [5, 16], its config asks for [24, 16]" in said[2]


# Live state, saved and loaded


def _save_and_load(directory: Path, out: Path) -> None:
    rank = torch.distributed.get_rank()
    for kind, make in (("actor", policy), ("critic", critic)):
        for saved, loaded in ((2, (1, 3, 4)), (4, (2,)), (3, (2,)), (1, (4,))):
            folder = out / f"{kind}{saved}"
            mesh = sub_mesh(saved)
            if rank < saved:
                engine = make(directory, mesh)
                train(engine, 2, tokens(4, 3 + rank))
                whole = gathered(engine)
                assert_holds(engine, whole)
                engine.save(Folder(folder))
                torch.save(whole, folder / f"whole{rank}")
            torch.distributed.barrier()
            expected = torch.load(folder / "whole0", weights_only=False)
            for size in loaded:
                mesh = sub_mesh(size)
                if rank < size:
                    other = make(directory, mesh)
                    train(other, 1, tokens(4, 9))
                    remarks = load(other, folder)
                    assert_holds(other, expected)
                    assert other.lr == LR * (1 / 3)  # two steps are done: the factor is 1 / (1 + 2)
                    assert other.scheduler.last_epoch == 2
                    assert list(remarks) == [RNG] and f"saved by {saved} ranks, now {size}" in remarks[RNG]
                    # And training goes on with what was loaded, not with a gathered copy from before.
                    assert np.isfinite(train(other, 1, tokens(4, 4))[0])


def test_saved_on_one_number_of_ranks_and_loaded_on_another_weights_and_moments_are_bitwise_the_same(
    tmp_path: Path,
) -> None:
    model = tiny_qwen2(tmp_path / "model")
    run_ranks(_save_and_load, 4, model, tmp_path)
    names = sorted(path.name for path in (tmp_path / "critic2").iterdir() if "whole" not in path.name)
    assert names == [
        "extra_state_world_size_2_rank_0.pt",
        "extra_state_world_size_2_rank_1.pt",
        "fsdp_config.json",
        "huggingface",
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "optim_world_size_2_rank_0.pt",
        "optim_world_size_2_rank_1.pt",
    ]
    actor, value = tmp_path / "actor2/huggingface", tmp_path / "critic2/huggingface"
    for name in ("config.json", "generation_config.json"):
        assert (actor / name).read_bytes() == (model / name).read_bytes()
    config = __import__("json").loads((value / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    assert len(config["id2label"]) == 1


def _shards(directory: Path) -> dict[str, list[str]]:
    engine = critic(directory, sub_mesh(4))
    return {name: [str(box) for box, _ in tensor.boxes] for name, tensor in engine.tensors().items()}


def test_boxes_follow_torchs_chunk_rule_uneven_and_empty_ones_too(tmp_path: Path) -> None:
    ranks = run_ranks(_shards, 4, tiny_qwen2(tmp_path))
    # 33 rows in chunks of ceil(33 / 4) = 9: 9, 9, 9, 6
    rows = [["[0:9, 0:16]"], ["[9:18, 0:16]"], ["[18:27, 0:16]"], ["[27:33, 0:16]"]]
    for name in ("model.embed_tokens.weight", "optim/model.embed_tokens.weight/exp_avg"):
        assert [shown[name] for shown in ranks] == rows
    assert [shown["score.weight"] for shown in ranks] == [["[0:1, 0:16]"], [], [], []]
    assert [shown["optim/score.weight/step"] for shown in ranks] == [["[]"]] * 4  # a scalar that all hold


def _parts_of_the_objects(directory: Path) -> None:
    trained = policy(directory, sub_mesh(1))
    train(trained, 2, tokens(2, 1))
    saved = trained.objects()
    # The schedule alone: the optimizer gets the rate of its position.
    engine = policy(directory, sub_mesh(1))
    assert engine.lr == LR
    assert set(engine.load_objects({"scheduler": saved["scheduler"]})) == {OPTIMIZER, RNG}
    assert engine.lr == LR * (1 / 3) and engine.scheduler.get_last_lr() == [engine.lr]
    # Hyperparameters alone: a schedule that starts anew starts at its own rate.
    engine = policy(directory, sub_mesh(1))
    groups = [{**saved["param_groups"][0], "betas": [0.5, 0.6], "params": [1], "unheard_of": 1}]
    assert set(engine.load_objects({"param_groups": groups})) == {SCHEDULE, RNG}
    assert engine.lr == LR and engine.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert "unheard_of" not in engine.optimizer.param_groups[0] and engine.optimizer.param_groups[0]["params"] != [1]
    # Groups of another number cannot be matched.
    assert "2 parameter groups, this run 1" in engine.load_objects({"param_groups": groups * 2})[OPTIMIZER]


def test_what_a_checkpoint_lacks_of_the_small_state_is_said_and_the_rate_is_right(tmp_path: Path) -> None:
    run_ranks(_parts_of_the_objects, 1, tiny_qwen2(tmp_path))


class Toy(nn.Module):
    """Persistent and other buffers, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.arange(7.0), requires_grad=False)
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("count", torch.tensor([4]))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def _toy(out: Path) -> None:
    def make(value: float) -> FsdpEngine:
        model = Toy()
        mesh = sub_mesh(2)
        shard(model, mesh, Sharding())
        materialise(model, CPU)
        assert model.scalar.item() == 3.5 and model.derived.tolist() == [1, 1]
        for parameter in model.parameters():
            parameter.detach().to_local().fill_(value)
        return FsdpEngine(model, mesh, optimizer=settings())

    engine = make(2.0)
    engine.model.scalar.fill_(8.25)
    engine.save(Folder(out))
    torch.distributed.barrier()
    other = make(0.0)
    load(other, out)
    live = other.tensors()
    assert other.model.scalar.item() == 8.25 and other.model.count.item() == 4
    assert live["scalar"].shape == () and live["count"].shape == (1,) and live["count"].dtype == "int64"
    assert live["scalar"].boxes[0][0] == Box((), ())
    assert "derived" not in live and "optim/frozen/exp_avg" not in live
    assert other.model.frozen.full_tensor().tolist() == [2.0] * 7
    assert other.model.layer.bias.full_tensor().tolist() == [2.0] * 3


def test_persistent_buffers_travel_derived_ones_do_not_and_frozen_weights_have_no_moments(tmp_path: Path) -> None:
    run_ranks(_toy, 2, tmp_path / "toy")


def _neutral(directory: Path) -> None:
    shown, plain = policy(directory, sub_mesh(2)), policy(directory, sub_mesh(2))
    shown.tensors()
    for engine in (shown, plain):
        train(engine, 2, tokens(4, 1))
    assert_holds(shown, gathered(plain))


def test_moments_made_for_showing_do_not_change_the_training(tmp_path: Path) -> None:
    run_ranks(_neutral, 2, tiny_qwen2(tmp_path))


# Training


def _against_plain_torch(directory: Path) -> list[float]:
    """The same updates by plain torch on the whole batch, and by the engine on 3 ranks in micro-batches."""
    from transformers import AutoModelForCausalLM

    rank, rows = torch.distributed.get_rank(), tokens(12, 2)

    def loss_of(model: Any, part: torch.Tensor) -> torch.Tensor:
        return model(input_ids=part).logits.square().sum() / rows.shape[0]

    plain = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    engine = policy(directory, sub_mesh(3), optimizer=settings(grad_clip=0.5))
    expected, norms = [], []
    for _ in range(3):
        loss_of(plain, rows).backward()
        expected.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        own = rows[4 * rank : 4 * rank + 4]
        for part, last in ((own[:3], False), (own[3:], True)):
            engine.backward(loss_of(engine.model, part) * 3, last=last)
        norms.append(engine.step())
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert min(expected) > 0.5
    for name, weight in engine.model.named_parameters():
        np.testing.assert_allclose(
            weight.detach().full_tensor(), plain.state_dict()[name], rtol=2e-4, atol=2e-5, err_msg=name
        )
    return norms


def test_updates_are_those_of_plain_torch_on_the_whole_batch(tmp_path: Path) -> None:
    norms = run_ranks(_against_plain_torch, 3, tiny_qwen2(tmp_path))
    assert norms[0] == norms[1] == norms[2]


def _not_finite(directory: Path) -> None:
    engine = policy(directory, sub_mesh(2))
    train(engine, 1, tokens(4, 1))
    before = gathered(engine)
    weight = math.nan if torch.distributed.get_rank() == 1 else 1.0
    engine.backward(engine.model(input_ids=tokens(2, 1)).logits.sum() * weight, last=True)
    assert math.isnan(engine.step())
    assert_holds(engine, before)
    assert all(p.grad is None for p in engine.model.parameters())


def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    run_ranks(_not_finite, 2, tiny_qwen2(tmp_path))


# Generators


def _draw() -> list[float]:
    import random

    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _rng(directory: Path, out: Path) -> dict[str, Any]:
    rank, seen = torch.distributed.get_rank(), {}
    pair, four = sub_mesh(2), sub_mesh(4)
    if rank < 2:
        engine = policy(directory, pair)
        engine.advance_schedule()
        rng.seed_all(7, rank)
        _draw()
        engine.save(Folder(out))
        seen["next"] = _draw()
        rng.seed_all(99)
    torch.distributed.barrier()
    if rank < 2:
        seen["remarks"] = load(engine, out)
        seen["restored"] = _draw()
    torch.distributed.barrier()
    wider = policy(directory, four)
    seen["wider remarks"] = load(wider, out)
    seen["wider"] = _draw()
    load(wider, out)
    seen["again"] = _draw()
    return seen


def test_generators_come_back_per_rank_and_new_ranks_get_their_own(tmp_path: Path) -> None:
    ranks = run_ranks(_rng, 4, tiny_qwen2(tmp_path / "model"), tmp_path / "saved")
    for seen in ranks[:2]:
        assert seen["restored"] == seen["next"] and seen["remarks"] == {}
    assert ranks[0]["next"] != ranks[1]["next"]
    wider = [tuple(seen["wider"]) for seen in ranks]
    assert len({value for row in wider for value in row}) == 12
    assert not {*ranks[0]["next"], *ranks[1]["next"]} & {value for row in wider for value in row}
    assert [seen["again"] for seen in ranks] == [seen["wider"] for seen in ranks]
    for seen in ranks:
        assert seen["wider remarks"] == {
            RNG: "saved by 2 ranks, now 4; each rank has a fresh stream of its own, derived from seed 1 and step 1"
        }


def test_isolated_gives_the_generators_back() -> None:
    rng.seed_all(3)
    expected = _draw()
    rng.seed_all(3)
    with rng.isolated():
        rng.seed_all(4)
        assert _draw() != expected
    assert _draw() == expected
