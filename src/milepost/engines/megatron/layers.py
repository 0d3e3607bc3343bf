"""What Megatron's own layers lack where there is neither Transformer Engine nor Apex: norms under sequence parallelism,
a critic's head, sliding windows; and the way to switch sequence parallelism off for a while.

Under sequence parallelism each tensor-parallel rank holds another part of the sequence between the matrices. Weights
that are used there (norms, routers, the critic's head) see a part of the tokens only; Megatron marks them with an
attribute `sequence_parallel`, and their gradients are summed over the tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from milepost.mapping import Config

Windows = Sequence[int | None]
"""For each layer of the model how many tokens a query sees, its own among them; None: all before it."""


class Norm(nn.RMSNorm):
    """The norm of all places. Megatron's wrapper of it refuses sequence parallelism, of which it need only know that
    its weight sees a part of the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config.sequence_parallel)


class ValueHead(nn.Linear):
    """The critic's head in the place of the output layer, in whose form it answers: (values, no bias apart)."""

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias=bias, dtype=config.params_dtype)
        self.sequence_parallel: bool = config.sequence_parallel
        _mark(self, config.sequence_parallel)

    def forward(self, input: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """Values [S, B, 1] of hidden states [S, B, H], or of this rank's part of them."""
        values = super().forward(input).float()
        if self.sequence_parallel:
            # Every rank goes on with all values and computes the same loss, so each keeps the gradient of its part.
            gather = importlib.import_module("megatron.core.tensor_parallel").gather_from_sequence_parallel_region
            values = gather(values, tensor_parallel_output_grad=False)
        return values, None


def _mark(module: nn.Module, sequence_parallel: bool) -> None:
    for parameter in module.parameters():
        parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark


def fit(spec: Any, windows: Windows) -> Any:
    """Megatron's specification of a block of layers, with these norms in it and, where a layer has a window, attention
    that keeps to it."""
    usual = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    attention = _windowed_attention(windows) if any(windows) else None
    for layer in spec.layer_specs:
        inside = layer.submodules.self_attention.submodules
        for parts in (layer.submodules, inside):
            for name in [name for name, kind in vars(parts).items() if kind is usual]:
                setattr(parts, name, Norm)
        if attention is not None:
            inside.core_attention = attention
    spec.layer_norm = Norm
    return spec


def _windowed_attention(windows: Windows) -> type:
    """Megatron has windows too, but where it has one it looks at no other mask, so at none that hides padding."""
    attention: Any = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention

    class WindowedAttention(attention):  # type: ignore[misc]
        def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any) -> Any:
            window = windows[self.layer_number - 1]
            if window is not None:
                queries, keys = query.shape[0], key.shape[0]  # the last of the keys are the queries' own
                mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
                attention_mask = attention_mask | mask.tril(keys - queries - window)
            return super().forward(query, key, value, attention_mask, **options)

    return WindowedAttention


def windows_of(config: Config, layers: int) -> list[int | None]:
    """The window of each layer, as transformers reads config.json of Megatron's families."""
    kind = config["model_type"]
    if kind == "mistral":
        return [config.get("sliding_window", 4096) or None] * layers
    if kind == "mixtral":
        return [config.get("sliding_window") or None] * layers
    if not config.get("use_sliding_window"):
        return [None] * layers
    window = config.get("sliding_window", 4096) or None
    if kind == "qwen3_moe":
        return [window] * layers
    first = int(config.get("max_window_layers", 28))
    usual = [n % 2 == 0 and n < first if kind == "qwen2_moe" else n >= first for n in range(layers)]
    named = config.get("layer_types")
    chosen = usual if named is None else [name == "sliding_attention" for name in named]
    return [window if sliding else None for sliding in chosen]


@contextlib.contextmanager
def whole_sequences(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside it every tensor-parallel rank computes all tokens of a sequence: one token cannot be shared out. For
    forwards without gradients.

    Megatron's own `set_model_to_sequence_parallel` keeps every model that it has seen.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    switches = ("sequence_parallel", "reduce_scatter_embeddings")
    on = [(it, name) for it in (*modules, *configs.values()) for name in switches if getattr(it, name, False) is True]
    for it, name in on:
        setattr(it, name, False)
    try:
        yield
    finally:
        for it, name in on:
            setattr(it, name, True)
