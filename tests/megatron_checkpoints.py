"""Checkpoints that megatron-core itself wrote, of tiny models filled from Hugging Face weights, on four gloo ranks.

One launch writes them all. `<root>/models/<model>` is what transformers saved; `<root>/<case>/` is a role directory in
both forms:

    model/mp_rank_.../            classic: what Megatron-LM and older verl write with torch.save
    dist_ckpt/                    dist_checkpointing (torch_dist), written by Megatron's own saver
    huggingface/                  config and tokenizer, as verl keeps them
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_cpu
import torch
import torch.distributed as dist
from megatron_models import Parallel, Weights, build, fill
from safetensors.torch import load_file, save_file

PADDED = 64
"""Rows of the embedding in Megatron; the vocabulary has 33."""

SIZES = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama5": ("llama", {"num_hidden_layers": 5, "num_key_value_heads": 4, "head_dim": 8}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 32},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_SPARSE, "num_hidden_layers": 2, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
    ),
    "qwen3_moe": ("qwen3_moe", {**_SPARSE, "num_hidden_layers": 2, "head_dim": 8, "norm_topk_prob": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "critic": ("llama", {"architectures": ["LlamaForTokenClassification"], "num_labels": 1}),
}
"""Models by name: family and what differs from `SIZES`. qwen2 is tied and has one key/value head (MQA), llama5 as many
as heads (MHA), the others two (GQA)."""


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    model:    which of `MODELS`
    at:       how it is cut
    dist:     metadata of Megatron's sharded state dict; None: the classic form only
    moments:  the dist checkpoint has optimizer state too: the model's own weights are bfloat16, their masters float32,
              exp_avg half of a weight and exp_avg_sq its square
    grouped:  the experts of a rank lie in one tensor
    buckets:  beside it `buckets/`, with the state of Megatron's DistributedOptimizer as it saves it by itself
              (dp_reshardable), of the same numbers
    local:    classic files keep Megatron's own layer numbers, counted anew on every stage; else counted over the model
    """

    model: str
    at: Parallel
    dist: dict[str, Any] | None = None
    local: bool = True
    moments: bool = False
    buckets: bool = False
    grouped: bool = False


STEP = 3
"""Updates of an optimizer in a folder or in buckets of its own."""
BUCKET = 1500
"""Elements after which a bucket ends. Only a first stage has several."""
_SINGLETON = {"singleton_local_shards": True}
CASES = {
    "llama-tp2pp2": Case("llama", Parallel(tp=2, pp=2), {}, buckets=True),
    "llama-pp2vpp2": Case("llama", Parallel(pp=2, vpp=2), {"non_homogeneous_layers": True}, buckets=True),
    "llama-tp4": Case("llama", Parallel(tp=4), {}),
    "llama-moments": Case("llama", Parallel(tp=2, pp=2), {}, moments=True),
    "qwen3_moe-moments": Case("qwen3_moe", Parallel(tp=2, ep=2, etp=1), {}, moments=True),
    "llama5-uneven": Case("llama5", Parallel(pp=2, first=3), {}, buckets=True),
    "llama-global": Case("llama", Parallel(pp=2, vpp=2), None, local=False),
    "qwen2-tp2pp2": Case("qwen2", Parallel(tp=2, pp=2), {}, buckets=True),
    "qwen3-tp2pp2": Case("qwen3", Parallel(tp=2, pp=2), _SINGLETON, local=False, buckets=True),
    "gemma-tp2pp2": Case("gemma", Parallel(tp=2, pp=2), {}),
    "mixtral-ep2": Case("mixtral", Parallel(ep=2), {}),
    "mixtral-tp2ep2": Case("mixtral", Parallel(tp=2, ep=2, etp=2), {}, buckets=True),
    "qwen3_moe-tp4ep2etp2": Case("qwen3_moe", Parallel(tp=4, ep=2, etp=2), {}),
    "qwen2_moe-tp2ep2etp1": Case("qwen2_moe", Parallel(tp=2, ep=2, etp=1), {}, buckets=True),
    "qwen3_moe-pp2ep2": Case("qwen3_moe", Parallel(pp=2, ep=2), _SINGLETON, buckets=True),
    "qwen3_moe-grouped": Case("qwen3_moe", Parallel(tp=2, ep=2, etp=2), {}, grouped=True, buckets=True),
    "deepseek_v3-tp2ep2": Case("deepseek_v3", Parallel(tp=2, ep=2, etp=1), {}, buckets=True),
    # a first stage without experts
    "deepseek_v3-pp2ep2": Case("deepseek_v3", Parallel(pp=2, ep=2, first=1), {}, buckets=True),
    "critic-tp2pp2": Case("critic", Parallel(tp=2, pp=2), {}, buckets=True),
}
CASES = {name: case for name, case in CASES.items() if megatron_cpu.GROUPED or not case.grouped}
LOGITS = {"llama": Parallel(tp=2), "qwen2": Parallel(), "qwen3": Parallel(tp=2), "gemma": Parallel(tp=2),
          "mixtral": Parallel(ep=2), "qwen2_moe": Parallel(tp=2, ep=2, etp=1), "qwen3_moe": Parallel(ep=2)}  # fmt: skip


