"""Real FSDP2 checkpoints of models that something is wrapped around: adapters of PEFT, policy and value in one module
under TRL's names, and a model of pictures and text with nested configs. One launch of two ranks writes all of them.

    <case>/actor       the role directory
    <case>/...         what the peer itself saved of the same model, before it was sharded
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ranks import run_ranks

TINY = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FRACTION = {"r": 4, "lora_alpha": 0.5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
LARGE = {"r": 16, "lora_alpha": 32, "use_rslora": True, "target_modules": LINEARS}
PATTERNS = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": [*LINEARS, "embed_tokens", "lm_head"],
    "rank_pattern": {"layers.1.self_attn.q_proj": 2},
    "alpha_pattern": {"down_proj": 3},
}


def make_wrapped(root: Path) -> Path:
    """Fill `root` with every case."""
    run_ranks(_make, 2, root)
    return root


def _make(root: Path) -> None:
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForTokenClassification,
    )

    torch.manual_seed(5)
    llama, qwen2 = LlamaConfig(**TINY), Qwen2Config(**TINY)
    tied = Qwen2Config(**TINY, tie_word_embeddings=True)
    if find_spec("peft") is not None:
        _lora(root / "fraction", Qwen2ForCausalLM(tied), FRACTION)
        _lora(root / "large", Qwen2ForCausalLM(qwen2), LARGE, verl=True)
        _lora(root / "patterns", LlamaForCausalLM(llama), PATTERNS)
        _lora(root / "bf16", LlamaForCausalLM(llama).bfloat16(), {**LARGE, "r": 8})
        _lora(
            root / "dora",
            LlamaForCausalLM(llama),
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": True},
        )
        critic = Qwen2ForTokenClassification(Qwen2Config(**TINY, num_labels=1))
        _lora(root / "critic", critic, {**FRACTION, "task_type": "TOKEN_CLS"}, policy_config=qwen2)

    value_config = LlamaConfig(**TINY, num_labels=1)
    policy, value = LlamaForCausalLM(llama), LlamaForSequenceClassification(value_config)
    _write(root / "pair", _pair(policy, value), policy.config, {"policy": policy, "value": value})
    shared = Qwen2ForCausalLM(tied)
    _write(root / "head", _head(shared), shared.config, {"policy": shared})
    _write(root / "head_prefixed", _head(shared), shared.config, {}, prefix="module.pretrained_model.")
    _vlm(root / "vlm")


def _lora(
    directory: Path, base: Any, settings: dict[str, Any], *, verl: bool = False, policy_config: Any = None
) -> None:
    """PEFT's model, its factors random; `verl`: only what verl writes of the adapter's settings lies there."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    if dist.get_rank() == 0:
        base.save_pretrained(directory / "base")
    dist.barrier()
    config = LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
    model: Any = get_peft_model(base, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            value = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(value.abs() if "magnitude" in name else value)
    role = directory / "actor"
    if dist.get_rank() == 0:
        model.save_pretrained(directory / "peft")
        _companions(role, policy_config or base.config)
        if verl:
            meta = {"r": config.r, "lora_alpha": int(config.lora_alpha), "task_type": "CAUSAL_LM"}
            (role / "lora_train_meta.json").write_text(json.dumps(meta))
        else:
            config.save_pretrained(role / "huggingface")
    dist.barrier()
    _shard(model, model.base_model.model.model.layers)
    _save(role, model.state_dict())


def _pair(policy: Any, value: Any) -> Any:
    from torch import nn

    class PolicyAndValueWrapper(nn.Module):
        """The modules of TRL's PPO wrapper, under its names."""

        def __init__(self) -> None:
            super().__init__()
            self.policy = policy
            self.value_model = value
            self.critic_backbone = getattr(value, value.base_model_prefix)

    return PolicyAndValueWrapper()


def _head(model: Any) -> Any:
    import torch
    from torch import nn

    class ValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.summary = nn.Linear(16, 1)

    class WithValueHead(nn.Module):
        """The modules of TRL's AutoModelForCausalLMWithValueHead, under its names."""

        def __init__(self) -> None:
            super().__init__()
            self.pretrained_model = model
            self.v_head = ValueHead()

    torch.manual_seed(3)
    return WithValueHead()


def _write(directory: Path, model: Any, config: Any, parts: dict[str, Any], prefix: str = "") -> None:
    import torch
    import torch.distributed as dist

    role = directory / "actor"
    if dist.get_rank() == 0:
        _companions(role, config)
        for name, part in parts.items():
            part.save_pretrained(directory / name)
            torch.save({key: value.clone() for key, value in part.state_dict().items()}, directory / f"{name}.pt")
        if hasattr(model, "v_head"):
            torch.save(
                {f"v_head.{k}": _whole(v) for k, v in model.v_head.state_dict().items()}, directory / "v_head.pt"
            )
    dist.barrier()
    if not prefix:
        layers = [layer for part in parts.values() for layer in part.model.layers]
        _shard(model, layers)
        _save(role, model.state_dict())
        return
    # The model below was sharded with the case before: its names as DDP around the wrapper gives them.
    state = model.state_dict()
    _save(role, {name.replace("pretrained_model.", prefix) if "v_head" not in name else f"module.{name}": value
                 for name, value in state.items()})  # fmt: skip


def _vlm(directory: Path) -> None:
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    torch.manual_seed(4)
    model = Qwen2VLForConditionalGeneration(config)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        model.save_pretrained(directory / "reference")
        _companions(directory / "actor", model.config)
    dist.barrier()
    _shard(model, model.model.language_model.layers)
    _save(directory / "actor", model.state_dict())


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _shard(model: Any, layers: Iterable[Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def _save(role: Path, state: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.save(state, role / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def _companions(role: Path, config: Any) -> None:
    folder = role / "huggingface"
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
