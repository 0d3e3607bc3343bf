"""Where the tensors of a model lie in a dist checkpoint (torch_dist), so that models of every kind of layers find them.

Which keys a model of Megatron asks for depends on how it was built:

    layers alike       decoder.layers.self_attention.linear_proj.weight      [layers, ...]
    of several kinds   decoder.layers.3.self_attention.linear_proj.weight    (`moe_layer_freq` is a list; or where the
                                                                             model is told `non_homogeneous_layers`)
    experts            ...mlp.experts.experts.linear_fc1.weight              [experts, ...], or [layers, experts, ...]
    norms              under one name where they are modules of their own, another where Transformer Engine fuses them

Norms therefore get both names. Beside its weights each linear layer and norm asks for an `_extra_state`, scales of
8-bit arithmetic; there are none, and None is what a model without such arithmetic keeps. Facts: megatron-core 0.16,
`transformer/transformer_block.py`, `transformer/moe/experts.py`, `transformer/utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from milepost.layouts.dcp.writer import Place
from milepost.layouts.megatron.classic import EXTRA_STATE
from milepost.mapping.megatron.names import Model, pattern_of
from milepost.mapping.megatron.spelling import DIST, spelled

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+\.")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.experts\.)\d+\.")
_ATTENTION = re.compile(r"(.+\.self_attention)\..+")
_HAS_EXTRA_STATE = re.compile(r".+\.(linear_\w+|\w*layernorm|core_attention)")
_LISTS_ITS_LAYERS = frozenset({"deepseek_v3"})
"""Families whose configs in Megatron say layer by layer which hold experts, even where all do."""


def places(names: Iterable[str], model: Model, *, alike: bool) -> dict[str, tuple[Place, ...]]:
    """Name of a tensor (`spelling.canonical`) -> where it lies; two places of a norm hold the same bytes.

    alike: whether the layers lie in one tensor; only where `layers_alike` says that they can
    """
    names = list(names)
    latent = any(".self_attention.linear_kv_up_proj." in name for name in names)
    found = {}
    for name in names:
        _, layer, expert = pattern_of(name)
        at: tuple[int, ...] = ()
        of: tuple[int, ...] = ()
        if layer is not None and alike:
            at, of = (layer,), (model.layers,)
        if expert is not None:
            at, of = (*at, expert), (*of, model.experts)
        fused = spelled(name, DIST, model.layers, is_moe=lambda _: False, latent=latent)
        keys = (fused,) if expert is not None else dict.fromkeys((fused, name))
        found[name] = tuple(Place(_key(key, alike=alike), at, of) for key in keys)
    return found


def layers_alike(names: Iterable[str], model: Model) -> bool:
    """Whether the tensors of all layers lie in one: Megatron asks for them so where layers are of one kind."""
    parts: dict[str, set[int]] = {}
    for name in names:
        layer = pattern_of(name)[1]
        if layer is not None:
            parts.setdefault(_LAYER.sub("", name), set()).add(layer)
    return model.kind not in _LISTS_ITS_LAYERS and all(len(of) == model.layers for of in parts.values())


def extra_states(found: Mapping[str, tuple[Place, ...]]) -> list[str]:
    """The keys of all `_extra_state` that a model may ask for."""
    keys: dict[str, None] = {}
    for of_name in found.values():
        for place in of_name:
            module = place.key.rpartition(".")[0]
            attention = _ATTENTION.fullmatch(place.key)
            for owner in (module, f"{attention[1]}.core_attention" if attention else ""):
                if _HAS_EXTRA_STATE.fullmatch(owner):
                    at, of = place.at or (0,), place.of or (1,)
                    keys[f"{owner}.{EXTRA_STATE}/shard_{_dotted(at)}_{_dotted(of)}"] = None
    return list(keys)


def _key(name: str, *, alike: bool) -> str:
    name = _EXPERT.sub("", name)
    return _LAYER.sub("", name) if alike else name


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
