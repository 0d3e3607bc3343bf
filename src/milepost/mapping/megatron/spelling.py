"""The several names that Megatron's writers have for one tensor, brought to one, and back.

    what                            local layers           Transformer Engine, and most dist checkpoints
    norm before attention           input_layernorm        self_attention.linear_qkv.layer_norm_
    norm before the MLP             pre_mlp_layernorm      mlp.linear_fc1.layer_norm_          (MoE layers: as local)
    norms of latent attention       q_layernorm            linear_q_up_proj.layer_norm_
                                    kv_layernorm           linear_kv_up_proj.layer_norm_
    an expert                       local_experts.E.linear_fc1.weight    linear_fc1.weightE

Layers for multi-token prediction, `mtp.layers.N.`, become those after the last one, as Hugging Face counts them.
Source: megatron-core 0.16, `models/gpt/gpt_layer_specs.py`, `transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

LOCAL = "local"
TRANSFORMER_ENGINE = "transformer_engine"
DIST = "dist"
"""Writers: classic files of local layers, classic files of Transformer Engine's, dist checkpoints of the latter."""

_EXPERTS = r"mlp\.experts\."
_CANONICAL: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (
        re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"),
        r".self_attention.\1_layernorm.weight",
    ),
    (re.compile(rf"\.{_EXPERTS}(linear_fc[12])\.(weight|bias)(\d+)$"), r".mlp.experts.local_experts.\3.\1.\2"),
    (re.compile(rf"\.{_EXPERTS}experts\.(\d+)\."), r".mlp.experts.local_experts.\1."),
)
_FURTHER = re.compile(r"^mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?")
_FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=\.)input_layernorm\.(weight|bias)$"), r"self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"(?<=\.)pre_mlp_layernorm\.(weight|bias)$"), r"mlp.linear_fc1.layer_norm_\1"),
    (re.compile(r"(?<=\.self_attention\.)(q|kv)_layernorm\.weight$"), r"linear_\1_up_proj.layer_norm_weight"),
)
_LOCAL_EXPERT = re.compile(rf"(?<=\.){_EXPERTS}local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_PREDICTION = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")


def canonical(name: str, layers: int) -> str:
    """The one name of a tensor, whoever wrote it; `layers`: how many the model has."""
    name = _FURTHER.sub(lambda match: f"decoder.layers.{layers + int(match[1])}.", name)
    for pattern, spelling in _CANONICAL:
        name = pattern.sub(spelling, name)
    return name


def spelled(name: str, writer: str, layers: int, *, is_moe: Callable[[int], bool], latent: bool) -> str:
    """The inverse: what a writer calls a tensor.

    writer:  `LOCAL`, `TRANSFORMER_ENGINE` or `DIST`
    layers:  how many the model has
    is_moe:  whether a layer holds experts
    latent:  whether attention is multi-latent
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer = int(match[1])
    if writer != LOCAL:
        name = _fused(name, writer, is_moe=is_moe(layer), latent=latent)
    if layer < layers:
        return name
    rest = name.removeprefix(f"decoder.layers.{layer}.")
    inner = "" if rest.startswith(_OF_PREDICTION) else "transformer_layer."
    return f"mtp.layers.{layer - layers}.{inner}{rest}"


def _fused(name: str, writer: str, *, is_moe: bool, latent: bool) -> str:
    if writer == DIST:
        name = _LOCAL_EXPERT.sub(r"mlp.experts.experts.\1.\2.\3", name)
    else:
        name = _LOCAL_EXPERT.sub(r"mlp.experts.\2.\3\1", name)
    attention, mlp, norms = _FUSED
    norm, fused = norms if latent else attention
    name = norm.sub(fused, name)
    return name if is_moe else mlp[0].sub(mlp[1], name)
