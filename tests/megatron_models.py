"""megatron-core's own GPTModel, built for a Hugging Face config and filled with a Hugging Face model's weights.

How a weight of one is made of weights of the other is written here anew, in torch, so that it is an oracle for
`milepost.mapping.megatron`; the test that compares logits is the oracle of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import megatron_cpu
import torch
import torch.nn.functional as F  # noqa: N812

Weights = dict[str, torch.Tensor]
PADDING = 7.0
"""What the rows are full of that pad the vocabulary."""


@dataclass(frozen=True)
class Parallel:
    """Sizes of a launch, and how many layers the first stage of the pipeline has, where it has others than the rest."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    first: int | None = None


def build(hf: Any, at: Parallel, padded: int, *, value: bool = False, grouped: bool = False) -> list[torch.nn.Module]:
    """The model chunks of this rank. hf: transformers' config; padded: rows of embedding and output layer; grouped:
    whether the experts of a rank lie in one tensor (GroupedMLP)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = _config(hf, at)
    config.moe_grouped_gemm = grouped
    chunks = []
    for stage in range(at.vpp or 1):
        vp = stage if at.vpp else None
        ends = {"ignore_virtual": False, "vp_stage": vp} if at.vpp else {}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp)
        if hf.model_type == "deepseek_v3":
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = megatron_cpu.latent_core_attention()
        if hf.model_type == "gemma":
            spec.layer_norm = ZeroCentredNorm
            for layer in spec.layer_specs:
                layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ZeroCentredNorm
        model = GPTModel(
            config,
            spec,
            vocab_size=padded,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            position_embedding_type="rope",
            rotary_base=_rope_theta(hf),
            share_embeddings_and_output_weights=bool(hf.tie_word_embeddings) and not value,
            vp_stage=vp,
        )
        if hf.model_type == "gemma" and model.pre_process:
            model.embedding.register_forward_hook(lambda _, __, out: out * hf.hidden_size**0.5)
        if value and model.post_process:
            model.output_layer = ValueHead(hf.hidden_size, 1, bias=False)
        chunks.append(model.eval())
    return chunks


class ZeroCentredNorm(torch.nn.RMSNorm):
    """What `layernorm_zero_centered_gamma` means; Megatron's own norms of torch do not have it."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class ValueHead(torch.nn.Linear):
    """The head of a critic, as trainers put it in the place of the output layer."""

    def forward(self, x: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        return super().forward(x).float(), None


def _rope_theta(hf: Any) -> float:
    theta = getattr(hf, "rope_theta", None)
    return float(hf.rope_parameters["rope_theta"] if theta is None else theta)


def _config(hf: Any, at: Parallel) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": getattr(hf, "intermediate_size", None),
        "tensor_model_parallel_size": at.tp,
        "pipeline_model_parallel_size": at.pp,
        "virtual_pipeline_model_parallel_size": at.vpp,
        "expert_model_parallel_size": at.ep,
        "expert_tensor_parallel_size": at.etp,
        "num_layers_in_first_pipeline_stage": at.first,
        "layernorm_epsilon": hf.rms_norm_eps,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    kind = hf.model_type
    experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)
    if experts:
        options |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True) and kind != "mixtral",
        }
    if kind == "gemma":
        options |= {"layernorm_zero_centered_gamma": True, "activation_func": partial(F.gelu, approximate="tanh")}
    if kind == "qwen2_moe":
        options |= {
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    if kind == "deepseek_v3":
        options |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            "rope_type": "rope",
            "moe_layer_freq": [int(n >= hf.first_k_dense_replace) for n in range(hf.num_hidden_layers)],
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
        return MLATransformerConfig(**options)
    return TransformerConfig(
        **options,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        add_qkv_bias=kind in ("qwen2", "qwen2_moe"),
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
    )


@torch.no_grad()
def fill(chunks: list[torch.nn.Module], hf: Any, weights: Weights, padded: int) -> None:
    """Give every parameter (and the router's bias) of this rank its part of the Hugging Face model."""
    for chunk in chunks:
        numbers = {f"decoder.layers.{n}": layer.layer_number - 1 for n, layer in enumerate(chunk.decoder.layers)}
        for name, value in chunk.state_dict().items():
            if value is None or not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
                continue
            prefix = ".".join(name.split(".")[:3])
            whole = name.replace(prefix, f"decoder.layers.{numbers[prefix]}", 1) if prefix in numbers else name
            part = local(whole, hf, weights, padded)
            assert part.shape == value.shape, (name, part.shape, value.shape)
            value.copy_(part)


def local(name: str, hf: Any, w: Weights, padded: int) -> torch.Tensor:
    """This rank's part of one parameter; its layer is counted over the whole model, its expert over this rank."""
    from megatron.core import parallel_state as state

    tp, tp_rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    etp, etp_rank = state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()

    def cut(value: torch.Tensor, dim: int = 0, size: int = tp, rank: int = tp_rank) -> torch.Tensor:
        return value.chunk(size, dim)[rank]

    def gated(prefix: str, gate: str, up: str, size: int = tp, rank: int = tp_rank) -> torch.Tensor:
        return torch.cat([cut(w[f"{prefix}.{part}.weight"], 0, size, rank) for part in (gate, up)])

    if name == "embedding.word_embeddings.weight":
        return cut(_padded(w["model.embed_tokens.weight"], padded))
    if name == "output_layer.weight":
        if "score.weight" in w:
            return w["score.weight"]
        return cut(_padded(w.get("lm_head.weight", w["model.embed_tokens.weight"]), padded))
    if name == "decoder.final_layernorm.weight":
        return w["model.norm.weight"]
    layer, rest = name.split(".", 3)[2:]
    at = f"model.layers.{layer}"
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    moe = f"{at}.block_sparse_moe" if hf.model_type == "mixtral" else mlp
    same = {
        "input_layernorm.weight": f"{at}.input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{at}.post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": f"{attn}.q_norm.weight",
        "self_attention.k_layernorm.weight": f"{attn}.k_norm.weight",
        "mlp.router.weight": f"{at}.block_sparse_moe.gate.weight"
        if hf.model_type == "mixtral"
        else f"{mlp}.gate.weight",
        "mlp.router.expert_bias": f"{mlp}.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_weight": f"{mlp}.shared_expert_gate.weight",
    }
    if hf.model_type == "deepseek_v3":
        same |= {
            "self_attention.q_layernorm.weight": f"{attn}.q_a_layernorm.weight",
            "self_attention.kv_layernorm.weight": f"{attn}.kv_a_layernorm.weight",
        }
    if rest in same:
        return w[same[rest]]
    columns = {
        "self_attention.linear_q_down_proj.weight": "q_a_proj",
        "self_attention.linear_q_up_proj.weight": "q_b_proj",
        "self_attention.linear_q_proj.weight": "q_proj",
        "self_attention.linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
        "self_attention.linear_kv_up_proj.weight": "kv_b_proj",
    }
    if rest in columns:
        return cut(w[f"{attn}.{columns[rest]}.weight"])
    if rest.startswith("self_attention.linear_qkv."):
        kind = rest.rpartition(".")[2]
        return cut(_fused(*(w[f"{attn}.{part}_proj.{kind}"] for part in "qkv"), groups=hf.num_key_value_heads))
    if rest == "self_attention.linear_proj.weight":
        return cut(w[f"{attn}.o_proj.weight"], 1)
    if rest == "mlp.linear_fc1.weight":
        return gated(mlp, "gate_proj", "up_proj")
    if rest == "mlp.linear_fc2.weight":
        return cut(w[f"{mlp}.down_proj.weight"], 1)
    shared = "shared_expert" if hf.model_type == "qwen2_moe" else "shared_experts"
    if rest == "mlp.shared_experts.linear_fc1.weight":
        return gated(f"{mlp}.{shared}", "gate_proj", "up_proj")
    if rest == "mlp.shared_experts.linear_fc2.weight":
        return cut(w[f"{mlp}.{shared}.down_proj.weight"], 1)
    total = getattr(hf, "num_experts", None) or hf.num_local_experts
    count = total // state.get_expert_model_parallel_world_size()
    first = state.get_expert_model_parallel_rank() * count
    gate, up, down = ("w1", "w3", "w2") if hf.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")

    def of_expert(own: int, which: str) -> torch.Tensor:
        inside = f"{moe}.experts.{first + own}"
        if which == "linear_fc1":
            return gated(inside, gate, up, etp, etp_rank)
        return cut(w[f"{inside}.{down}.weight"], 1, etp, etp_rank)

    if rest.startswith("mlp.experts.weight"):
        # read in its forward as [experts, hidden, width] and [experts, width, hidden]
        matrices = torch.stack([of_expert(own, f"linear_fc{rest[-1]}").T for own in range(count)])
        return matrices.view(hf.hidden_size, -1) if rest[-1] == "1" else matrices.view(-1, hf.hidden_size)
    _, _, _, own, which, _ = rest.split(".")  # mlp.experts.local_experts.E.linear_fcN.weight
    return of_expert(int(own), which)


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([value, torch.full((rows - value.shape[0], value.shape[1]), PADDING)])


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """For each query group its queries, its key, its value."""
    parts = [torch.cat(rows) for rows in zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)]
    return torch.cat(parts)
