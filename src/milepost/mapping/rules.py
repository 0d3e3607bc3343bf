"""The words in which a model family is written down: rules for the tensors that it saves, as plain data.

A rule is the name of a tensor, with `{layer}` and `{expert}` where it stands once a layer or once an expert, and its
shape in keys of config.json:

    Rule("model.layers.{layer}.self_attn.q_proj.weight", ("num_attention_heads*head_dim", "hidden_size"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from milepost.errors import MismatchError
from milepost.index import Shape

CAUSAL_LM = "causal-lm"
SEQUENCE_CLASSIFICATION = "sequence-classification"
TOKEN_CLASSIFICATION = "token-classification"
BASE = "base"

Settings = Mapping[str, Any]
"""config.json with the family's defaults filled in."""

MANY = 100_000
"""More layers, and more experts, than any model has: each is a name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor, or one of every layer or expert.

    name:    its name in the files, with `{layer}` and `{expert}`
    shape:   one size a dimension: sums of products of config keys and numbers ("2*intermediate_size")
    when:    config keys, joined by " and ", that must be set and not false for the tensor to exist; "not KEY" for the
             opposite; "": always
    layers:  the kind of layers that have it: "all", "dense" or "moe"
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""
    layers: str = "all"

    def applies(self, settings: Settings) -> bool:
        """Whether a model with this config has the tensor."""
        return all(
            bool(settings[key.removeprefix("not ")]) != key.startswith("not ")
            for key in self.when.split(" and ")
            if key
        )

    def resolve(self, settings: Settings) -> Shape:
        """The shape as numbers."""
        return tuple(_size(term, settings) for term in self.shape)


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """A tensor that transformers 5 holds in memory in another form than in its files, so that a checkpoint of a
    training run has that form too.

    name:    its name in memory
    parts:   the names that its files have. With `{expert}` in them, dimension 0 counts the experts, and the rows of
             one expert are the parts, one below the other; else it is one tensor under another name
    layers:  as in Rule
    """

    name: str
    parts: tuple[str, ...]
    layers: str = "all"

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of experts."""
        return "{expert}" in self.parts[0]


def tensor(name: str, *shape: str) -> tuple[Rule, ...]:
    """A tensor that is always there."""
    return (Rule(name, shape),)


def linear(name: str, rows: str, columns: str, bias: bool | str = False) -> tuple[Rule, ...]:
    """A linear layer: `name.weight` [rows, columns], and `name.bias` never, always, or where a config key says so."""
    weight = Rule(f"{name}.weight", (rows, columns))
    if not bias:
        return (weight,)
    return weight, Rule(f"{name}.bias", (rows,), when=bias if isinstance(bias, str) else "")


def in_layers(kind: str, *rules: Rule) -> tuple[Rule, ...]:
    """The same rules for one kind of layers only."""
    return tuple(replace(rule, layers=kind) for rule in rules)


def _no_moe(settings: Settings, layer: int) -> bool:
    return False


_SCORE_PER_TOKEN = linear("score", "num_labels", "hidden_size", bias="token_classification_bias")


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of transformers.

    heads:       which heads it has, and the class name of each
    defaults:    what its config class means by a key that config.json lacks
    rules:       the tensors of the base model
    is_moe:      whether a layer holds experts, for families that have them
    experts:     config key with the number of experts
    synonyms:    config keys that transformers has written under a second name: second -> first
    output:      (output layer, input embedding), which `tie_word_embeddings` makes one tensor
    token_head:  the tensors that token classification adds
    memory:      what has another form in memory
    base:        the prefix of all names that the base model, saved alone, does without
    ignored:     patterns of names that old files hold and no model needs; `{KEY}` stands for a config value
    """

    heads: Mapping[str, str]
    defaults: Settings
    rules: tuple[Rule, ...]
    is_moe: Callable[[Settings, int], bool] = _no_moe
    experts: str = ""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    output: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    token_head: tuple[Rule, ...] = _SCORE_PER_TOKEN
    memory: tuple[MemoryRule, ...] = ()
    base: str = "model"
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """The config as transformers would read it, as far as shapes depend on it."""
        known = {self.synonyms.get(key, key): value for key, value in config.items()}
        filled = _Settings({"tie_word_embeddings": False, "token_classification_bias": True} | dict(self.defaults))
        filled.update(known)
        filled["num_labels"] = num_labels(config)
        if filled.get("num_key_value_heads") is None:
            filled["num_key_value_heads"] = filled["num_attention_heads"]
        for key, least in (("num_attention_heads", 1), ("num_key_value_heads", 1), ("num_hidden_layers", 0)):
            number(filled, key, least)
        if filled.get("head_dim") is None:
            filled["head_dim"] = number(filled, "hidden_size") // filled["num_attention_heads"]
        return filled

    def layers_of(self, kind: str, settings: Settings) -> list[int]:
        """The numbers of the layers of one kind."""
        every = range(number(settings, "num_hidden_layers", most=MANY))
        return [layer for layer in every if kind == "all" or self.is_moe(settings, layer) == (kind == "moe")]


class _Settings(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise MismatchError(f"config.json lacks {key}, without which the tensors of the model cannot be told")


def num_labels(config: Mapping[str, Any]) -> int:
    """Number of outputs of a classification head, as transformers reads it: from id2label, num_labels, or 2."""
    id2label = config.get("id2label")
    if isinstance(id2label, Mapping):
        return len(id2label)
    if id2label is not None:
        raise MismatchError(f"config.json says {id2label!r:.40} for id2label, which is to be a mapping of labels")
    return 2 if config.get("num_labels") is None else number(config, "num_labels")


def number(settings: Mapping[str, Any], key: str, least: int = 0, most: int = 1 << 40) -> int:
    """A whole number of a config. MismatchError where it is none, or beyond all reason."""
    value = settings[key]
    if type(value) is not int or not least <= value <= most:
        raise MismatchError(f"config.json says {value!r:.40} for {key}, which is to be a number from {least} to {most}")
    return value


def _size(term: str, settings: Settings) -> int:
    return sum(
        math.prod(
            int(factor) if factor.isdigit() else number(settings, factor) for factor in product.strip().split("*")
        )
        for product in term.split("+")
    )
