"""The schema and a config as text: commented YAML, plain YAML, JSON Schema.

`python -m milepost.trainer.config_text` prints what `configs/ppo_trainer.yaml` must be, with `megatron` behind it
`configs/ppo_megatron_trainer.yaml`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf

from milepost.trainer.fields import ConfigKey, config_keys, config_sections
from milepost.trainer.schema import MEGATRON, TrainConfig

_HEADER = """\
# Every key of `milepost train`, with its default and its meaning. Copy what you change into a file of your own
# (milepost train --config my.yaml) or set it on the command line (milepost train trainer.save_freq=20).
# Where actor_rollout_ref.model.path is null, a tiny model is trained to add, with the values of
# src/milepost/trainer/embedded.py instead of some of these; `milepost config` shows them.
# Made from src/milepost/trainer/schema.py by `python -m milepost.trainer.config_text{variant}`; do not edit.
"""
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"": {}, MEGATRON: {"actor_rollout_ref.actor.strategy": MEGATRON}}
)
"""Names of configs to start from -> what they set otherwise than the defaults."""
_COMMENT_COLUMN = 52


def render_yaml(variant: str = "") -> str:
    """The defaults, or a variant of them, as YAML, each key with its meaning behind it."""
    lines = [_HEADER.format(variant=variant and f" {variant}").rstrip()]
    shown: set[str] = set()
    for key in config_keys().values():
        parts = key.section.split(".")
        for depth in range(len(parts)):
            section = ".".join(parts[: depth + 1])
            if section not in shown:
                shown.add(section)
                indent = "  " * depth
                lines += ["", f"# {config_sections()[section]}"] if depth == 0 else []
                comment = f"# {config_sections()[section]}" if depth else ""
                lines.append(f"{indent}{parts[depth]}:".ljust(_COMMENT_COLUMN if depth else 0) + comment)
        lines.append(_yaml_line(key, len(parts), VARIANTS[variant].get(key.name, key.default)))
    return "\n".join(lines) + "\n"


def _yaml_line(key: ConfigKey, depth: int, default: Any) -> str:
    items = [_yaml_scalar(item) for item in default] if isinstance(default, list) else []
    value = f"[{', '.join(items)}]" if isinstance(default, list) else _yaml_scalar(default)
    said = f"{'  ' * depth}{key.name.rpartition('.')[2]}: {value}"
    choices = f" ({', '.join(key.choices)})" if key.choices else ""
    return f"{said.ljust(_COMMENT_COLUMN - 1)} # {key.meaning}{choices}"


def _yaml_scalar(value: object) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({"_": value})).removeprefix("_: ").strip()


def config_yaml(config: TrainConfig) -> str:
    """A config as plain YAML; `load_config` on it gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def json_schema() -> dict[str, Any]:
    """The schema as JSON Schema (draft 2020-12), for editors and for checking a YAML file elsewhere.

    Defaults and values that are interpolations (`${...}`) are text, whatever the type.
    """
    schema = _object("Config of milepost train")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    places = {"": schema}
    for name, meaning in config_sections().items():
        parent, _, last = name.rpartition(".")
        places[name] = places[parent]["properties"][last] = _object(meaning)
    for key in config_keys().values():
        places[key.section]["properties"][key.name.rpartition(".")[2]] = _key_schema(key)
    return schema


def _object(meaning: str) -> dict[str, Any]:
    return {"type": "object", "description": meaning, "properties": {}, "additionalProperties": False}


def _key_schema(key: ConfigKey) -> dict[str, Any]:
    if key.shape is dict:
        value: dict[str, Any] = {"type": "object"}
    else:
        value = {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[key.element]}
        limits = {"minimum": key.minimum, "exclusiveMinimum": key.above, "maximum": key.maximum}
        value |= {name: limit for name, limit in limits.items() if limit is not None}
        if key.choices:
            value["enum"] = [*key.choices, *key.spellings]
    alternatives: list[dict[str, Any]] = [value]
    if key.shape is list:
        size = {} if key.length is None else {"minItems": key.length, "maxItems": key.length}
        alternatives = [{"type": "array", "items": value, **size}]
        alternatives += [value] if key.element is str else []
    if key.optional or key.shape is not None:
        alternatives.append({"type": "null"})
    alternatives.append({"type": "string", "pattern": r"\$\{"})
    return {"description": key.meaning, "default": key.default, "anyOf": alternatives}


if __name__ == "__main__":
    sys.stdout.write(render_yaml(*sys.argv[1:]))
