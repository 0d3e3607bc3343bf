"""What Megatron's models can be besides plain: experts under tensor parallelism, sequence parallelism, stages of other
sizes, sliding windows, and generation that remembers. In four real processes over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

pytest.importorskip("megatron.core")

import megatron_engines as made
import torch
import torch.distributed as dist

from milepost.engines.base import Inputs
from milepost.engines.megatron.layers import whole_sequences, windows_of
from milepost.engines.megatron.model import build_chunks
from milepost.engines.megatron.parallel import Parallel, layers_of_stages, start
from milepost.errors import CallError, MismatchError

WHOLE = Parallel()
EXPERTS = {
    "mixtral": Parallel(2, 2),
    "qwen2_moe": Parallel(2, expert=4, expert_tensor=1),
    "wide": Parallel(4, expert=2, expert_tensor=2),
}
"""Experts under tensor parallelism: cut as the rest, or whole, on ranks that are tensor-parallel too, or between."""
UNEVEN = {
    "ends": Parallel(1, 4, first=1, last=1),
    "virtual": Parallel(1, 2, 2, count_embedding=True, count_loss=True),
    "first": Parallel(2, 2, first=4, sequence=True),
}
DEEP, WINDOW, LATE = 6, 3, 2
"""Layers of the model with uneven stages; tokens of a window; in qwen2 the first layer that has one."""
CHANGED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deep": ("qwen2", {"num_hidden_layers": DEEP}),
    "wide": ("qwen3_moe", {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": LATE}),
}
NEW = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("mixtral", "qwen2_moe", "qwen3"):
        made.save_model(root / kind, kind)
    for name, (kind, others) in CHANGED.items():
        made.save_model(root / name, kind, **others)
    return root


@pytest.fixture(scope="module")
def told(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(_told, 4, models, tmp_path_factory.mktemp("saved"))


def _told(models: Path, out: Path) -> dict[Any, Any]:
    torch.use_deterministic_algorithms(True)  # then fresh memory is full of NaN
    parts = (_experts(models, out), _sequences(models), _uneven(models, out), _windows(models), _refused(models))
    return {key: value for part in parts for key, value in part}


def _close(found: Any, wanted: Any) -> float:
    """The largest difference of two engines' weights."""
    ours, theirs = ({n: v for n, v in made.whole(it).items() if "optim/" not in n} for it in (found, wanted))
    assert set(ours) == set(theirs)
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


def _loaded(engine: Any, saved: Path, truth: dict[str, np.ndarray]) -> Any:
    """Names that are on one side only, or of which not every bit is the same; what was not restored; the rate."""
    remarks = made.load(engine, saved)
    found = made.whole(engine)
    wrong = {n for n in truth if n in found and found[n].tobytes() != truth[n].tobytes()}
    return wrong | set(found) ^ set(truth), dict(remarks), engine.learning_rates


# Experts and sequences


def _experts(models: Path, out: Path) -> Iterator[tuple[Any, Any]]:
    rows = made.sequences(12, 5)
    for kind, parallel in EXPERTS.items():
        whole = made.make(models / kind, WHOLE)
        wanted = made.train(whole, 2, *rows)
        engine = made.make(models / kind, parallel)
        yield ("steps", kind), (wanted, made.train(engine, 2, *rows), _close(engine, whole))
        engine.save(made.Folder(out / kind))
        truth = made.whole(engine)
        yield ("answers", kind), _answers(engine, narrow=engine.model.lockstep)
        whole = made.make(models / kind, WHOLE)  # its groups have gone
        yield ("load", WHOLE, kind), _loaded(whole, out / kind, truth)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_train_under_tensor_parallelism_as_without(told: list[dict[Any, Any]], kind: str) -> None:
    """Losses and norms of two clipped updates, and the weights after them."""
    for rank in told:
        wanted, found, difference = rank["steps", kind]
        np.testing.assert_allclose(found, wanted, rtol=3e-6)
        assert wanted[0][1] > 1  # so the clipping is seen too
        assert difference < 1e-4


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_saved_under_tensor_parallelism_are_bitwise_there_without(
    told: list[dict[Any, Any]], kind: str
) -> None:
    for rank in told:
        assert rank["load", WHOLE, kind] == (set(), {}, (made.LR * (1 / 3),))