def make_models(root: Path) -> None:
    """Save every model of `MODELS`; values differ from tensor to tensor, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    for seed, (name, (family, changes)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{**SIZES, **changes})
        builder = AutoModelForTokenClassification if name == "critic" else AutoModelForCausalLM
        directory = root / "models" / name
        builder.from_config(config).save_pretrained(directory)
        file = directory / "model.safetensors"
        weights = {n: torch.randn(w.shape) * 0.2 + (w.dim() == 1) for n, w in load_file(file).items()}
        if name == "critic":
            weights.pop("score.bias")  # what trainers put in the output layer's place has none
        save_file(weights, file, metadata={"format": "pt"})
        if name in LOGITS:
            model = builder.from_pretrained(directory, attn_implementation="eager", experts_implementation="eager")
            with torch.no_grad():
                torch.save(model(_tokens()).logits, directory / "logits.pt")


def _tokens() -> torch.Tensor:
    return torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(0))


def write_all(root: str) -> dict[str, float]:
    """Write every case; called on four ranks. Returns for each model of `LOGITS` the largest difference of logits."""
    megatron_cpu.install()
    torch.set_grad_enabled(False)
    for name, case in CASES.items():
        _write(Path(root), name, case)
    return {model: _logits(Path(root) / "models" / model, at) for model, at in LOGITS.items()}


def _model(directory: Path) -> tuple[Any, Weights]:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory), load_file(directory / "model.safetensors")


def _write(root: Path, name: str, case: Case) -> None:
    state = megatron_cpu.parallel(case.at.tp, case.at.pp, case.at.vpp, case.at.ep, case.at.etp)
    hf, weights = _model(root / "models" / case.model)
    chunks = build(hf, case.at, PADDED, value=case.model == "critic", grouped=case.grouped)
    fill(chunks, hf, weights, PADDED)
    role = root / name
    if dist.get_rank() == 0:
        (role / "huggingface").mkdir(parents=True)
        config = json.loads((root / "models" / case.model / "config.json").read_text())
        if case.model == "critic":  # trainers save critics under the policy's config
            config["architectures"] = ["LlamaForCausalLM"]
        (role / "huggingface" / "config.json").write_text(json.dumps(config))
        (role / "dist_ckpt").mkdir()
    dist.barrier()
    if state.get_expert_data_parallel_rank() == 0:
        _write_classic(role / "model", state, chunks, case)
    if case.dist is not None:
        _write_dist(role / "dist_ckpt", state, chunks, case.dist, moments=case.moments)
    if case.buckets:
        _write_buckets(role / "buckets", state, chunks, case)
    dist.barrier()
    if case.dist is None and dist.get_rank() == 0:
        shutil.rmtree(role / "dist_ckpt")


def rank_directory(tp: int, pp: int | None, ep: int | None) -> str:
    """Name of a rank's directory; pp, ep: None where that is not used."""
    return f"mp_rank_{tp:02d}" + "".join(f"_{n:03d}" for n in (pp, ep) if n is not None)


def _write_classic(directory: Path, state: Any, chunks: list[torch.nn.Module], case: Case) -> None:
    pp = state.get_pipeline_model_parallel_rank() if case.at.pp > 1 else None
    ep = state.get_expert_model_parallel_rank() if case.at.ep > 1 else None
    place = directory / rank_directory(state.get_tensor_model_parallel_rank(), pp, ep)
    place.mkdir(parents=True, exist_ok=True)
    states = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
    if not case.local:
        renumbered = []
        for chunk, values in zip(chunks, states, strict=True):
            numbers = {f"decoder.layers.{n}.": f"decoder.layers.{layer.layer_number - 1}."
                       for n, layer in enumerate(chunk.decoder.layers)}  # fmt: skip
            prefix = {key: ".".join(key.split(".")[:3]) + "." for key in values}
            renumbered.append({key.replace(prefix[key], numbers.get(prefix[key], prefix[key])): value
                               for key, value in values.items()})  # fmt: skip
        torch.save(renumbered, place / "model_states.pt")
        return
    sizes = {"num_layers": chunks[0].config.num_layers, "num_experts": chunks[0].config.num_moe_experts}
    args = argparse.Namespace(**sizes, params_dtype=torch.float32, **vars(case.at))
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    named = {"model": states[0]} if len(states) == 1 else {f"model{n}": values for n, values in enumerate(states)}
    torch.save({**content, **named}, place / "model_optim_rng.pt")


