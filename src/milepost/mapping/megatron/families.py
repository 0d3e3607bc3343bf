"""The model families whose Megatron form is known, one after the other, as rules in the sense of `megatron.rules`.

Names of Megatron: the unfused spelling of megatron-core's own layers (`megatron.spelling` knows the others). Sources:
megatron-core 0.16 (`models/gpt`, `transformer/`), verl's and slime's converters; the tests compare logits and weights
with models that megatron-core builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from milepost.mapping.megatron.rules import (
    COLUMNS,
    COLUMNS_OR_WHOLE,
    REPLICATED,
    ROWS,
    ROWS_OR_WHOLE,
    Gated,
    Padded,
    QueryGroups,
    Rule,
    Same,
    one,
)

_HERE, _THERE = "decoder.layers.{layer}", "model.layers.{layer}"
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), Padded("vocab_size"), ROWS)
VALUE_HEAD: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for kind in ("weight", "bias")
        for rule in one(f"output_layer.{kind}", f"score.{kind}", REPLICATED)
    }
)
"""What a value model has in the place of the output layer: one row, which every rank holds."""

_ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Padded("vocab_size"), ROWS),
    *one("decoder.final_layernorm.weight", "model.norm.weight", REPLICATED),
    OUTPUT,
)
_FRAME = (
    *_ENDS,
    *one(f"{_HERE}.input_layernorm.weight", f"{_THERE}.input_layernorm.weight", REPLICATED),
    *one(f"{_HERE}.pre_mlp_layernorm.weight", f"{_THERE}.post_attention_layernorm.weight", REPLICATED),
)


def _attention() -> tuple[Rule, ...]:
    here, there = f"{_HERE}.self_attention", f"{_THERE}.self_attn"
    return (
        *(
            Rule(
                f"{here}.linear_qkv.{kind}",
                tuple(f"{there}.{part}_proj.{kind}" for part in "qkv"),
                QueryGroups(),
                ROWS,
            )
            for kind in ("weight", "bias")
        ),
        *one(f"{here}.linear_proj.weight", f"{there}.o_proj.weight", COLUMNS),
        *one(f"{here}.linear_proj.bias", f"{there}.o_proj.bias", REPLICATED),
        *one(f"{here}.q_layernorm.weight", f"{there}.q_norm.weight", REPLICATED),
        *one(f"{here}.k_layernorm.weight", f"{there}.k_norm.weight", REPLICATED),
    )


def _latent_attention() -> tuple[Rule, ...]:
    """Multi-latent attention. The projections down are cut or not, as the writer's linear layers are."""
    here, there = f"{_HERE}.self_attention", f"{_THERE}.self_attn"
    down = [
        Rule(f"{here}.{mine}.{kind}", (f"{there}.{theirs}.{kind}",), Same(), ROWS_OR_WHOLE)
        for mine, theirs in (("linear_q_down_proj", "q_a_proj"), ("linear_kv_down_proj", "kv_a_proj_with_mqa"))
        for kind in ("weight", "bias")
    ]
    return (
        *one(f"{here}.linear_q_proj.weight", f"{there}.q_proj.weight", ROWS),
        *down,
        *one(f"{here}.q_layernorm.weight", f"{there}.q_a_layernorm.weight", REPLICATED),
        *one(f"{here}.linear_q_up_proj.weight", f"{there}.q_b_proj.weight", ROWS),
        *one(f"{here}.kv_layernorm.weight", f"{there}.kv_a_layernorm.weight", REPLICATED),
        *one(f"{here}.linear_kv_up_proj.weight", f"{there}.kv_b_proj.weight", ROWS),
        *one(f"{here}.linear_proj.weight", f"{there}.o_proj.weight", COLUMNS),
        *one(f"{here}.linear_proj.bias", f"{there}.o_proj.bias", REPLICATED),
    )


