"""Tiny models of every family, built and saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from milepost.index import TensorIndex
from milepost.layouts.huggingface import read_safetensors

BUILDERS = {
    "causal-lm": AutoModelForCausalLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "base": AutoModel,
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SPARSE = {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
LATENT = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 6,
    "first_k_dense_replace": 1,
}
# family -> what its tiny config needs beyond TINY, and the variations that change names or shapes
VARIATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        {},
        [
            {"tie_word_embeddings": True},
            {"attention_bias": True, "mlp_bias": True},
            {"head_dim": 8},
            {"num_key_value_heads": None},
        ],
    ),
    "mistral": ({}, [{"head_dim": 8}, {"tie_word_embeddings": True}]),
    "qwen2": ({}, [{"tie_word_embeddings": True}, {"head_dim": 8}]),
    "qwen3": ({}, [{"head_dim": 8, "attention_bias": True}, {"tie_word_embeddings": True}]),
    "gemma": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "gemma2": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "gemma3_text": ({"head_dim": 8}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "phi3": ({}, [{"num_key_value_heads": None}, {"tie_word_embeddings": True}]),
    "olmo2": ({}, [{"attention_bias": True}, {"tie_word_embeddings": True}]),
    "gpt_neox": ({}, [{"attention_bias": False}, {"tie_word_embeddings": True}]),
    "mixtral": ({"num_local_experts": 3}, [{"head_dim": 8}, {"tie_word_embeddings": True}, {"num_local_experts": 1}]),
    "qwen2_moe": (
        SPARSE,
        [{"qkv_bias": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"tie_word_embeddings": True}],
    ),
    "qwen3_moe": (
        SPARSE,
        [{"head_dim": 8, "attention_bias": True}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}],
    ),
    "deepseek_v3": (
        LATENT,
        [{"q_lora_rank": None}, {"attention_bias": True}, {"n_shared_experts": 2}, {"first_k_dense_replace": 0}],
    ),
}


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    return {**TINY, **VARIATIONS[family][0], **changes}


def build(family: str, head: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    config = AutoConfig.for_model(family, **settings)
    return BUILDERS[head].from_config(config)


def save(model: transformers.PreTrainedModel, directory: Path) -> tuple[dict[str, Any], TensorIndex]:
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    return config, TensorIndex(read_safetensors(directory / "model.safetensors"), "huggingface")