def _write_dist(
    directory: Path, state: Any, chunks: list[torch.nn.Module], metadata: dict[str, Any], *, moments: bool
) -> None:
    masters = [param.detach().clone() for chunk in chunks for param in chunk.parameters()]
    if moments:
        for chunk in chunks:
            chunk.bfloat16()
    metadata = {**metadata, "dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
    sharded = {
        "model" if len(chunks) == 1 else f"model{n}": chunk.sharded_state_dict(metadata=metadata)
        for n, chunk in enumerate(chunks)
    }
    content = {**sharded, "iteration": 7, "args": argparse.Namespace(lr=0.1)}
    if moments:
        (chunk,) = chunks
        content["optimizer"] = _optimizer_state(chunk, masters, sharded["model"])
        _write_apart(directory.parent / "apart", sharded, content["optimizer"])
    megatron_cpu.save(content, directory)


def _write_apart(role: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """As verl 0.9: model and optimizer in a folder each. The number of steps is where Adam of Apex has it."""
    inner = optimizer["optimizer"]
    groups = [{**group, "step": STEP} for group in inner["param_groups"]]
    counted = {**optimizer, "optimizer": {**inner, "param_groups": groups}}
    for name, content in (("model", model), ("optimizer", {"optimizer": counted})):
        if dist.get_rank() == 0:
            (role / name / "dist_ckpt").mkdir(parents=True)
        dist.barrier()
        megatron_cpu.save(content, role / name / "dist_ckpt")


def _optimizer_state(model: torch.nn.Module, masters: list[torch.Tensor], sharded: Any) -> dict[str, Any]:
    """Optimizer state as Megatron's mixed-precision optimizer shards it."""
    from megatron.core.dist_checkpointing import optimizer as shards

    params = list(model.parameters())
    state = {
        n: {"exp_avg": master * 0.5, "exp_avg_sq": master.square(), "step": torch.tensor(3.0)}
        for n, master in enumerate(masters)
    }
    content = {"state": state, "param_groups": [{"params": list(range(len(params))), "lr": 0.1}]}
    by_number = shards.get_param_id_to_sharded_param_map(sharded, params)
    shards.optim_state_to_sharding_state(content, by_number, exclude_keys=("step",))
    prefix = "optimizer.state.fp32_param"
    own = [shards.make_sharded_optimizer_tensor(by_number[n], master, prefix) for n, master in enumerate(masters)]
    return {"optimizer": content, "fp32_from_fp16_params": [own]}


def _write_buckets(directory: Path, state: Any, chunks: list[torch.nn.Module], case: Case) -> None:
    """Weights in bfloat16 and what a DistributedOptimizer has of them: it saves buckets, several of a chunk."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from milepost.engines.megatron.model import on_device

    masters = {name: param.detach().clone() for name, param in _parameters(chunks)}
    for chunk in chunks:
        chunk.bfloat16()
    how = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "overlap_grad_reduce": True}
    ddp = DistributedDataParallelConfig(**how, bucket_size=BUCKET)
    config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True)
    with torch.enable_grad(), on_device(megatron_cpu.CPU):
        wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
        optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
    names = {param: name for name, param in _parameters(chunks)}
    for inner in optimizer.chained_optimizers:
        for param, (buffer, types, bucket) in inner.model_param_gbuf_map.items():
            held = inner.gbuf_ranges[buffer][types][bucket]["param_map"][param]["param"]
            group, number = inner.model_param_group_index_map[param]
            own = inner.optimizer.param_groups[group]["params"][number]
            own.data.copy_(masters[names[param]].view(-1)[held.start : held.end])
            counted = {"step": torch.tensor(float(STEP)), "exp_avg": own.data * 0.5, "exp_avg_sq": own.data.square()}
            inner.optimizer.state[own] = counted
        if not inner.optimizer.state:
            # Megatron cannot save torch's Adam where a rank has nothing to update, only those of GPUs: it takes the
            # count from the state of some parameter.
            inner.optimizer.state["none"] = {"step": torch.tensor(float(STEP))}
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    metadata = {
        **(case.dist or {}),
        "dp_cp_group": state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",
    }
    sharded = {
        "model" if len(chunks) == 1 else f"model{n}": chunk.sharded_state_dict(metadata=metadata)
        for n, chunk in enumerate(chunks)
    }
    megatron_cpu.save({**sharded, "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata)}, directory)


def _parameters(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"{n}/{name}", param) for n, chunk in enumerate(chunks) for name, param in chunk.named_parameters()]


def _logits(directory: Path, at: Parallel) -> float:
    """Megatron's logits against transformers', the largest difference on this rank as a share of the largest logit."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    megatron_cpu.parallel(at.tp, at.pp, at.vpp, at.ep, at.etp)
    hf, weights = _model(directory)
    (model,) = build(hf, at, PADDED)
    fill([model], hf, weights, PADDED)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril().logical_not()
    ours = gather_from_tensor_model_parallel_region(model(_tokens(), torch.arange(7)[None].expand(2, -1), mask))
    wanted = torch.load(directory / "logits.pt")
    return float((ours[..., :33] - wanted).abs().max() / wanted.abs().max().clamp(min=1))
