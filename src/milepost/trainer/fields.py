"""The keys of the schema as a flat table: dotted name -> type, range, meaning; and what a value must be.

`schema.py` says it in dataclasses, for the code that uses the config; this table says the same for the code that
checks, prints and explains it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from milepost.errors import ConfigError
from milepost.trainer.overrides import parse_scalar
from milepost.trainer.schema import TrainConfig

_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "anything"}


@dataclass(frozen=True)
class ConfigKey:
    """One key: `element` is its type, or that of its elements where `shape` is `list` or `dict`."""

    name: str
    element: Any
    shape: type | None
    optional: bool
    default: Any
    meaning: str
    choices: tuple[str, ...]
    spellings: dict[str, str]
    minimum: float | None
    above: float | None
    maximum: float | None
    length: int | None

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def type_name(self) -> str:
        """The type in words, such as `list of text` or `fsdp2|fsdp`."""
        one = "|".join((*self.choices, *self.spellings)) if self.choices else _NAMES[self.element]
        if self.shape is dict:
            return "mapping"
        named = f"list of {one}" if self.shape is list else one
        return f"{named} or null" if self.optional else named

    def check(self, value: object, *, interpolated: bool = False) -> object:
        """Return `value` as this key holds it.

        Args:
            value: plain data without interpolations.
            interpolated: it came through `${...}`, where text stands for numbers too (environment variables).

        Raises:
            ValueError: what was expected, in a few words; the caller says for which key.
        """
        if value is None:
            if self.optional:
                return None
            if self.shape is not None:
                return self.shape()
            raise ValueError(f"expected {self.type_name}, got null")
        if self.shape is dict:
            if not isinstance(value, dict):
                raise ValueError(f"expected {self.type_name}, got {_described(value)}")
            return value
        if self.shape is list:
            items = value if isinstance(value, list) else [value]
            if isinstance(value, dict) or (self.element is not str and not isinstance(value, list)):
                raise ValueError(f"expected {self.type_name}, got {_described(value)}")
            if self.length is not None and len(items) != self.length:
                raise ValueError(f"expected {self.length} elements, got {len(items)}: {value}")
            return [self._check_one(item, interpolated) for item in items]
        return self._check_one(value, interpolated)

    def _check_one(self, value: object, interpolated: bool) -> object:
        if interpolated and isinstance(value, str) and self.element is not str:
            value = parse_scalar(value)
        wrong = ValueError(f"expected {self.type_name}, got {_described(value)}")
        if isinstance(value, bool) != (self.element is bool) or not isinstance(value, (str, int, float)):
            raise wrong
        if self.element is str:
            return self._check_choice(str(value))
        if self.element is float and isinstance(value, (int, float)):
            value = float(value)
        if not isinstance(value, self.element):
            raise wrong
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_range(value)
        return value

    def _check_choice(self, value: str) -> str:
        value = self.spellings.get(value, value)
        if self.choices and value not in self.choices:
            raise ValueError(f"expected {self.type_name}, got {value!r}")
        return value

    def _check_range(self, value: float) -> None:
        limits = [
            (f"at least {self.minimum}", self.minimum is None or value >= self.minimum),
            (f"more than {self.above}", self.above is None or value > self.above),
            (f"at most {self.maximum}", self.maximum is None or value <= self.maximum),
            ("a finite number", math.isfinite(value)),
        ]
        for limit, holds in limits:
            if not holds:
                raise ValueError(f"expected {limit}, got {value}")


def _described(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    kinds: dict[type, str] = {dict: "mapping", list: "list", int: "integer", float: "number", str: "text"}
    return f"{kinds.get(type(value), type(value).__name__)} {value!r}"


@cache
def config_keys() -> dict[str, ConfigKey]:
    """Every key by its dotted name, in the order of the schema. `default` may be an interpolation."""
    defaults = OmegaConf.to_container(OmegaConf.structured(TrainConfig), resolve=False)
    return {name: _config_key(name, field, hint, defaults) for name, field, hint in _walk(TrainConfig, "") if field}


@cache
def config_sections() -> dict[str, str]:
    """The meaning of every section by its dotted name."""
    return {name: meaning for name, field, meaning in _walk(TrainConfig, "") if field is None}


def _walk(kind: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any] | None, Any]]:
    """Yield (name, field, type hint) for a key and (name, None, meaning) for a section."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield name, None, field.metadata["help"]
            yield from _walk(hint, f"{name}.")
        else:
            yield name, field, hint


def _config_key(name: str, field: dataclasses.Field[Any], hint: Any, defaults: Any) -> ConfigKey:
    arguments = typing.get_args(hint)
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (argument for argument in arguments if argument is not type(None))
    shape = typing.get_origin(hint)
    default = defaults
    for part in name.split("."):
        default = default[part]
    return ConfigKey(
        name=name,
        element=arguments[-1] if shape is not None else hint,
        shape=shape,
        optional=optional,
        default=default,
        meaning=field.metadata["help"],
        **{k: field.metadata[k] for k in ("choices", "spellings", "minimum", "above", "maximum", "length")},
    )


# what verl calls otherwise, by the last two parts of the name
OLDER_NAMES = {"checkpoint.contents": "save_contents", "optim.warmup_style": "lr_scheduler_type"}

# what verl has and milepost does in another way
_ELSEWHERE = {
    "custom_reward_function.path": "set reward.path=file.py:function",
    "custom_reward_function.name": "set reward.path=file.py:function",
    "actor_rollout_ref.rollout.name": "responses are generated by the actor itself; there is no rollout engine to name",
    "actor_rollout_ref.rollout.n": "PPO with a critic takes one response per prompt",
}


def current_name(name: str) -> str:
    """The name of a key, given perhaps by one of verl's older names for it."""
    head, _, tail = name.rpartition(".")
    newer = OLDER_NAMES.get(f"{head.rpartition('.')[2]}.{tail}")
    return f"{head}.{newer}" if newer and f"{head}.{newer}" in config_keys() else name


def unknown_key(name: str, origin: str) -> ConfigError:
    """The error for a name that is no key: which section lacks it, and the nearest name there is."""
    for theirs, remedy in _ELSEWHERE.items():
        if name == theirs or name.endswith(f".{theirs}"):
            return ConfigError(f"{origin}: no key {name!r} here; {remedy}")
    head, _, tail = name.rpartition(".")
    known = {*config_keys(), *config_sections()}
    while head and head not in config_sections():
        head, _, part = head.rpartition(".")
        tail = f"{part}.{tail}"
    where = f"section {head!r} has no key {tail!r}" if head else f"there is no section or key {tail!r}"
    near = nearest(name, known)
    hint = f"nearest is {near!r}" if near else "`milepost config` lists every key"
    return ConfigError(f"{origin}: unknown key {name!r}: {where}; {hint}")


def _abbreviates(name: str, candidate: str) -> bool:
    """Whether `name` is `candidate` with some words left out, as `actor.lr` of `actor_rollout_ref.actor.optim.lr`."""
    words = iter(re.split(r"[._]", candidate))
    return all(word in words for word in re.split(r"[._]", name))


def nearest(name: str, known: set[str]) -> str | None:
    """The known dotted name most like `name` as a whole and in its last part, or None where nothing is close."""

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, name, candidate).ratio()
        last = SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        same_section = name.rpartition(".")[0] == candidate.rpartition(".")[0]
        return whole + last + 0.3 * same_section + 0.5 * _abbreviates(name, candidate)

    best = max(sorted(known), key=likeness)
    return best if likeness(best) > 1.1 else None
