"""megatron-core's GPTModel for a Hugging Face config: settings, and the chunks of this rank.

Every layer is one of Megatron's own (local) layers, so neither Transformer Engine nor Apex is needed. Weights are
left as memory has them: the engine fills all of them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from milepost.engines import cpu_compat
from milepost.engines.megatron.layers import ValueHead, fit, windows_of
from milepost.engines.megatron.parallel import Parallel, layers_of_stages
from milepost.errors import CallError, MismatchError
from milepost.mapping import FAMILIES, Config, expected

_VOCABULARY_MULTIPLE = 128  # Megatron-LM's own: rows of each tensor-parallel rank
_KINDS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Around everything that Megatron does: on a machine without GPU it must not look for one."""
    return cpu_compat.cuda_means_cpu() if device.type == "cpu" else contextlib.nullcontext()


def build_chunks(config: Config, parallel: Parallel, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """This rank's chunks of the model that config.json describes, one for each virtual stage; weights have memory and
    no values yet.

    config:  a causal language model, or a token classifier with one label: the value model

    Raises MismatchError or CallError for what Megatron's layers cannot compute as transformers does.
    """
    architecture = expected(config)
    if architecture is None or architecture.family not in _KINDS:
        raise MismatchError(
            f"strategy megatron trains {', '.join(_KINDS)}; config.json says {config.get('model_type')}"
        )
    is_value = "score.weight" in architecture.tensors
    settings = FAMILIES[architecture.family].settings(config)
    _check_cut(settings, parallel, config)
    options = transformer_options(config, parallel, device, dtype)
    with on_device(device):
        made = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig(**options)
        count = parallel.virtual_pipeline or 1
        return [
            _chunk(made, config, settings, parallel, None if count == 1 else stage, device, is_value=is_value)
            for stage in range(count)
        ]


def padded_vocabulary(size: int, tensor: int) -> int:
    """Rows of embedding and output layer: as many as tensor-parallel ranks can share in equal, handy parts."""
    multiple = _VOCABULARY_MULTIPLE * tensor
    return -(-size // multiple) * multiple


def _chunk(
    made: Any,
    config: Config,
    settings: Mapping[str, Any],
    parallel: Parallel,
    stage: int | None,
    device: torch.device,
    *,
    is_value: bool,
) -> Any:
    state = importlib.import_module("megatron.core.parallel_state")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    ends = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    spec = specs.get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    spec = fit(spec, windows_of(config, settings["num_hidden_layers"]))
    model = importlib.import_module("megatron.core.models.gpt").GPTModel(
        made,
        spec,
        vocab_size=padded_vocabulary(settings["vocab_size"], parallel.tensor),
        max_sequence_length=int(config.get("max_position_embeddings", 2048)),
        pre_process=state.is_pipeline_first_stage(**ends),
        post_process=state.is_pipeline_last_stage(**ends),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=bool(settings["tie_word_embeddings"]) and not is_value,
        vp_stage=stage,
        **_rope(config),
    )
    if is_value and model.post_process:
        architecture = expected(config)
        assert architecture is not None
        bias = "score.bias" in architecture.tensors
        model.output_layer = ValueHead(made, bias=bias)
    # Its own padding of the vocabulary means nothing, and everything else is filled: no bit may be left to chance.
    with torch.no_grad():
        for parameter in model.parameters():  # norms are made in float32, whatever the others are
            parameter.data = torch.zeros_like(parameter, dtype=made.params_dtype)
    return model.to(device)


def transformer_options(config: Config, parallel: Parallel, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's TransformerConfig, as keyword arguments."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    settings = family.settings(config)
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    options: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": settings["hidden_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": settings["num_key_value_heads"],
        "kv_channels": settings["head_dim"],
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2" or (kind == "qwen2_moe" and bool(settings["qkv_bias"])),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        **_stage_options(parallel),
        "sequence_parallel": parallel.tensor > 1
        and (bool(family.experts) if parallel.sequence is None else parallel.sequence),
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        # What Apex and Transformer Engine would do.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        # The loss comes divided by its tokens; Megatron is not to divide by the number of micro-batches as well.
        "calculate_per_token_loss": True,
        # Freed outputs of a stage cannot be looked at, and at its end they are.
        "deallocate_pipeline_outputs": False,
    }
    if family.experts:
        pre_softmax = kind != "mixtral" and not bool(config.get("norm_topk_prob", False))
        options |= {
            "num_moe_experts": settings[family.experts],
            "moe_router_topk": int(config["num_experts_per_tok"]),
            "moe_ffn_hidden_size": settings.get("moe_intermediate_size", settings["intermediate_size"]),
            "moe_layer_freq": [int(family.is_moe(settings, layer)) for layer in range(layers)],
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": pre_softmax,
            "moe_router_dtype": "fp32",
        }
    if kind == "qwen2_moe":
        options |= {
            "moe_shared_expert_intermediate_size": settings["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    return options


def _stage_options(parallel: Parallel) -> dict[str, Any]:
    """How many layers the stages have, where not all have as many."""
    # Of two stages the first says it all, and Megatron divides by the number of those between the ends.
    last = None if parallel.first is not None and parallel.pipeline == 2 else parallel.last
    return {
        "num_layers_in_first_pipeline_stage": parallel.first,
        "num_layers_in_last_pipeline_stage": last,
        "account_for_embedding_in_pipeline_split": parallel.count_embedding,
        "account_for_loss_in_pipeline_split": parallel.count_loss,
    }


def _check_cut(settings: Mapping[str, Any], parallel: Parallel, config: Config) -> None:
    """Refuse what cannot be cut so, and what Megatron's layers cannot compute."""
    for key in ("num_key_value_heads", "num_attention_heads"):
        if settings[key] % parallel.tensor:
            raise CallError(f"{key}={settings[key]} does not divide by tensor_model_parallel_size={parallel.tensor}")
    layers_of_stages(settings["num_hidden_layers"], parallel)
    _check_widths(settings, parallel, config["model_type"])
    if (
        FAMILIES[config["model_type"]].experts
        and parallel.expert == 1
        and parallel.expert_tensor
        not in (
            None,
            parallel.tensor,
        )
    ):
        raise CallError(
            f"expert_tensor_parallel_size={parallel.expert_tensor} below tensor_model_parallel_size={parallel.tensor} "
            "needs an expert_model_parallel_size above 1: without it Megatron does not sum the gradients of experts "
            "over all ranks that hold them"
        )
    if config["model_type"] in ("llama", "qwen3", "qwen3_moe") and (
        config.get("attention_bias") or config.get("mlp_bias")
    ):
        raise MismatchError("strategy megatron has no biases on single linear layers: attention_bias, mlp_bias")
    if config.get("hidden_act", "silu") != "silu":
        raise MismatchError(f"strategy megatron computes silu; config.json asks for hidden_act={config['hidden_act']}")
    _rope(config)  # before anything is built


def _check_widths(settings: Mapping[str, Any], parallel: Parallel, kind: str) -> None:
    """Refuse where a feed-forward matrix or the experts do not go into equal parts."""
    family = FAMILIES[kind]
    if not family.experts and parallel.expert > 1:
        raise CallError(
            f"expert_model_parallel_size={parallel.expert}: config.json describes a {kind}, which has no experts"
        )
    tensor = ("tensor_model_parallel_size", parallel.tensor)
    sparse = [bool(family.experts) and family.is_moe(settings, layer) for layer in range(settings["num_hidden_layers"])]
    cuts = [] if all(sparse) else [("intermediate_size", *tensor)]
    if family.experts:
        width = "moe_intermediate_size" if "moe_intermediate_size" in settings else "intermediate_size"
        within = tensor
        if parallel.expert_tensor is not None:
            within = ("expert_tensor_parallel_size", parallel.expert_tensor)
        cuts += [(family.experts, "expert_model_parallel_size", parallel.expert), (width, *within)]
    if kind == "qwen2_moe":
        cuts.append(("shared_expert_intermediate_size", *tensor))
    for key, size, ranks in cuts:
        if settings[key] % ranks:
            raise CallError(f"{key}={settings[key]} does not divide by {size}={ranks}")


def _rope(config: Config) -> dict[str, Any]:
    """GPTModel's arguments for rotary embeddings, which old and new configs write in two ways."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    options: dict[str, Any] = {
        "rotary_base": float(theta),
        "rotary_percent": float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return options
    # As transformers does where the config does not say it.
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    other = [f"{key}={rope.get(key)}" for key, value in fixed.items() if rope.get(key, value) != value]
    if kind != "llama3" or other or not isinstance(rope.get("factor"), int | float):
        why = other or ([f"factor={rope.get('factor')}"] if kind == "llama3" else [])
        raise MismatchError(
            f"strategy megatron cannot compute the rotary embeddings of rope_type={kind} in config.json"
            + (f", where {', '.join(why)}" if why else "")
        )
    return options | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
