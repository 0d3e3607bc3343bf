"""Tiny models for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tiny_qwen2(directory: Path, *, tied: bool = False, seed: int = 0, **settings: Any) -> Path:
    """Save a random Qwen2 with 33 tokens, width 16 and 2 layers; 33 divides by no world size above 1."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        **settings,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    # Biases and norms of a new model are all 0 and 1: give them values that a mixed-up order would betray.
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    weights = {n: w + 0.1 * torch.randn(w.shape) if w.dim() == 1 else w for n, w in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "repetition_penalty": 1.5}))
    return directory
