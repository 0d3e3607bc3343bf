"""The model families that milepost knows, one after the other, as rules in the sense of `milepost.mapping.rules`.

Names are those that transformers' `save_pretrained` writes. Source: the modeling_*.py, configuration_*.py and the
weight conversions of transformers 5.24; the tests build every family there and compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from milepost.errors import MismatchError
from milepost.mapping.rules import (
    BASE,
    CAUSAL_LM,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    Family,
    MemoryRule,
    Rule,
    Settings,
    in_layers,
    linear,
    number,
    tensor,
)

LAYER = "model.layers.{layer}"


def _heads(stem: str) -> dict[str, str]:
    return {
        CAUSAL_LM: f"{stem}ForCausalLM",
        SEQUENCE_CLASSIFICATION: f"{stem}ForSequenceClassification",
        TOKEN_CLASSIFICATION: f"{stem}ForTokenClassification",
        BASE: f"{stem}Model",
    }


# What most families share

EMBEDDING_AND_NORM = (
    *tensor("model.embed_tokens.weight", "vocab_size", "hidden_size"),
    *tensor("model.norm.weight", "hidden_size"),
)
NORMS = (
    *tensor(f"{LAYER}.input_layernorm.weight", "hidden_size"),
    *tensor(f"{LAYER}.post_attention_layernorm.weight", "hidden_size"),
)
FEEDFORWARD_NORMS = (
    *tensor(f"{LAYER}.pre_feedforward_layernorm.weight", "hidden_size"),
    *tensor(f"{LAYER}.post_feedforward_layernorm.weight", "hidden_size"),
)
HEAD_NORMS = (
    *tensor(f"{LAYER}.self_attn.q_norm.weight", "head_dim"),
    *tensor(f"{LAYER}.self_attn.k_norm.weight", "head_dim"),
)


def _attention(bias: bool | str = False, output_bias: bool | str = False) -> tuple[Rule, ...]:
    return (
        *linear(f"{LAYER}.self_attn.q_proj", "num_attention_heads*head_dim", "hidden_size", bias),
        *linear(f"{LAYER}.self_attn.k_proj", "num_key_value_heads*head_dim", "hidden_size", bias),
        *linear(f"{LAYER}.self_attn.v_proj", "num_key_value_heads*head_dim", "hidden_size", bias),
        *linear(f"{LAYER}.self_attn.o_proj", "hidden_size", "num_attention_heads*head_dim", output_bias),
    )


def _mlp(name: str = "mlp", width: str = "intermediate_size", bias: bool | str = False) -> tuple[Rule, ...]:
    return (
        *linear(f"{LAYER}.{name}.gate_proj", width, "hidden_size", bias),
        *linear(f"{LAYER}.{name}.up_proj", width, "hidden_size", bias),
        *linear(f"{LAYER}.{name}.down_proj", "hidden_size", width, bias),
    )


def _stacked(saved: str, gate: str, up: str, down: str) -> tuple[MemoryRule, ...]:
    """Experts in memory: gate_up_proj [experts, 2*width, hidden_size], down_proj [experts, hidden_size, width]."""
    expert = f"{LAYER}.{saved}.experts.{{expert}}"
    return (
        MemoryRule(
            f"{LAYER}.mlp.experts.gate_up_proj", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), layers="moe"
        ),
        MemoryRule(f"{LAYER}.mlp.experts.down_proj", (f"{expert}.{down}.weight",), layers="moe"),
    )


# Dense families

LLAMA = Family(
    heads=_heads("Llama"),
    defaults={"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention("attention_bias", "attention_bias"), *_mlp(bias="mlp_bias")),
)

MISTRAL = Family(
    heads=_heads("Mistral"),
    defaults={"num_key_value_heads": 8},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention(), *_mlp()),
)

QWEN2 = Family(
    heads=_heads("Qwen2"),
    defaults={"num_key_value_heads": 32},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention(bias=True), *_mlp()),
)

QWEN3 = Family(
    heads=_heads("Qwen3"),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention("attention_bias", "attention_bias"), *HEAD_NORMS, *_mlp()),
)

GEMMA = Family(
    heads=_heads("Gemma"),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention("attention_bias", "attention_bias"), *_mlp()),
)

GEMMA2 = Family(
    heads=_heads("Gemma2"),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False},
    rules=(*GEMMA.rules, *FEEDFORWARD_NORMS),
)

GEMMA3_TEXT = Family(
    heads={
        CAUSAL_LM: "Gemma3ForCausalLM",
        SEQUENCE_CLASSIFICATION: "Gemma3TextForSequenceClassification",
        BASE: "Gemma3TextModel",
    },
    defaults=GEMMA2.defaults,
    rules=(*GEMMA2.rules, *HEAD_NORMS),
)

PHI3 = Family(
    heads=_heads("Phi3"),
    defaults={"num_key_value_heads": None},
    rules=(
        *EMBEDDING_AND_NORM,
        *NORMS,
        *linear(
            f"{LAYER}.self_attn.qkv_proj",
            "num_attention_heads*head_dim + 2*num_key_value_heads*head_dim",
            "hidden_size",
        ),
        *linear(f"{LAYER}.self_attn.o_proj", "hidden_size", "num_attention_heads*head_dim"),
        *linear(f"{LAYER}.mlp.gate_up_proj", "2*intermediate_size", "hidden_size"),
        *linear(f"{LAYER}.mlp.down_proj", "hidden_size", "intermediate_size"),
    ),
)

OLMO2 = Family(
    heads={
        CAUSAL_LM: "Olmo2ForCausalLM",
        SEQUENCE_CLASSIFICATION: "Olmo2ForSequenceClassification",
        BASE: "Olmo2Model",
    },
    defaults={"num_key_value_heads": None, "attention_bias": False},
    rules=(
        *EMBEDDING_AND_NORM,
        *tensor(f"{LAYER}.post_attention_layernorm.weight", "hidden_size"),
        *tensor(f"{LAYER}.post_feedforward_layernorm.weight", "hidden_size"),
        *_attention("attention_bias", "attention_bias"),
        *tensor(f"{LAYER}.self_attn.q_norm.weight", "num_attention_heads*head_dim"),
        *tensor(f"{LAYER}.self_attn.k_norm.weight", "num_key_value_heads*head_dim"),
        *_mlp(),
    ),
)

_NEOX = "gpt_neox.layers.{layer}"
GPT_NEOX = Family(
    heads=_heads("GPTNeoX"),
    defaults={"attention_bias": True},
    rules=(
        *tensor("gpt_neox.embed_in.weight", "vocab_size", "hidden_size"),
        *tensor("gpt_neox.final_layer_norm.weight", "hidden_size"),
        *tensor("gpt_neox.final_layer_norm.bias", "hidden_size"),
        *tensor(f"{_NEOX}.input_layernorm.weight", "hidden_size"),
        *tensor(f"{_NEOX}.input_layernorm.bias", "hidden_size"),
        *tensor(f"{_NEOX}.post_attention_layernorm.weight", "hidden_size"),
        *tensor(f"{_NEOX}.post_attention_layernorm.bias", "hidden_size"),
        *linear(f"{_NEOX}.attention.query_key_value", "3*hidden_size", "hidden_size", "attention_bias"),
        *linear(f"{_NEOX}.attention.dense", "hidden_size", "hidden_size", "attention_bias"),
        *linear(f"{_NEOX}.mlp.dense_h_to_4h", "intermediate_size", "hidden_size", bias=True),
        *linear(f"{_NEOX}.mlp.dense_4h_to_h", "hidden_size", "intermediate_size", bias=True),
    ),
    output=("embed_out.weight", "gpt_neox.embed_in.weight"),
    token_head=linear("classifier", "num_labels", "hidden_size", bias=True),
    memory=(MemoryRule("lm_head.weight", ("embed_out.weight",)),),
    base="gpt_neox",
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
)


# Families with experts


def _every_layer(settings: Settings, layer: int) -> bool:
    return True


def _every_nth_layer(settings: Settings, layer: int) -> bool:
    dense = settings["mlp_only_layers"] or ()
    if not isinstance(dense, list | tuple):
        raise MismatchError(f"config.json says {dense!r:.40} for mlp_only_layers, which is to be a list of layers")
    if not settings["num_experts"] or layer in dense:
        return False
    return (layer + 1) % number(settings, "decoder_sparse_step", 1) == 0


def _after_the_first(settings: Settings, layer: int) -> bool:
    return layer >= number(settings, "first_k_dense_replace")


MIXTRAL = Family(
    heads=_heads("Mixtral"),
    defaults={"num_key_value_heads": 8},
    rules=(
        *EMBEDDING_AND_NORM,
        *NORMS,
        *_attention(),
        *linear(f"{LAYER}.block_sparse_moe.gate", "num_local_experts", "hidden_size"),
        *linear(f"{LAYER}.block_sparse_moe.experts.{{expert}}.w1", "intermediate_size", "hidden_size"),
        *linear(f"{LAYER}.block_sparse_moe.experts.{{expert}}.w2", "hidden_size", "intermediate_size"),
        *linear(f"{LAYER}.block_sparse_moe.experts.{{expert}}.w3", "intermediate_size", "hidden_size"),
    ),
    is_moe=_every_layer,
    experts="num_local_experts",
    synonyms={"num_experts": "num_local_experts"},
    memory=(
        *_stacked("block_sparse_moe", gate="w1", up="w3", down="w2"),
        MemoryRule(f"{LAYER}.mlp.gate.weight", (f"{LAYER}.block_sparse_moe.gate.weight",)),
    ),
)

# `mlp_only_layers` came later than the first configs of these two
_SPARSE_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_SPARSE_MLP = (
    *in_layers("dense", *_mlp()),
    *in_layers(
        "moe",
        *linear(f"{LAYER}.mlp.gate", "num_experts", "hidden_size"),
        *_mlp("mlp.experts.{expert}", "moe_intermediate_size"),
    ),
)

QWEN2_MOE = Family(
    heads=_heads("Qwen2Moe"),
    defaults={"num_key_value_heads": 16, "qkv_bias": True, **_SPARSE_DEFAULTS},
    rules=(
        *EMBEDDING_AND_NORM,
        *NORMS,
        *_attention(bias="qkv_bias"),
        *_SPARSE_MLP,
        *in_layers(
            "moe",
            *_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
            *linear(f"{LAYER}.mlp.shared_expert_gate", "1", "hidden_size"),
        ),
    ),
    is_moe=_every_nth_layer,
    experts="num_experts",
    synonyms={"num_local_experts": "num_experts"},
    memory=_stacked("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)

QWEN3_MOE = Family(
    heads=_heads("Qwen3Moe"),
    defaults={"num_key_value_heads": 4, "attention_bias": False, **_SPARSE_DEFAULTS},
    rules=(*EMBEDDING_AND_NORM, *NORMS, *_attention("attention_bias", "attention_bias"), *HEAD_NORMS, *_SPARSE_MLP),
    is_moe=_every_nth_layer,
    experts="num_experts",
    synonyms={"num_local_experts": "num_experts"},
    memory=_stacked("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)

_QUERY_ROWS = "num_attention_heads*qk_nope_head_dim + num_attention_heads*qk_rope_head_dim"
DEEPSEEK_V3 = Family(
    heads=_heads("DeepseekV3"),
    defaults={"q_lora_rank": 1536, "attention_bias": False, "n_shared_experts": 1, "first_k_dense_replace": 3},
    rules=(
        *EMBEDDING_AND_NORM,
        *NORMS,
        Rule(f"{LAYER}.self_attn.q_proj.weight", (_QUERY_ROWS, "hidden_size"), when="not q_lora_rank"),
        Rule(f"{LAYER}.self_attn.q_a_proj.weight", ("q_lora_rank", "hidden_size"), when="q_lora_rank"),
        Rule(f"{LAYER}.self_attn.q_a_proj.bias", ("q_lora_rank",), when="q_lora_rank and attention_bias"),
        Rule(f"{LAYER}.self_attn.q_a_layernorm.weight", ("q_lora_rank",), when="q_lora_rank"),
        Rule(f"{LAYER}.self_attn.q_b_proj.weight", (_QUERY_ROWS, "q_lora_rank"), when="q_lora_rank"),
        *linear(
            f"{LAYER}.self_attn.kv_a_proj_with_mqa", "kv_lora_rank + qk_rope_head_dim", "hidden_size", "attention_bias"
        ),
        *tensor(f"{LAYER}.self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
        *linear(
            f"{LAYER}.self_attn.kv_b_proj",
            "num_attention_heads*qk_nope_head_dim + num_attention_heads*v_head_dim",
            "kv_lora_rank",
        ),
        *linear(f"{LAYER}.self_attn.o_proj", "hidden_size", "num_attention_heads*v_head_dim", "attention_bias"),
        *in_layers("dense", *_mlp()),
        *in_layers(
            "moe",
            *linear(f"{LAYER}.mlp.gate", "n_routed_experts", "hidden_size"),
            *tensor(f"{LAYER}.mlp.gate.e_score_correction_bias", "n_routed_experts"),
            *_mlp("mlp.experts.{expert}", "moe_intermediate_size"),
            *_mlp("mlp.shared_experts", "moe_intermediate_size*n_shared_experts"),
        ),
    ),
    is_moe=_after_the_first,
    experts="n_routed_experts",
    synonyms={"num_local_experts": "n_routed_experts"},
    memory=_stacked("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    # the layer after the last one is the multi-token prediction module, which transformers does not build
    ignored=("*.rotary_emb.inv_freq", "model.layers.{num_hidden_layers}.*"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma": GEMMA,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3_TEXT,
        "phi3": PHI3,
        "olmo2": OLMO2,
        "gpt_neox": GPT_NEOX,
        "mixtral": MIXTRAL,
        "qwen2_moe": QWEN2_MOE,
        "qwen3_moe": QWEN3_MOE,
        "deepseek_v3": DEEPSEEK_V3,
    }
)
"""`model_type` of config.json -> family."""
