"""Configs within configs, as families of transformers write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorIndex
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping import check_layers, to_huggingface
from milepost.mapping.nested import says_tied, tower_of

QWEN2_VL = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "vision_config": {"depth": 3},
}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 2},
    "vision_config": {"num_hidden_layers": 3},
}
BLOCKS = [f"model.visual.blocks.{n}.norm1.weight" for n in range(3)]
TOWER = [f"model.vision_tower.vision_model.encoder.layers.{n}.layer_norm1.weight" for n in range(3)]
LAYERS = [f"model.language_model.layers.{n}.input_layernorm.weight" for n in range(2)]
EMBEDDING, OUTPUT = "model.language_model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def index_of(tmp_path: Path) -> Any:
    def make(names: list[str], **values: Any) -> TensorIndex:
        tensors = dict.fromkeys(names, np.ones(2, np.float32)) | {n: np.float32(v) for n, v in values.items()}
        save_file(tensors, tmp_path / "a.safetensors")
        return TensorIndex(read_safetensors(tmp_path / "a.safetensors"), "fsdp")

    return make


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"text_config": {}}, None),
        ({}, None),
    ],
)
def test_tied_as_transformers_reads_it(config: dict[str, Any], tied: bool | None) -> None:
    assert says_tied(config) is tied
    if "text_config" in config:
        from transformers import Qwen2VLConfig

        assert Qwen2VLConfig(**config, vision_config={"depth": 1}).tie_word_embeddings is bool(tied)


@pytest.mark.parametrize(("config", "vision"), [(QWEN2_VL, BLOCKS), (LLAVA, TOWER)])
def test_layers_of_each_part_are_counted_in_that_part(config: dict[str, Any], vision: list[str], index_of: Any) -> None:
    assert "2 layers and 3 layers of vision" in check_layers(index_of(LAYERS + vision), config)
    # three blocks of vision do not stand for two layers of text
    with pytest.raises(IncompleteError, match=r"2 layers; missing: model\.language_model\.layers\.1\.\*"):
        check_layers(index_of(LAYERS[:1] + vision), config)
    with pytest.raises(IncompleteError, match=r"3 layers in vision_config; missing: .*\.2\.\*"):
        check_layers(index_of(LAYERS + vision[:2]), config)


def test_a_tied_text_config_makes_one_tensor(index_of: Any) -> None:
    same = {EMBEDDING: [[1.0, 2.0]], OUTPUT: [[1.0, 2.0]], "model.audio.embed_tokens.weight": [[0.0], [1.0]]}
    mapped = to_huggingface(index_of(LAYERS + BLOCKS, **same), QWEN2_VL)
    assert OUTPUT not in mapped.index and EMBEDDING in mapped.index
    assert "unknown to milepost" in mapped.notes[-1]
    with pytest.raises(MismatchError, match="tie_word_embeddings"):
        to_huggingface(index_of(LAYERS + BLOCKS, **{**same, OUTPUT: [[1.0, 2.5]]}), QWEN2_VL)
    untied = {**QWEN2_VL, "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": False}}
    assert OUTPUT in to_huggingface(index_of(LAYERS + BLOCKS, **same), untied).index


def test_tensors_belong_to_the_part_that_their_names_say() -> None:
    assert {tower_of(name, QWEN2_VL) for name in (*BLOCKS, "visual.merger.ln_q.weight")} == {"vision_config"}
    assert {tower_of(name, LLAVA) for name in (*TOWER, "vision_tower.x")} == {"vision_config"}
    assert {tower_of(name, LLAVA) for name in (*LAYERS, OUTPUT, "multi_modal_projector.linear_1.weight")} == {None}
