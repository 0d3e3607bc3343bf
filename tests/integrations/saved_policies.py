"""Policies and value models in one wrapper under real engines on two ranks, and what `milepost.save_policy` makes of
them. One launch fills a directory and tells what the live models held and said."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from wrapped import TINY

import milepost
from milepost.errors import MilepostError

IDS = torch.arange(1, 13).reshape(2, 6)
FAMILIES = {"mistral": False, "llama": False, "qwen2": True, "gemma": True}
"""Family -> whether its embeddings are tied."""
METHODS = ("stream", "gather", "direct")


class Wrapper(nn.Module):
    """TRL's PolicyAndValueWrapper: its modules and what it returns."""

    def __init__(self, policy: Any, value_model: Any) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = value_model
        self.critic_backbone = getattr(value_model, value_model.base_model_prefix)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.critic_backbone(input_ids=input_ids).last_hidden_state
        return self.policy(input_ids=input_ids).logits, self.value_model.score(hidden)


class ValueHeadModel(nn.Module):
    """TRL's AutoModelForCausalLMWithValueHead: its modules."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.ModuleDict({"summary": nn.Linear(16, 1)})


def models(family: str, **settings: Any) -> tuple[Any, Any]:
    """A policy and a value model, every value random."""
    import transformers

    torch.manual_seed(11)
    name = family.capitalize()
    config = {**TINY, "num_labels": 1, "tie_word_embeddings": FAMILIES[family], **settings}
    if family == "gemma":
        config["head_dim"] = 4
    made = [
        getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**config))
        for head in ("ForCausalLM", "ForSequenceClassification")
    ]
    for model in made:
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made[0], made[1]


def engine_of(module: Any, stage: int, *, bf16: bool = True, optimizer: bool = True) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        # Small norms stay whole on every rank, all else is cut.
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": False,
            "stage3_param_persistence_threshold": 20,
        },
    }
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2) if optimizer else None
    return deepspeed.initialize(model=module, optimizer=adam, config=config)[0]


def train(engine: Any) -> None:
    logits, values = engine(input_ids=IDS)
    loss = logits.float().square().mean() + values.float().square().mean()
    if hasattr(engine, "backward"):
        engine.backward(loss)
        engine.step()
    else:
        loss.backward()


def whole(engine: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor, gathered by DeepSpeed's own hand, all at once."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=None):
        state = engine.module.state_dict()
        return {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}


def facts(engine: Any) -> dict[str, Any]:
    engine.eval()
    with torch.no_grad():
        logits, values = engine(input_ids=IDS)
    engine.train()
    return {
        "policy": whole(engine, "policy."),
        "value_model": whole(engine, "value_model."),
        "logits": logits,
        "values": values,
    }


def tell(act: Callable[[], Any]) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        act()
    except MilepostError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


def start() -> int:
    from milepost.engines.cpu_compat import choose_cpu, leave_out_shared_memory_collectives

    choose_cpu()
    leave_out_shared_memory_collectives()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return torch.distributed.get_rank()


def scenarios(base: Path) -> dict[str, Any]:
    rank = start()
    said: dict[str, Any] = {}
    for family in FAMILIES:
        engine = engine_of(Wrapper(*models(family)), 3)
        train(engine)
        for method in METHODS:
            milepost.save_policy(engine, base / family / method, method=method, memory_limit=4096)
            milepost.save_policy(engine, base / family / f"{method}_value", "value_model.", method)
        engine(input_ids=IDS)  # a forward that no backward follows leaves parameters gathered
        train(engine)  # the engine goes on as if nothing had been
        milepost.save_policy(engine, base / family / "later")
        said[family] = facts(engine)
        if family == "mistral":
            said |= failures(engine, base, rank)
            milepost.save_policy(engine, base / "shards", max_shard_size=2500, processing_class=tokenizer())
            milepost.save_policy(engine, base / "masters", dtype="fp32")
            milepost.save_policy(engine, base / "half", dtype="fp16")
            said["masters"] = masters(engine)
    said |= others(base)
    return said


def masters(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p) for n, p in engine.module.policy.named_parameters()}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(33)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")


def failures(engine: Any, base: Path, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if rank == 0:
        said["alone"] = tell(lambda: milepost.save_policy(engine, base / "alone", patience=1.0))
    torch.distributed.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    for method in METHODS:
        said[f"full_{method}"] = tell(lambda: milepost.save_policy(engine, base / "full", method=method))  # noqa: B023
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said["places"] = tell(lambda: milepost.save_policy(engine, base / f"place{rank}"))
    said["prefix"] = tell(lambda: milepost.save_policy(engine, base / "no", "actor."))
    said["occupied"] = tell(lambda: milepost.save_policy(engine, base / "mistral" / "stream"))
    said["inside"] = tell(lambda: milepost.save_policy(engine.module, base / "no", method="gather"))
    said["fp32"] = tell(lambda: milepost.save_policy(engine, base / "no", method="gather", dtype="fp32"))
    milepost.save_policy(engine.module, base / "inside")  # streams out of the bare module too
    return said


def others(base: Path) -> dict[str, Any]:
    """The same line under ZeRO-2, float32, DDP, FSDP2, and for models that are more than a policy."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    said: dict[str, Any] = {}
    for name, stage, bf16 in (("zero2", 2, True), ("zero1", 1, False), ("zero3_fp32", 3, False)):
        engine = engine_of(Wrapper(*models("qwen2")), stage, bf16=bf16)
        train(engine)
        for method in METHODS:
            milepost.save_policy(engine, base / name / method, method=method)
        milepost.save_policy(engine, base / name / "fp32", dtype="fp32")
        said[name] = facts(engine)
        said[f"{name}_masters"] = masters(engine)

    module = Wrapper(*models("llama"))
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    train(ddp)
    milepost.save_policy(ddp, base / "ddp")
    said["ddp"] = module.policy.state_dict()

    module = Wrapper(*models("llama"))
    said["fsdp2"] = {name: value.clone() for name, value in module.policy.state_dict().items()}
    for layer in module.policy.model.layers:
        fully_shard(layer)
    fully_shard(module)
    for method in METHODS:
        milepost.save_policy(module, base / "fsdp2" / method, method=method)

    torch.manual_seed(3)
    moe = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    for buffer in (b for n, b in moe.named_buffers() if n.endswith("e_score_correction_bias")):
        buffer.copy_(torch.randn(buffer.shape))
    engine = engine_of(Wrapper(moe, models("llama")[1]), 3)
    for method in METHODS:
        milepost.save_policy(engine, base / "moe" / method, method=method)

    if find_spec("peft") is not None:
        said |= adapters(base)

    engine = engine_of(ValueHeadModel(models("llama")[0]), 3, bf16=False)
    milepost.save_policy(engine, base / "head_before", "")
    milepost.save_policy(engine, base / "head_policy", "pretrained_model.")
    milepost.save_policy(engine, base / "head_direct", "", "direct")
    said["head_before"] = whole(engine)
    for parameter in engine.module.v_head.parameters():
        parameter.ds_tensor.data += 0.5
    milepost.save_policy(engine, base / "head_after", "")
    said["head_after"] = whole(engine)
    return said


def adapters(base: Path) -> dict[str, Any]:
    """A policy that PEFT has put an adapter around; and what PEFT itself saves of it before it is cut."""
    from peft import LoraConfig, get_peft_model

    policy, value = models("llama")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(policy, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    if torch.distributed.get_rank() == 0:
        adapted.save_pretrained(str(base / "adapter_by_peft"))
    engine = engine_of(Wrapper(adapted, value), 3, bf16=False)
    milepost.save_policy(engine, base / "adapter", processing_class=tokenizer())
    return {"adapted": {name: value for name, value in whole(engine, "policy.").items() if "lora_" in name}}


DEEPSEEK = {
    **TINY,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 4,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "tie_word_embeddings": False,
}
