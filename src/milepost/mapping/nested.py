"""Configs within configs: a model of several parts (text, vision, audio) has one for each.

{"model_type": "qwen2_vl", "text_config": {...}, "vision_config": {"depth": 32, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.mapping.architectures import Config

TEXT = "text_config"
_STEM = 3  # letters that tell a part: `vision_config` belongs to `visual.*`, `vision_tower.*`, `vision_model.*`


def towers(config: Config) -> dict[str, Mapping[str, Any]]:
    """The configs of the parts that are not the language model: key -> config."""
    return {
        key: value
        for key, value in config.items()
        if key.endswith("_config") and key not in (TEXT, "quantization_config") and isinstance(value, Mapping)
    }


def tower_of(name: str, config: Config) -> str | None:
    """The key of the config that a tensor belongs to; None: the language model's, or the whole model's."""
    parts = name.split(".")
    return next((key for key in towers(config) if any(part.startswith(key[:_STEM]) for part in parts)), None)


def layers_of(config: Config) -> int | None:
    """Number of layers that a config names, under the keys that are in use."""
    count = config.get("num_hidden_layers") or config.get("depth")
    return count if isinstance(count, int) else None


def says_tied(config: Config) -> bool | None:
    """What config.json says of tied embeddings; None: nothing.

    transformers 5 takes the value of `text_config`, where files before it have it, unless that beside it is true.
    """
    said = [one.get("tie_word_embeddings") for one in (config, config.get(TEXT) or {})]
    return True if any(said) else None if all(one is None for one in said) else False
