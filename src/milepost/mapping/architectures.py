"""What a model's files must hold, told from config.json alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import MismatchError
from milepost.index import Shape, TensorIndex
from milepost.mapping.families import FAMILIES
from milepost.mapping.rules import (
    BASE,
    CAUSAL_LM,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    Family,
    MemoryRule,
    Rule,
    Settings,
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
    for live in family.memory:
        for name, parts in _in_memory(live, family, settings):
            if len(parts[0]) == 1 and "{expert}" not in live.parts[0]:
                renamed[saved(name)] = saved(parts[0][0])
            else:
                fused[saved(name)] = tuple(tuple(saved(part) for part in row) for row in parts)
    return Architecture(
        family=config["model_type"],
        head=head,
        class_name=class_name,
        tensors=tensors,
        tied=tied,
        ignored=tuple(saved(pattern.format_map(settings)) for pattern in family.ignored),
        renamed={name: new for name, new in renamed.items() if new in tensors or new in tied},
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
    experts = range(settings[family.experts]) if "{expert}" in pattern else range(1)
    return [
        pattern.format(layer=layer, expert=expert) for layer in family.layers_of(layers, settings) for expert in experts
    ]


def _in_memory(rule: MemoryRule, family: Family, settings: Settings) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    """For each tensor in memory: its name, and for each expert (one where there are none) the names of its parts."""
    layers = family.layers_of(rule.layers, settings) if "{layer}" in rule.name else [0]
    experts = range(settings[family.experts]) if "{expert}" in rule.parts[0] else range(1)
    return [
        (
            rule.name.format(layer=layer),
            tuple(tuple(part.format(layer=layer, expert=expert) for part in rule.parts) for expert in experts),
        )
        for layer in layers
    ]


_HEAD_SUFFIX = re.compile(r"(LMHeadModel|Model|For[A-Z]\w*)$")
_VALUE_HEADS = ("score", "classifier")
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")


def value_head_config(config: Config, labels: int = 1, bias: bool = True) -> dict[str, Any]:
    """What config.json must say of a value model: token classification with one label, a value for every token.

    Without a bias in the head, `token_classification_bias` says so to those versions of transformers that know the key;
    others add a bias of zero.

    Raises MismatchError where transformers has no such class for the family, or config.json names no class at all.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is not None:
        name = family.heads.get(TOKEN_CLASSIFICATION)
        if name is None:
            raise MismatchError(
                f"transformers has no token classification class for {config['model_type']}, so a value model of this "
                "family has no Hugging Face form"
            )
    elif config.get("architectures"):
        name = _HEAD_SUFFIX.sub("", config["architectures"][0]) + "ForTokenClassification"
    else:
        raise MismatchError('config.json names no class; add "architectures" to it, e.g. ["LlamaForCausalLM"]')
    names = [f"LABEL_{label}" for label in range(labels)]
    return {
        **config,
        "architectures": [name],
        "num_labels": labels,
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
        **({} if bias else {"token_classification_bias": False}),
    }


def infer_head(index: TensorIndex, config: Config, is_value_model: bool = False) -> dict[str, Any]:
    """The config made true to the head that is there.

    Trainers save critics under the policy's config.json, which says ForCausalLM, while the files hold a value head
    (`score.weight`, in some families `classifier.weight`) and no output layer. `is_value_model` insists on that head.

    index:  with wrappers stripped
    """
    head = next((name for name in _VALUE_HEADS if f"{name}.weight" in index), None)
    if head is None:
        if is_value_model:
            raise MismatchError(
                f"this is no value model: it has neither {' nor '.join(f'{name}.weight' for name in _VALUE_HEADS)}; "
                "leave out --is-value-model, or give the critic's directory"
            )
        return dict(config)
    named = (config.get("architectures") or [""])[0]
    says_policy = named.endswith(("ForCausalLM", "LMHeadModel")) or (not named and expected(config) is not None)
    if is_value_model or (says_policy and not any(name in index for name in _OUTPUT_LAYERS)):
        return value_head_config(config, labels=index[f"{head}.weight"].shape[0], bias=f"{head}.bias" in index)
    return dict(config)
