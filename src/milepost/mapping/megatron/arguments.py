"""What a Megatron checkpoint says of itself, against the config.json that its tensors are read by.

Megatron-LM keeps the arguments of its run beside the weights. Some of them decide what a weight means and leave no mark
on its shape: how many heads the rows of queries, keys and values belong to, whether norms multiply by their weight or
by 1 + weight. So they are compared where they are there; other trainers keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.errors import MismatchError, RefusedError
from milepost.index import TensorIndex
from milepost.mapping.megatron.families import ZERO_CENTRED
from milepost.mapping.rules import Settings

_SIZES = (
    ("num_layers", "num_hidden_layers", "layers"),
    ("hidden_size", "hidden_size", "columns of hidden states"),
    ("num_attention_heads", "num_attention_heads", "attention heads"),
)
_OF_HEADS = (
    ("num_query_groups", "num_key_value_heads", "key/value heads"),
    ("kv_channels", "head_dim", "rows a head"),
)
"""Argument, config key, in words. The second ones mean nothing in latent attention."""


def check_arguments(index: TensorIndex, kind: str, settings: Settings) -> list[str]:
    """Raise MismatchError where the arguments of the run are those of another model than the config's.

    kind:      `model_type`
    settings:  the config with its defaults

    Returns what a user should hear: arguments that are there and could not be read.
    """
    try:
        arguments = _arguments(index)
    except RefusedError as error:
        return [f"the arguments of the run were not compared with config.json: {error}"]
    if arguments:
        _compare(arguments, kind, settings)
    return []


def _compare(arguments: Mapping[str, Any], kind: str, settings: Settings) -> None:
    sizes = _SIZES if arguments.get("multi_latent_attention") or "kv_lora_rank" in settings else (*_SIZES, *_OF_HEADS)
    for name, key, words in sizes:
        there = arguments.get(name)
        if name == "num_query_groups" and not arguments.get("group_query_attention", True):
            there = arguments.get("num_attention_heads")
        if isinstance(there, int) and there != settings[key]:
            raise MismatchError(
                f"the arguments saved in the checkpoint speak of {there} {words}, config.json of {settings[key]}"
            )
    centred = arguments.get("apply_layernorm_1p")
    if isinstance(centred, bool) and centred != (kind in ZERO_CENTRED):
        on, ours, theirs = ("on", "1 + weight", "weight") if centred else ("off", "weight", "1 + weight")
        raise MismatchError(
            f"norms in the checkpoint multiply by {ours} (--apply-layernorm-1p is {on}), those of a {kind} by "
            f"{theirs}; milepost moves weights and does not change them"
        )
    if arguments.get("rotary_interleaved"):
        raise MismatchError(
            "queries and keys in the checkpoint are turned pair by pair (--rotary-interleaved), those of a Hugging "
            f"Face {kind} half by half; milepost moves weights and does not change them"
        )


def _arguments(index: TensorIndex) -> Mapping[str, Any]:
    """Of classic files, or in the part of a dist checkpoint that all ranks have in common."""
    found = index.objects.get("args")
    if found is None and "common" in index.objects:
        common = index.objects["common"]
        found = common.get("args") if isinstance(common, Mapping) else None
    return found if isinstance(found, Mapping) else {}