def _sequences(models: Path) -> Iterator[tuple[Any, Any]]:
    """Nine tokens, of which no two ranks can have as many; norms of heads; a critic's head."""
    rows = made.sequences(12, 5)
    for critic in (False, True):
        whole = made.make(models / "qwen3", WHOLE, critic=critic)
        wanted = made.train(whole, 2, *rows)
        engine = made.make(models / "qwen3", Parallel(2, sequence=True), critic=critic)
        yield ("sequence", critic), (wanted, made.train(engine, 2, *rows), _close(engine, whole))
    (chunk,) = engine.model.chunks
    marks = [chunk.config.sequence_parallel, chunk.output_layer.sequence_parallel]
    with whole_sequences([chunk]):
        marks += [chunk.config.sequence_parallel, chunk.output_layer.sequence_parallel]
    yield "marks", [*marks, chunk.config.sequence_parallel, chunk.output_layer.sequence_parallel]


@pytest.mark.parametrize("critic", [False, True])
def test_sequence_parallelism_trains_as_without(told: list[dict[Any, Any]], critic: bool) -> None:
    for rank in told:
        wanted, found, difference = rank["sequence", critic]
        np.testing.assert_allclose(found, wanted, rtol=3e-6)
        assert difference < 1e-4


def test_sequence_parallelism_is_switched_off_and_on_again(told: list[dict[Any, Any]]) -> None:
    assert told[0]["marks"] == [True, True, False, False, True, True]


# Stages


def _uneven(models: Path, out: Path) -> Iterator[tuple[Any, Any]]:
    """Train and save under each split, and load what each saved into all."""
    rows = made.sequences(12, 5)
    whole = made.make(models / "deep", WHOLE)
    wanted = made.train(whole, 2, *rows)
    held = {}
    for name, parallel in UNEVEN.items():
        engine = made.make(models / "deep", parallel, form="dist" if name == "virtual" else "classic")
        steps = made.train(engine, 2, *rows)
        layers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in engine.model.chunks]
        yield ("uneven", name), (wanted, steps, _close(engine, whole), layers)
        engine.save(made.Folder(out / name))
        held[name] = made.whole(engine)
        yield ("answers", name), _answers(engine)
    dist.barrier()
    for name, parallel in (*UNEVEN.items(), ("whole", WHOLE)):
        engine = made.make(models / "deep", parallel)
        for saved, truth in held.items():
            yield ("load", name, saved), _loaded(engine, out / saved, truth)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_stages_train_as_one(told: list[dict[Any, Any]], name: str) -> None:
    for rank in told:
        wanted, found, difference, _ = rank["uneven", name]
        np.testing.assert_allclose(found, wanted, rtol=3e-6)
        assert difference < 1e-4


def test_uneven_stages_have_the_layers_that_were_asked_for(told: list[dict[Any, Any]]) -> None:
    assert [rank["uneven", "ends"][3] for rank in told] == [[[1]], [[2, 3]], [[4, 5]], [[6]]]
    assert [rank["uneven", "first"][3] for rank in told] == [[[1, 2, 3, 4]]] * 2 + [[[5, 6]]] * 2
    assert [rank["uneven", "virtual"][3] for rank in told] == [[[1], [4, 5]]] * 2 + [[[2, 3], [6]]] * 2


def test_what_uneven_stages_saved_is_bitwise_there_in_every_split(told: list[dict[Any, Any]]) -> None:
    loads = [key for key in told[0] if key[0] == "load" and key[2] in UNEVEN]
    assert len(loads) == 4 * 3
    for rank in told:
        for key in loads:
            assert rank[key] == (set(), {}, (made.LR * (1 / 3),)), key


@pytest.mark.parametrize(
    ("layers", "parallel", "wanted"),
    [
        (8, Parallel(1, 4), [2, 2, 2, 2]),
        (8, Parallel(1, 4, first=1, last=3), [1, 2, 2, 3]),
        (7, Parallel(1, 4, first=1), [1, 2, 2, 2]),
        (7, Parallel(1, 4, last=1), [2, 2, 2, 1]),
        (3, Parallel(1, 2, first=1, last=2), [1, 2]),
        (6, Parallel(1, 4, count_embedding=True, count_loss=True), [1, 2, 2, 1]),
        (7, Parallel(1, 4, count_loss=True), [2, 2, 2, 1]),
        (6, Parallel(1, 2, 2, count_embedding=True, count_loss=True), [3, 3]),
        (8, Parallel(1, 2, 2, first=2), [2, 6]),
    ],
)
def test_layers_are_dealt_out_by_megatrons_rules(layers: int, parallel: Parallel, wanted: list[int]) -> None:
    assert layers_of_stages(layers, parallel) == wanted


