"""A state dict with an adapter, taken apart by its names alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.errors import MismatchError
from milepost.index import TensorIndex
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping.lora import parameter_of, take_apart
from milepost.mapping.wrappers import has_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES = {f"{Q}.base_layer.weight": (4, 6), f"{Q}.lora_A.default.weight": (2, 6), f"{Q}.lora_B.default.weight": (4, 2)}


@pytest.fixture
def index_of(tmp_path: Path) -> Any:
    def make(shapes: dict[str, tuple[int, ...]]) -> TensorIndex:
        tensors = {n: np.full(s, number, np.float32) for number, (n, s) in enumerate(shapes.items())}
        save_file(tensors, tmp_path / "a.safetensors")
        return TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp")

    return make


def test_names_of_each_side(index_of: Any) -> None:
    run = take_apart(
        index_of(
            {
                **SHAPES,
                f"{Q}.base_layer.bias": (4,),
                "base_model.model.model.norm.weight": (6,),
                "base_model.model.embed.base_layer.weight": (9, 6),
                "base_model.model.embed.lora_embedding_A.default": (3, 9),
                "base_model.model.embed.lora_embedding_B.default": (6, 3),
                "base_model.model.score.original_module.weight": (1, 6),
                "base_model.model.score.modules_to_save.default.weight": (1, 6),
            }
        )
    )
    plain = "model.layers.0.self_attn.q_proj"
    assert set(run.base) == {f"{plain}.weight", f"{plain}.bias", "model.norm.weight", "embed.weight", "score.weight"}
    assert set(run.trained) == {"score.weight"}
    assert run.base["score.weight"].numpy()[0, 0] != run.trained["score.weight"].numpy()[0, 0]
    assert set(run.adapter.tensors) == {
        f"{Q}.lora_A.weight",
        f"{Q}.lora_B.weight",
        "base_model.model.embed.lora_embedding_A",
        "base_model.model.embed.lora_embedding_B",
        "base_model.model.score.weight",
    }
    assert run.adapter.whole == ("score",) and not run.adapter.dora
    assert {name: f.rank for name, f in run.adapter.modules.items()} == {plain: 2, "embed": 3}
    assert run.adapter.modules[plain].update(1, False).shape == (4, 6)
    assert run.adapter.modules[plain].update(1, True).shape == (6, 4)  # a weight that is kept transposed
    assert run.adapter.modules["embed"].update(1, False).shape == (9, 6)
    assert set(run.biases) == {f"{Q}.base_layer.bias"}


def test_an_adapter_that_transformers_added_gets_pefts_prefix(index_of: Any) -> None:
    run = take_apart(index_of({n.removeprefix("base_model.model."): s for n, s in SHAPES.items()}))
    assert set(run.base) == {"model.layers.0.self_attn.q_proj.weight"}
    assert set(run.adapter.tensors) == {f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"}


def test_another_adapter_is_left_out_and_named(index_of: Any) -> None:
    other = {n.replace("default", "ref"): s for n, s in SHAPES.items() if "lora_" in n}
    run = take_apart(index_of({**SHAPES, **other}))
    assert len(run.adapter.tensors) == 2 and any("ref" in note for note in run.notes)
    alone = take_apart(index_of({**{n: s for n, s in SHAPES.items() if "base_layer" in n}, **other}))
    assert len(alone.adapter.tensors) == 2 and not alone.notes
    third = {n.replace("default", "third"): s for n, s in SHAPES.items() if "lora_" in n}
    with pytest.raises(MismatchError, match="ref, third"):
        take_apart(index_of(other | third))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{Q}.lora_E.default": (2, 1)}, "lora_E"),
        ({f"{Q}.token_adapter.trainable_tokens_delta.default": (2, 1)}, "single tokens"),
        ({f"{Q}.lora_B.default.weight": (4, 3)}, "make no LoRA update"),
        ({"base_model.model.k_proj.lora_A.default.weight": (2, 6)}, "lacks the other factor"),
        ({"model.layers.0.self_attn.q_proj.weight": (4, 6)}, "would both become"),
    ],
)
def test_what_is_no_lora_is_refused_by_name(change: dict[str, Any], says: str, index_of: Any) -> None:
    with pytest.raises(MismatchError, match=says):
        take_apart(index_of({**SHAPES, **change}))


def test_only_adapters_are_adapters(index_of: Any) -> None:
    assert has_adapter(index_of(SHAPES))
    assert not has_adapter(index_of({"model.layers.0.q_proj.weight": (1,), "explora_tion.weight": (1,)}))


def test_parameters_of_a_module_without_layers_are_told_apart_by_their_shapes(index_of: Any) -> None:
    experts = "base_model.model.experts"
    run = take_apart(
        index_of(
            {
                f"{experts}.base_layer.base_layer.gate_up": (3, 8, 6),
                f"{experts}.base_layer.base_layer.down": (3, 6, 4),
                f"{experts}.base_layer.base_layer.gate_up_bias": (3, 8),
                f"{experts}.base_layer.lora_A.default.weight": (6, 6),
                f"{experts}.base_layer.lora_B.default.weight": (8, 6),
                f"{experts}.lora_A.default.weight": (3, 4),
                f"{experts}.lora_B.default.weight": (6, 3),
            }
        )
    )
    shapes = {name: entry.shape for name, entry in run.base.items()}
    assert set(shapes) == {"experts.gate_up", "experts.down", "experts.gate_up_bias"}
    found = {name: parameter_of(name, factors, shapes) for name, factors in run.adapter.modules.items()}
    assert found == {"experts.base_layer": "experts.gate_up", "experts": "experts.down"}
    factors = run.adapter.modules["experts.base_layer"]
    a, b = factors.a.numpy(), factors.b.numpy()
    second = factors.of_expert(1, 3)
    assert np.array_equal(second.a.numpy(), a[2:4]) and np.array_equal(second.b.numpy(), b[:, 1::3])
    with pytest.raises(MismatchError, match=r"experts\.gate_up and experts\.twin, and nothing says which"):
        parameter_of("experts", factors, {**shapes, "experts.twin": (3, 8, 6)})
    with pytest.raises(MismatchError, match=r"no parameter of the base fits its LoRA factors \[8, 6\] and \[6, 6\]"):
        parameter_of("experts", factors, {"experts.down": (3, 6, 4), "experts.empty": (0, 8, 6)})
    with pytest.raises(MismatchError, match=r"there is no elsewhere\.weight"):
        parameter_of("elsewhere", factors, shapes)
