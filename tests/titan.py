"""A model with torchtitan's own names for tests: its Llama in plain torch, and its state as torchtitan saves it.

What is written here follows torchtitan's model and its checkpointer, not milepost: RoPE multiplies pairs of neighbours
as complex numbers, and rows go from Hugging Face's order to torchtitan's by the formula of its adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

WIDTH, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCABULARY = 32, 4, 2, 2, 40, 33
HEAD = WIDTH // HEADS
THETA, EPSILON = 10000.0, 1e-6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}


def native_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of the Llama, under the names of 2025."""
    torch.manual_seed(seed)
    shapes = {"tok_embeddings.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (HEADS * HEAD, WIDTH),
            f"layers.{layer}.attention.wk.weight": (KV_HEADS * HEAD, WIDTH),
            f"layers.{layer}.attention.wv.weight": (KV_HEADS * HEAD, WIDTH),
            f"layers.{layer}.attention.wo.weight": (WIDTH, HEADS * HEAD),
            f"layers.{layer}.feed_forward.w1.weight": (HIDDEN, WIDTH),
            f"layers.{layer}.feed_forward.w2.weight": (WIDTH, HIDDEN),
            f"layers.{layer}.feed_forward.w3.weight": (HIDDEN, WIDTH),
            f"layers.{layer}.attention_norm.weight": (WIDTH,),
            f"layers.{layer}.ffn_norm.weight": (WIDTH,),
        }
    shapes |= {"norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)}
    return {name: torch.randn(shape) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()}


def logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The forward pass of torchtitan's Llama: tokens [batch, time] -> logits [batch, time, vocabulary]."""
    batch, time = tokens.shape
    angles = torch.outer(torch.arange(time).float(), THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD))
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)

    h = weights["tok_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        w = {n.removeprefix(f"layers.{layer}."): v for n, v in weights.items() if n.startswith(f"layers.{layer}.")}
        x = norm(h, w["attention_norm.weight"])
        q, k, v = (
            (x @ w[f"attention.w{letter}.weight"].T).view(batch, time, heads, HEAD)
            for letter, heads in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
        )
        q, k = turned(q), turned(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).flatten(-2) @ w["attention.wo.weight"].T
        x = norm(h, w["ffn_norm.weight"])
        gate = torch.nn.functional.silu(x @ w["feed_forward.w1.weight"].T)
        h = h + (gate * (x @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    return norm(h, weights["norm.weight"]) @ weights["output.weight"].T


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Hugging Face's rows of q or k in torchtitan's order: the adapter's formula."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """q, k and v as the one tensor `wqkv`: group by group its queries, its key, its value."""
    tail = q.shape[1:]
    size = k.shape[0] // groups
    return torch.cat([x.reshape(groups, -1, size, *tail) for x in (q, k, v)], 1).reshape(-1, *tail)


def save_step(folder: Path, weights: dict[str, Any], moments: dict[str, Any] | None = None, **others: Any) -> None:
    """A step of torchtitan: weights beside a flattened optimizer, scheduler, data loader and counters.

    moments: {"exp_avg": {weight: tensor}, ...}
    """
    state: dict[str, Any] = {f"state.{n}.{kind}": v for kind, of in (moments or {}).items() for n, v in of.items()}
    state |= {f"param_groups.{name}.lr": 0.01 for name in (moments or {"": {}}).get("exp_avg", {})}
    parts = {
        "optimizer": state,
        "lr_scheduler": {"last_epoch": 7, "_step_count": 8},
        "dataloader": {"dp_rank_0": b"state", "world_size": 1, "buffer": torch.arange(5)},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(99), "losses": b"x"},
    }
    dcp.save({**weights, **(parts if moments else {}), **others}, checkpoint_id=folder, no_dist=not _distributed())


def _distributed() -> bool:
    return torch.distributed.is_initialized()
