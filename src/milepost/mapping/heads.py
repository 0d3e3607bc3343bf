"""Making config.json true to a value model."""

from __future__ import annotations

import re
from typing import Any

from milepost.errors import MismatchError
from milepost.index import TensorIndex
from milepost.mapping.architectures import Config, expected
from milepost.mapping.families import FAMILIES
from milepost.mapping.rules import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION

_HEAD_SUFFIX = re.compile(r"(LMHeadModel|Model|For[A-Z]\w*)$")
_VALUE_HEADS = ("score", "classifier")
_SUFFIXES = {
    TOKEN_CLASSIFICATION: "ForTokenClassification",
    SEQUENCE_CLASSIFICATION: "ForSequenceClassification",
}
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")


def value_head_config(
    config: Config, labels: int = 1, bias: bool = True, head: str = TOKEN_CLASSIFICATION
) -> dict[str, Any]:
    """What config.json must say of a value model: token classification with one label, a value for every token; or
    sequence classification, whose head is the same matrix and never has a bias.

    Without a bias in the head, `token_classification_bias` says so to those versions of transformers that know the key;
    others add a bias of zero.

    Raises MismatchError where transformers has no such class for the family, or config.json names no class at all.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is not None:
        name = family.heads.get(head)
        if name is None:
            raise MismatchError(
                f"transformers has no {head.replace('-', ' ')} class for {config['model_type']}, so a value model of "
                "this family has no Hugging Face form"
            )
    elif config.get("architectures"):
        name = _HEAD_SUFFIX.sub("", config["architectures"][0]) + _SUFFIXES[head]
    else:
        raise MismatchError('config.json names no class; add "architectures" to it, e.g. ["LlamaForCausalLM"]')
    names = [f"LABEL_{label}" for label in range(labels)]
    return {
        **config,
        "architectures": [name],
        "num_labels": labels,
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
        **({} if bias or head != TOKEN_CLASSIFICATION else {"token_classification_bias": False}),
    }


def infer_head(
    index: TensorIndex, config: Config, is_value_model: bool = False, value_head: str = TOKEN_CLASSIFICATION
) -> dict[str, Any]:
    """The config made true to the head that is there.

    Trainers save critics under the policy's config.json, which says ForCausalLM, while the files hold a value head
    (`score.weight`, in some families `classifier.weight`) and no output layer. `is_value_model` insists on that head.

    index:       with wrappers stripped
    value_head:  what the head of a value model is, where config.json does not name its class: one for every token, or
                 (without a bias only) one for the sequence
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
        bias = f"{head}.bias" in index
        kind = TOKEN_CLASSIFICATION if bias else value_head
        return value_head_config(config, labels=index[f"{head}.weight"].shape[0], bias=bias, head=kind)
    return dict(config)