@pytest.mark.parametrize(
    ("layers", "parallel", "words"),
    [
        (7, Parallel(1, 2), "does not divide by the 2 stages.*override_transformer_config"),
        (8, Parallel(1, 4, first=3), "have .3, 1, 1, 1. layers"),
        (6, Parallel(1, 2, first=2, last=3), "does not divide"),
        (4, Parallel(1, 2, first=4), "does not divide"),
        (6, Parallel(1, 2, 2, first=3), "does not divide"),
        (6, Parallel(1, 2, count_loss=True), "counted as asked for"),
        (2, Parallel(1, 4, count_embedding=True, count_loss=True), "does not divide"),
        (6, Parallel(1, 1, first=2), "above 1"),
        (6, Parallel(1, 2, first=2, count_loss=True), "leave out"),
    ],
)
def test_layers_that_do_not_divide_are_refused(layers: int, parallel: Parallel, words: str) -> None:
    with pytest.raises(CallError, match=words):
        layers_of_stages(layers, parallel)


# Windows


def _windows(models: Path) -> Iterator[tuple[Any, Any]]:
    from transformers import AutoModelForCausalLM

    ids, mask = made.sequences(5, 3)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for kind in ("mistral", "windowed"):
        reference = AutoModelForCausalLM.from_pretrained(models / kind, dtype=torch.float32)
        with torch.no_grad():
            wanted = reference(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        engine = made.make(models / kind, Parallel(2, 2), trained=False)
        (found,) = engine.model.forward_only([Inputs(ids, mask, 9)], lambda _, outputs: outputs.logits)
        yield ("window", kind), float(((found - wanted).abs() * mask[..., None]).max())
        yield ("answers", kind), _answers(engine)


@pytest.mark.parametrize("kind", ["mistral", "windowed"])
def test_a_query_sees_the_window_that_transformers_gives_it(told: list[dict[Any, Any]], kind: str) -> None:
    assert all(rank["window", kind] < 5e-6 for rank in told)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "llama", "sliding_window": 5}, [None] * 4),
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mixtral"}, [None] * 4),
        ({"model_type": "mixtral", "sliding_window": 5}, [5] * 4),
        ({"model_type": "qwen2", "sliding_window": 5}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 5}, [5] * 4),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 5}, [5, None, 5, None]),
    ],
)
def test_windows_are_read_as_transformers_reads_them(config: dict[str, Any], wanted: list[int | None]) -> None:
    from transformers import AutoConfig

    assert windows_of(config, 4) == wanted
    options = {name: value for name, value in config.items() if name != "model_type"}
    theirs = json.loads(AutoConfig.for_model(config["model_type"], num_hidden_layers=4, **options).to_json_string())
    assert windows_of(theirs, 4) == wanted


# Generation


