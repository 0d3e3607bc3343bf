"""Megatron as an engine, in four real processes over gloo: it computes what transformers computes, updates as FSDP2
does, and what it saves goes on bitwise, on the same ranks, cut otherwise, and in other engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

pytest.importorskip("megatron.core")

import megatron_engines as made
import torch
import torch.distributed as dist

from milepost.engines.base import EagerEngine, Inputs, PipelinedModel, PipelineEngine
from milepost.engines.megatron.model import padded_vocabulary
from milepost.engines.megatron.parallel import Parallel
from milepost.errors import CallError, MismatchError
from milepost.layouts import open_directory
from milepost.layouts.huggingface import read_config
from milepost.mapping import to_huggingface

TP2, PP2, BOTH, VPP2 = Parallel(2), Parallel(1, 2), Parallel(2, 2), Parallel(1, 2, 2)
PP4, EP2, EP2_PP2 = Parallel(1, 4), Parallel(1, 1, None, 2), Parallel(1, 2, None, 2)
NAMES = {TP2: "tp2", PP2: "pp2", BOTH: "tp2-pp2", VPP2: "vpp2", PP4: "pp4", EP2: "ep2", EP2_PP2: "ep2-pp2"}
LAYOUTS = {"qwen2": (BOTH, VPP2), "qwen3_moe": (EP2, EP2_PP2)}
"""In the first and the last of each a checkpoint is saved; every one of them is loaded into all."""
FORMS = ("classic", "dist")
GOING = ((TP2, "classic"), (VPP2, "dist"))
"""Layouts that go on after a stop, each with another form; that every form holds all of it the loads show."""
DROPPING = "llama"
"""The kind whose steps draw random numbers."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in made.KINDS:
        made.save_model(root / kind, kind)
    return root


@pytest.fixture(scope="module")
def computed(models: Path) -> list[dict[Any, Any]]:
    return run_ranks(_computed, 4, models)


