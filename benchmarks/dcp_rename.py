"""What is written by hand where there is no merger: torch's `dcp_to_torch_save`, then a loop over the names.

    python benchmarks/dcp_rename.py CHECKPOINT OUT [bfloat16|float32]

A dist checkpoint of a dense, tied model, layers stacked, becomes a directory that transformers loads. Nothing is
checked.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, PretrainedConfig

NAMES = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


def main() -> None:
    """Convert, rename, save."""
    source, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    out.mkdir(exist_ok=True)
    one = out / "whole.pt"
    dcp_to_torch_save(source, one)
    state = torch.load(one, weights_only=False)
    config = AutoConfig.from_pretrained(source / "huggingface")
    weights = {name: value.to(dtype) for name, value in _renamed(state, config)}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(source / "huggingface", out, dirs_exist_ok=True)
    one.unlink()


def _renamed(state: dict[str, torch.Tensor], config: PretrainedConfig) -> Iterator[tuple[str, torch.Tensor]]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    for key, whole in state.items():
        bare = key.removeprefix("decoder.layers.")
        names = NAMES.get(bare)
        if names is None:  # an `_extra_state`
            continue
        for layer, value in [("", whole)] if bare == key else [(f"model.layers.{n}.", v) for n, v in enumerate(whole)]:
            if len(names) == 3:
                rows = value.view(groups, (heads // groups + 2) * size, *value.shape[1:])
                parts = [part.flatten(0, 1) for part in rows.split((heads // groups * size, size, size), 1)]
            else:
                parts = list(value.chunk(len(names)))
            yield from ((f"{layer}{name}", part.contiguous()) for name, part in zip(names, parts, strict=True))


if __name__ == "__main__":
    main()