def _answers(engine: Any, narrow: bool = False) -> Any:
    """The likeliest tokens behind prompts of several lengths; the likeliest by the logits of one forward of all that
    came of it, where nothing is remembered; how many.

    narrow:  let ranks that go on together have other numbers of prompts, and of other lengths
    """
    from milepost.trainer.data import PromptBatch
    from milepost.trainer.megatron_rollout import decode
    from milepost.trainer.rollout import Sampling, SpecialTokens

    mask = (torch.arange(5) >= torch.tensor([0, 2, 4, 1])[:, None]).long()
    ids = torch.randint(3, made.WORDS, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    if narrow and engine.data_rank:
        ids, mask = ids[1:, 1:], mask[1:, 1:]
    prompts = PromptBatch(ids, mask, ["?"] * len(ids), [None] * len(ids), [], [])
    engine.model.train()
    said = decode(engine.model, prompts, Sampling(NEW, do_sample=False), SpecialTokens((1, 2), 0), device=made.CPU)
    assert engine.model.training
    engine.model.eval()
    batch = Inputs(said.input_ids, said.attention_mask, said.responses.shape[1] + 1)
    (logits,) = engine.model.forward_only([batch], lambda _, outputs: outputs.logits)
    real = said.response_mask.bool()
    return said.responses[real].tolist(), logits[:, :-1].argmax(-1)[real].tolist(), said.response_mask.sum(-1).tolist()


@pytest.mark.parametrize("name", [*EXPERTS, *UNEVEN, "mistral", "windowed"])
def test_what_is_remembered_changes_no_token(told: list[dict[Any, Any]], name: str) -> None:
    for rank in told:
        found, wanted, lengths = rank["answers", name]
        assert found == wanted
        assert max(lengths) == NEW and len(lengths) >= 3 and len(set(found)) > 2


# What is refused


_DENSE = {"model_type": "llama", **made.TINY}
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "parallel", "words"),
    [
        (_DENSE | {"intermediate_size": 25}, Parallel(2), "intermediate_size=25 does not divide by tensor_model_"),
        (_DENSE, Parallel(expert=2), "expert_model_parallel_size=2: .* a llama, which has no experts"),
        (
            {"model_type": "mixtral", **made.TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
            Parallel(expert=3),
            "num_local_experts=4 does not divide by expert_model_parallel_size=3",
        ),
        (
            {"model_type": "mixtral", **made.TINY, "intermediate_size": 25, **made.KINDS["mixtral"]},
            Parallel(2),
            "intermediate_size=25 does not divide by tensor_model_parallel_size=2",
        ),
        (
            {"model_type": "qwen3_moe", **made.TINY, **made.KINDS["qwen3_moe"], "moe_intermediate_size": 9},
            Parallel(2, expert=2, expert_tensor=2),
            "moe_intermediate_size=9 does not divide by expert_tensor_parallel_size=2",
        ),
        (
            {"model_type": "qwen2_moe", **made.TINY, **made.KINDS["qwen2_moe"], "intermediate_size": 25},
            Parallel(2, expert=2, expert_tensor=1),
            "^intermediate_size=25 does not divide by tensor_model_parallel_size=2",  # of every other layer
        ),
        (
            {"model_type": "qwen2_moe", **made.TINY, **made.KINDS["qwen2_moe"], "shared_expert_intermediate_size": 13},
            Parallel(2, expert=2, expert_tensor=1),
            "shared_expert_intermediate_size=13 does not divide by tensor_model_parallel_size=2",
        ),
        (
            _DENSE | {"rope_scaling": _ROPE | {"original_max_position_embeddings": None}},
            WHOLE,
            "rope_type=llama3 in config.json, where original_max_position_embeddings=None",
        ),
        (
            _DENSE | {"rope_scaling": _ROPE},  # transformers takes the model's own longest sequence then
            WHOLE,
            "where original_max_position_embeddings=64",
        ),
        (_DENSE | {"rope_scaling": {"rope_type": "llama3"}, "max_position_embeddings": 8192}, WHOLE, "factor=None"),
        (_DENSE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, WHOLE, "rope_type=yarn in config.json"),
    ],
)
def test_sizes_that_do_not_go_into_equal_parts_are_refused_by_name(
    config: dict[str, Any], parallel: Parallel, words: str
) -> None:
    """Before anything of Megatron is made."""
    with pytest.raises((CallError, MismatchError), match=words) as caught:
        build_chunks(config, parallel, made.CPU, torch.float32)
    assert "\n" not in str(caught.value)


def _refused(models: Path) -> Iterator[tuple[Any, Any]]:
    for name, act in {
        "wider": lambda: start(Parallel(1, expert_tensor=2), made.CPU, seed=1),
        "apart": lambda: made.make(models / "wide", Parallel(4, expert_tensor=2)),
    }.items():
        with pytest.raises(CallError) as caught:
            act()
        yield ("refused", name), str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wider", "expert_tensor_parallel_size=2 does not divide tensor_model_parallel_size=1"),
        ("apart", "needs an expert_model_parallel_size above 1"),
    ],
)
def test_experts_that_megatron_cannot_train_so_are_refused(told: list[dict[Any, Any]], name: str, words: str) -> None:
    assert words in told[0]["refused", name]