@pytest.fixture(scope="module")
def gone_over(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(_gone_over, 4, models, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def told(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(_others, 4, models, tmp_path_factory.mktemp("saved"))


def _computed(models: Path) -> dict[Any, Any]:
    return {key: value for kind in made.KINDS for key, value in _logits(models / kind, kind)}


def _gone_over(models: Path, out: Path) -> dict[Any, Any]:
    torch.use_deterministic_algorithms(True)  # then fresh memory is full of NaN
    return {
        key: value for kind, layouts in LAYOUTS.items() for key, value in _goes_over(models / kind, kind, layouts, out)
    }


def _others(models: Path, out: Path) -> dict[Any, Any]:
    torch.use_deterministic_algorithms(True)
    return {**_goes_on(models / DROPPING, out), **_values(models / "qwen2", out), **_small(models)}


# What is computed


def _logits(directory: Path, kind: str) -> Iterator[tuple[Any, float]]:
    """Largest difference to transformers' logits at a real token."""
    from transformers import AutoModelForCausalLM

    ids, mask = made.sequences(5, 3)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = reference(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for parallel in (TP2, PP2, BOTH, VPP2, *([EP2] if "experts" in str(made.KINDS[kind]) else [])):
        engine = made.make(directory, parallel, trained=False)
        batches = [Inputs(ids[:2], mask[:2], 9), Inputs(ids[2:], mask[2:], 9)]
        parts = engine.model.forward_only(batches, lambda _, outputs: outputs.logits)
        yield ("logits", kind, parallel), float(((torch.cat(parts) - wanted).abs() * mask[..., None]).max())


@pytest.mark.parametrize("kind", made.KINDS)
def test_logits_are_those_of_transformers(computed: list[dict[Any, Any]], kind: str) -> None:
    for rank in computed:
        found = {key[2]: value for key, value in rank.items() if key[:2] == ("logits", kind)}
        assert set(found) >= {TP2, PP2, BOTH, VPP2}
        for parallel, difference in found.items():
            assert difference < 5e-6, NAMES[parallel]  # logits are up to about 3


# Files and other layouts


def _goes_over(directory: Path, kind: str, layouts: tuple[Parallel, ...], out: Path) -> Iterator[tuple[Any, Any]]:
    """Train under FSDP2 and under each layout; save both; load everything everywhere."""
    ids, mask = made.sequences(12, 5)
    fsdp = made.make_fsdp(directory)
    wanted = made.train(fsdp, 2, ids, mask)
    fsdp.save(made.Folder(out / kind / "fsdp"))
    dist.barrier()
    held = {"fsdp": made.expert_by_expert(made.whole(fsdp))}
    for parallel in layouts:
        engine = made.make(directory, parallel)
        yield ("steps", kind, parallel), (wanted, made.train(engine, 2, ids, mask))
        truth = made.whole(engine)
        for form in FORMS if parallel in (layouts[0], layouts[-1]) else ():
            name = f"{NAMES[parallel]}-{form}"
            engine.form = form
            engine.save(made.Folder(out / kind / name))
            held[name] = truth
        dist.barrier()
        yield ("close", kind, parallel), _largest_difference(truth, held["fsdp"])
    for parallel in (*layouts, *((PP4,) if kind == "qwen2" else ())):
        engine = made.make(directory, parallel)
        made.train(engine, 1, *made.sequences(12, 6))
        for name, truth in held.items():
            remarks = made.load(engine, out / kind / name)
            yield (
                ("load", kind, name, NAMES[parallel]),
                (_differing(made.whole(engine), truth), dict(remarks), engine.learning_rates),
            )
    for name, truth in held.items():
        remarks = made.load(fsdp, out / kind / name)
        found = made.expert_by_expert(made.whole(fsdp))
        yield ("load", kind, name, "fsdp"), (_differing(found, truth), dict(remarks), fsdp.learning_rates)
    yield from _by_megatron_itself(directory, kind, layouts[-1], layouts[0], out, held)
    yield from _by_mapping(kind, out, held)


def _differing(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> list[str]:
    """Names of which not every bit is the same."""
    return sorted(set(found) ^ set(truth)) + [
        n for n in truth if n in found and found[n].tobytes() != truth[n].tobytes()
    ]


def _largest_difference(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    assert set(found) == set(truth)
    return max(float(np.abs(found[name] - truth[name]).max()) for name in truth if not name.startswith("optim/"))


def _by_megatron_itself(
    directory: Path, kind: str, of: Parallel, into: Parallel, out: Path, held: dict[str, dict[str, np.ndarray]]
) -> Iterator[tuple[Any, Any]]:
    """Megatron's own loader reads a dist checkpoint, on ranks that are cut otherwise."""
    from megatron.core import dist_checkpointing

    from milepost.engines.megatron.model import on_device
    from milepost.engines.megatron.save import sharded_state

    engine = made.make(directory, into)
    engine.tensors()
    name = f"{NAMES[of]}-dist"
    with on_device(made.CPU):
        loaded = dist_checkpointing.load(sharded_state(engine), str(out / kind / name / "dist_ckpt"))
    (chunk,) = engine.model.chunks
    chunk.load_state_dict(loaded["model"])
    state = engine.optimizer.state_dict()["state"]
    for number, moments in loaded["optimizer"]["state"].items():
        for moment, value in moments.items():
            state[number][moment].copy_(value)
        state[number]["step"].fill_(loaded["optimizer"]["step"])
    yield ("megatron", kind), _differing(made.whole(engine), held[name])
    yield ("schedule", kind), loaded["opt_param_scheduler"]["last_epoch"]


def _by_mapping(kind: str, out: Path, held: dict[str, dict[str, np.ndarray]]) -> Iterator[tuple[Any, Any]]:
    """A merge finds the same weights, with neither a process group nor Megatron."""
    for name, truth in held.items():
        if name != "fsdp":
            folder = out / kind / name
            mapped = to_huggingface(open_directory(folder), read_config(folder / "huggingface"))
            weights = {n: entry.numpy() for n, entry in mapped.index.weights().items()}
            yield ("merge", kind, name), _differing(weights, {n: v for n, v in truth.items() if "optim/" not in n})


@pytest.mark.parametrize("kind", LAYOUTS)
def test_steps_are_those_of_fsdp(gone_over: list[dict[Any, Any]], kind: str) -> None:
    """Losses and norms of two clipped updates, and the weights after them."""
    for parallel in LAYOUTS[kind]:
        wanted, found = gone_over[0]["steps", kind, parallel]
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        assert wanted[0][1] > 1  # so the clipping is seen too
        assert gone_over[0]["close", kind, parallel] < made.SAME_STEPS
        assert all(rank["steps", kind, parallel][1] == found for rank in gone_over)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_whatever_was_saved_is_bitwise_there_in_every_layout_and_engine(
    gone_over: list[dict[Any, Any]], kind: str
) -> None:
    cases = [key for key in gone_over[0] if key[:2] == ("load", kind)]
    count = len(LAYOUTS[kind])
    assert len(cases) == (1 + 2 * len(FORMS)) * (1 + count + (kind == "qwen2"))
    for key in cases:
        for rank in gone_over:
            differing, remarks, rates = rank[key]
            assert (differing, remarks, rates) == ([], {}, (made.LR * (1 / 3),)), key


@pytest.mark.parametrize("kind", LAYOUTS)
def test_megatrons_own_loader_reads_the_dist_form(gone_over: list[dict[Any, Any]], kind: str) -> None:
    assert [rank["megatron", kind] for rank in gone_over] == [[]] * 4
    assert gone_over[0]["schedule", kind] == 2


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_merge_finds_the_same_weights(gone_over: list[dict[Any, Any]], kind: str) -> None:
    merges = {key: value for key, value in gone_over[0].items() if key[:2] == ("merge", kind)}
    assert len(merges) == 2 * len(FORMS)
    assert set(map(str, merges.values())) == {"[]"}


# Going on


def _goes_on(directory: Path, out: Path) -> dict[Any, Any]:
    """With dropout, whose random numbers come from Megatron's own states inside of tensor-parallel regions."""
    config = directory / "config.json"
    if dist.get_rank() == 0:
        text = config.read_text()
        assert '"attention_dropout": 0.0' in text
        config.write_text(text.replace('"attention_dropout": 0.0', '"attention_dropout": 0.3'))
    dist.barrier()
    told: dict[Any, Any] = {}
    rows = made.sequences(12, 8)
    for parallel, form in GOING:
        folder = out / f"going-{NAMES[parallel]}-{form}"
        engine = made.make(directory, parallel, form=form)
        torch.manual_seed(100 + dist.get_rank())
        made.train(engine, 2, *made.sequences(12, 7))
        engine.save(made.Folder(folder))
        dist.barrier()
        steps = [made.train(engine, 2, *rows)]
        drawn, whole = torch.rand(3).tolist(), made.whole(engine)
        torch.manual_seed(200 + dist.get_rank())
        again = made.make(directory, parallel)
        remarks = made.load(again, folder)
        steps.append(made.train(again, 2, *rows))
        told["going", NAMES[parallel], form] = (dict(remarks), drawn, torch.rand(3).tolist())
        told["steps", NAMES[parallel], form] = (steps, _differing(made.whole(again), whole))
        # not finite on one data-parallel rank: nothing changes on any
        before = made.whole(again)
        ids, mask = rows

        def loss(_: int, outputs: Any, engine: Any = again) -> Any:
            return outputs.logits.sum() * (math.nan if engine.data_rank else 1.0), None

        again.forward_backward([Inputs(ids, mask, 3)], loss)
        norm = again.step()
        told["nan", NAMES[parallel], form] = (norm, _differing(made.whole(again), before))
    return told


@pytest.mark.parametrize(("layout", "form"), [(NAMES[parallel], form) for parallel, form in GOING])
def test_a_resumed_run_goes_on_bitwise(told: list[dict[Any, Any]], layout: str, form: str) -> None:
    for rank in told:
        remarks, drawn, again = rank["going", layout, form]
        assert remarks == {} and drawn == again
        (first, second), differing = rank["steps", layout, form]
        assert first == second and differing == []
        norm, changed = rank["nan", layout, form]
        assert math.isnan(norm) and changed == []
    assert len({str(rank["going", layout, form][1]) for rank in told}) == 4


# The critic


def _values(directory: Path, out: Path) -> dict[Any, Any]:
    """A new value head on the last stage, trained and taken over by FSDP2's critic."""
    ids, mask = made.sequences(12, 5)
    fsdp = made.make_fsdp(directory, critic=True)
    wanted = made.train(fsdp, 2, ids, mask)
    told: dict[Any, Any] = {}
    for parallel in (TP2, PP2):
        engine = made.make(directory, parallel, critic=True)
        found = made.train(engine, 2, ids, mask)
        folder = out / f"critic-{NAMES[parallel]}"
        engine.save(made.Folder(folder))
        dist.barrier()
        truth = made.whole(engine)
        made.load(fsdp, folder)
        config = read_config(folder / "huggingface")
        merged = to_huggingface(open_directory(folder), config)
        told["critic", NAMES[parallel]] = (
            (wanted, found),
            _differing(made.whole(fsdp), truth),
            (config["architectures"], list(truth["score.weight"].shape), merged.architecture.head),
        )
    return told


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_critic_has_its_head_on_the_last_stage(told: list[dict[Any, Any]], layout: str) -> None:
    (wanted, found), differing, facts = told[0]["critic", layout]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    assert differing == []
    assert facts == (["Qwen2ForTokenClassification"], [1, 16], "token-classification")


# Smaller things


def _small(models: Path) -> dict[Any, Any]:
    """Norms of heads, views, padding, what the engine is, and what it refuses."""
    ids, mask = made.sequences(12, 5)
    wanted = made.train(made.make_fsdp(models / "qwen3"), 2, ids, mask)
    engine = made.make(models / "qwen3", TP2)
    told: dict[Any, Any] = {
        "head norms": (wanted, made.train(engine, 2, ids, mask)),
        "protocols": (
            isinstance(engine, PipelineEngine),
            isinstance(engine, EagerEngine),
            isinstance(engine.model, PipelinedModel),
        ),
        "share": (engine.rank, engine.data_rank, engine.world_size, engine.data_size),
    }
    live = engine.tensors()
    qkv = dict(engine.model.chunks[0].named_parameters())["decoder.layers.1.self_attention.linear_qkv.weight"]
    for part in "qkv":
        for _, view in live[f"model.layers.1.self_attn.{part}_proj.weight"].boxes:
            view.fill_({"q": 1.0, "k": 2.0, "v": 3.0}[part])
    # one group of queries on each rank: two heads of queries, a key and a value, of 8 rows each
    told["qkv"] = qkv.detach()[::8, 0].tolist()
    embedding = engine.model.chunks[0].embedding.word_embeddings.weight
    embedding.data.fill_(5.0)
    engine.finish_load()
    told["padding"] = (tuple(embedding.shape), int((embedding == 5.0).any(1).sum()))
    for name, act in {
        "count": lambda: _counts_differ(engine),
        "experts": lambda: made.make(models / "qwen3_moe", Parallel(2, sequence=False)),
        "heads": lambda: made.make(models / "qwen3", Parallel(4)),
        "stages": lambda: made.make(models / "qwen3", Parallel(1, 4, 2)),
        "sizes": lambda: made.make(models / "qwen3", Parallel(3)),
        "virtual": lambda: made.make(models / "qwen3", Parallel(2, 1, 2)),
    }.items():
        with pytest.raises((CallError, MismatchError)) as caught:
            act()
        told["refused", name] = str(caught.value)
    return told


def _counts_differ(engine: Any) -> None:
    engine.tensors()["optim/model.layers.0.self_attn.k_proj.weight/step"].boxes[0][1].fill_(7)
    engine.finish_load()


def test_a_rank_shows_what_it_is(told: list[dict[Any, Any]]) -> None:
    assert [rank["protocols"] for rank in told] == [(True, False, True)] * 4
    assert [rank["share"] for rank in told] == [(0, 0, 4, 2), (1, 0, 4, 2), (2, 1, 4, 2), (3, 1, 4, 2)]


def test_the_norms_of_heads_get_the_gradients_of_all_heads(told: list[dict[Any, Any]]) -> None:
    """Each tensor-parallel rank has other heads, and the norm of queries and keys is one for all."""
    wanted, found = told[0]["head norms"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_boxes_are_views_of_megatrons_parameters(told: list[dict[Any, Any]]) -> None:
    assert [rank["qkv"] for rank in told] == [[1.0, 1.0, 2.0, 3.0]] * 4


def test_what_pads_the_vocabulary_is_zero(told: list[dict[Any, Any]]) -> None:
    """33 words are 128 rows on each of two ranks: all on the first, none on the second."""
    assert padded_vocabulary(made.WORDS, 2) == 256
    assert [rank["padding"] for rank in told] == [((128, 16), 33), ((128, 16), 0)] * 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count", "is 7 and|k_proj.weight/step is 7"),
        ("experts", "tensor_model_parallel_size=1"),
        ("heads", "num_key_value_heads=2 does not divide by tensor_model_parallel_size=4"),
        ("stages", "num_hidden_layers=4 does not divide by the 8 stages"),
        ("sizes", "does not go into 4 processes"),
        ("virtual", "needs a pipeline_model_parallel_size above 1"),
    ],
)
def test_what_megatron_cannot_do_is_said(told: list[dict[Any, Any]], what: str, words: str) -> None:
    assert any(part in told[0]["refused", what] for part in words.split("|")), told[0]["refused", what]
