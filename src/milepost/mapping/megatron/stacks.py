"""Tensors of all layers or all experts as one, as dist checkpoints hold them, taken apart and put together.

decoder.layers.self_attention.linear_proj.weight             [layers, ...]
decoder.layers.mlp.experts.experts.linear_fc1.weight         [layers, experts, ...]
decoder.layers.3.mlp.experts.experts.linear_fc1.weight       [experts, ...]     where layers differ in kind
decoder.layers.3.mlp.linear_fc1.weight_w, ...weight_v        upper and lower half (singleton_local_shards)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from milepost.edits import concat, stack, unstack
from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorEntry

_LAYERS = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.experts\.)(linear_fc[12]\..+)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.experts\.)(\d+)\.(linear_fc[12]\..+)")
_HALVES = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
_UPPER, _LOWER = "w", "v"


def unstacked(entries: Mapping[str, TensorEntry], layers: int, experts: int) -> dict[str, TensorEntry]:
    """A tensor a layer and an expert; what is no stack stays as it is.

    Raises MismatchError where a stack does not have as many layers or experts as the config says, IncompleteError where
    of two halves one is missing.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        match = _LAYERS.fullmatch(name)
        if match is None:
            found[name] = entry
        else:
            for layer, part in enumerate(_slices(name, entry, layers, "layers")):
                found[f"decoder.layers.{layer}.{match[1]}"] = part
    apart: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            apart[name] = entry
        else:
            for expert, part in enumerate(_slices(name, entry, experts, "experts")):
                apart[f"{match[1]}{expert}.{match[2]}"] = part
    return _whole(apart)


def stacked(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The inverse: all layers of a tensor as one, in each all experts as one. Tensors that not every layer has stay
    layer by layer, and then all do, as Megatron does where layers differ in kind."""
    experts: dict[str, dict[int, TensorEntry]] = {}
    single: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            single[name] = entry
        else:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = entry
    single |= {name: stack([parts[n] for n in sorted(parts)]) for name, parts in experts.items()}
    layers: dict[str, dict[int, TensorEntry]] = {}
    for name, entry in single.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(match[1] + match[3], {})[int(match[2])] = entry
    if len({frozenset(parts) for parts in layers.values()}) > 1:
        return single
    alike = {name: stack([parts[n] for n in sorted(parts)]) for name, parts in layers.items()}
    return {name: entry for name, entry in single.items() if _LAYER.fullmatch(name) is None} | alike


def _slices(name: str, entry: TensorEntry, count: int, what: str) -> list[TensorEntry]:
    if not entry.shape:  # the count of an optimizer's steps, one number for all of them
        return [entry] * count
    if entry.shape[0] != count:
        raise MismatchError(
            f"{name} has shape {list(entry.shape)}, a tensor for all {what} as one; config.json has {count} {what}"
        )
    return unstack(entry)


def _whole(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Upper and lower halves as one."""
    whole: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        match = _HALVES.fullmatch(name)
        if match is None:
            whole[name] = entry
            continue
        other = f"{match[1]}_{_LOWER if match[2] == _UPPER else _UPPER}"
        if other not in entries:
            raise IncompleteError(f"{name} is there and {other} is not, which is the other half of {match[1]}")
        if match[2] == _UPPER:
            whole[match[1]] = concat([entry, entries[other]], 0) if entry.shape else entry
    return whole
