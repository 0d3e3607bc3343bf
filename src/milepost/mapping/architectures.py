"""What a model's files must hold, told from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.index import Shape
from milepost.mapping.families import FAMILIES
from milepost.mapping.rules import (
    BASE,
    CAUSAL_LM,
    MANY,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    Family,
    Rule,
    Settings,
    number,
)

Config = Mapping[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True)
class Architecture:
    """The exact set of tensors that `save_pretrained` writes for one config.

    family:      `model_type` of the config
    head:        "causal-lm", "sequence-classification", "token-classification" or "base"
    class_name:  the class of transformers that has this head
    tensors:     name -> shape
    tied:        name that is not written -> the tensor that stands for it (`tie_word_embeddings`)
    ignored:     patterns (fnmatch) of names that old files may hold and the architecture does not need
    renamed:     name in the memory of transformers 5 -> name in the files, where the two differ
    fused:       name in the memory of transformers 5 -> for each expert, the tensors of the files that it holds one
                 below the other: shape [experts, rows of all parts, columns]
    """

    family: str
    head: str
    class_name: str
    tensors: Mapping[str, Shape]
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    renamed: Mapping[str, str]
    fused: Mapping[str, tuple[tuple[str, ...], ...]]


def expected(config: Config) -> Architecture | None:
    """The architecture that a config describes, or None where its family or its class is not one that we know.

    Raises MismatchError where the config lacks a key that decides about shapes.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return None
    class_name = (config.get("architectures") or [family.heads[CAUSAL_LM]])[0]
    head = next((head for head, name in family.heads.items() if name == class_name), None)
    if head is None:
        return None
    settings = family.settings(config)
    alias, original = family.output
    tied = {alias: original} if head == CAUSAL_LM and settings["tie_word_embeddings"] else {}

    def saved(name: str) -> str:
        return name.removeprefix(f"{family.base}.") if head == BASE else name

    tensors = {
        saved(name): rule.resolve(settings)
        for rule in (*family.rules, *_head_rules(family, head))
        if rule.applies(settings)
        for name in _names(rule.name, rule.layers, family, settings)
        if name not in tied
    }
    renamed: dict[str, str] = {}
    fused: dict[str, tuple[tuple[str, ...], ...]] = {}
    for rule in family.memory:
        experts = range(number(settings, family.experts, most=MANY)) if rule.stacked else range(1)
        for layer in family.layers_of(rule.layers, settings):
            name = saved(rule.name.format(layer=layer))
            parts = tuple(tuple(saved(part.format(layer=layer, expert=e)) for part in rule.parts) for e in experts)
            if rule.stacked:
                fused[name] = parts
            else:
                renamed[name] = parts[0][0]
    return Architecture(
        family=config["model_type"],
        head=head,
        class_name=class_name,
        tensors=tensors,
        tied=tied,
        ignored=tuple(saved(pattern.format_map(settings)) for pattern in family.ignored),
        renamed=renamed,
        fused=fused,
    )


def _head_rules(family: Family, head: str) -> tuple[Rule, ...]:
    if head == CAUSAL_LM:
        return (Rule(family.output[0], ("vocab_size", "hidden_size")),)
    if head == SEQUENCE_CLASSIFICATION:
        return (Rule("score.weight", ("num_labels", "hidden_size")),)
    return family.token_head if head == TOKEN_CLASSIFICATION else ()


def _names(pattern: str, layers: str, family: Family, settings: Settings) -> list[str]:
    """All names that a rule stands for."""
    if "{layer}" not in pattern:
        return [pattern]
    experts = range(number(settings, family.experts, most=MANY)) if "{expert}" in pattern else range(1)
    return [
        pattern.format(layer=layer, expert=expert) for layer in family.layers_of(layers, settings) for expert in experts
    ]