def _mlp(here: str = "mlp", there: str = "mlp") -> tuple[Rule, ...]:
    here, there = f"{_HERE}.{here}", f"{_THERE}.{there}"
    return (
        *(
            Rule(f"{here}.linear_fc1.{kind}", (f"{there}.gate_proj.{kind}", f"{there}.up_proj.{kind}"), Gated(), ROWS)
            for kind in ("weight", "bias")
        ),
        *one(f"{here}.linear_fc2.weight", f"{there}.down_proj.weight", COLUMNS),
        *one(f"{here}.linear_fc2.bias", f"{there}.down_proj.bias", REPLICATED),
    )


def _experts(
    there: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Router and experts. Expert tensor parallelism is a size of its own, often 1 where the rest is cut."""
    here, there = f"{_HERE}.mlp", f"{_THERE}.{there}"
    mine, theirs = f"{here}.experts.local_experts.{{expert}}", f"{there}.experts.{{expert}}"
    return (
        *one(f"{here}.router.weight", f"{there}.gate.weight", REPLICATED),
        *one(f"{here}.router.expert_bias", f"{there}.gate.e_score_correction_bias", REPLICATED),
        Rule(f"{mine}.linear_fc1.weight", (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"), Gated(), ROWS_OR_WHOLE),
        *one(f"{mine}.linear_fc2.weight", f"{theirs}.{down}.weight", COLUMNS_OR_WHOLE),
    )


def _further_tokens() -> tuple[Rule, ...]:
    """Multi-token prediction, as layers after the last one; see `megatron.spelling`."""
    return (
        *one(f"{_HERE}.enorm.weight", f"{_THERE}.enorm.weight", REPLICATED),
        *one(f"{_HERE}.hnorm.weight", f"{_THERE}.hnorm.weight", REPLICATED),
        *one(f"{_HERE}.eh_proj.weight", f"{_THERE}.eh_proj.weight", ROWS),
        *one(f"{_HERE}.final_layernorm.weight", f"{_THERE}.shared_head.norm.weight", REPLICATED),
    )


def _norms_around() -> tuple[Rule, ...]:
    """Norms before and after attention and MLP. Those after belong to the linear layers that they follow (source:
    Megatron-Bridge, `models/gemma`; megatron-core itself has none)."""
    here, there = _HERE, _THERE
    after = "post_layernorm.weight"
    return (
        *one(f"{here}.input_layernorm.weight", f"{there}.input_layernorm.weight", REPLICATED),
        *one(f"{here}.self_attention.linear_proj.{after}", f"{there}.post_attention_layernorm.weight", REPLICATED),
        *one(f"{here}.pre_mlp_layernorm.weight", f"{there}.pre_feedforward_layernorm.weight", REPLICATED),
        *one(f"{here}.mlp.linear_fc2.{after}", f"{there}.post_feedforward_layernorm.weight", REPLICATED),
    )


DENSE = (*_FRAME, *_attention(), *_mlp())
GEMMA2 = (*_ENDS, *_norms_around(), *_attention(), *_mlp())
MIXTRAL = (*_FRAME, *_attention(), *_experts("block_sparse_moe", gate="w1", up="w3", down="w2"))
QWEN3_MOE = (*DENSE, *_experts())
QWEN2_MOE = (
    *QWEN3_MOE,
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    *one(f"{_HERE}.mlp.shared_experts.gate_weight", f"{_THERE}.mlp.shared_expert_gate.weight", REPLICATED),
)
DEEPSEEK_V3 = (
    *_FRAME,
    *_latent_attention(),
    *_mlp(),
    *_experts(),
    *_mlp("mlp.shared_experts", "mlp.shared_experts"),
    *_further_tokens(),
)

RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "llama": DENSE,
        "mistral": DENSE,
        "qwen2": DENSE,
        "qwen3": DENSE,
        "gemma": DENSE,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA2,
        "mixtral": MIXTRAL,
        "qwen2_moe": QWEN2_MOE,
        "qwen3_moe": QWEN3_MOE,
        "deepseek_v3": DEEPSEEK_V3,
    }
)
"""`model_type` of config.json -> its tensors in Megatron."""

ZERO_CENTRED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose norms multiply by 1 + weight, in Hugging Face's files as in a Megatron model with
`layernorm_zero_centered_gamma` (`--apply-layernorm-1p`)."""
