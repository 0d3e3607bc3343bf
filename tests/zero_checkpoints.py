"""Real DeepSpeed checkpoints for tests: DeepSpeed in real processes on CPU, and what its own tools make of them.

    python zero_checkpoints.py DIR [CASE ...]

Runs as a program of its own, since DeepSpeed takes its accelerator from the environment when it is imported; that
happens once, and the ranks of every case are forked from there. For each case of `CASES`, below DIR:

    {case}/               what `save_checkpoint` wrote: latest, tag folders, DeepSpeed's scripts
    {case}/truth.pt       the live state: weights in float32 and 16 bits, moments, as DeepSpeed's API gives them
    {case}/fp32.pt        what DeepSpeed's zero_to_fp32 reads; `error` holds what it raised instead
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT = 600  # seconds; the first run on a machine compiles an extension of DeepSpeed
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One checkpoint: stage, ranks, and what else the config says.

    model:   "net" (frozen weights, buffers, tied weights, two groups), "plain" (one group), "pair" (policy and value)
    zero:    more of the config's `zero_optimization`
    config:  more of the config
    """

    stage: int
    world_size: int
    dtype: str
    model: str = "net"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)


CASES = {
    "z3_bf16_w2": Case(3, 2, "bf16", zero={"sub_group_size": 600}),
    "z3_fp32_w2": Case(3, 2, "fp32", zero={"sub_group_size": 1_000_000_000}),
    "z3_offload_w2": Case(3, 2, "bf16", zero={"sub_group_size": 600, "offload_optimizer": {"device": "cpu"}},
                          config={"zero_force_ds_cpu_optimizer": False}),
    "z3_thawed_w2": Case(3, 2, "bf16", save={"exclude_frozen_parameters": True}),
    "pair_w2": Case(3, 2, "bf16", model="pair", zero={"sub_group_size": 2000}),
    "z2_bf16_w2": Case(2, 2, "bf16"),
    "z2_round_robin_w2": Case(2, 2, "bf16", zero={"round_robin_gradients": True}),
    "z2_aligned_w2": Case(2, 2, "bf16", zero={"parameter_alignment": True}),
    "z1_bf16_w2": Case(1, 2, "bf16"),
    "z1_bf16_optimizer_w2": Case(1, 2, "bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "z1_fp32_w2": Case(1, 2, "fp32"),
    "z0_fp32_w2": Case(0, 2, "fp32"),
    "z0_bf16_w2": Case(0, 2, "bf16", model="plain"),
    "z3_bf16_w3": Case(3, 3, "bf16", zero={"sub_group_size": 1_000_000_000}),
    "z3_fp32_w3": Case(3, 3, "fp32", zero={"sub_group_size": 600}),
    "z2_bf16_w3": Case(2, 3, "bf16"),
    "z2_fp32_w3": Case(2, 3, "fp32"),
}  # fmt: skip


def make(root: Path) -> Path:
    """Fill `root` with every case; raises with the program's output where it fails."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, str(root)],
        env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return root


def _main(root: Path, names: list[str]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Compiled once on a machine, and before anybody waits for another rank.
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        builder.load()
    _load_ahead()
    for world_size in (2, 3):
        mine = {name: case for name, case in CASES.items() if case.world_size == world_size}
        _fork(world_size, root, {name: case for name, case in mine.items() if not names or name in names})
    for name in names or CASES:
        _consolidate(root / name)


def _load_ahead() -> None:
    """What DeepSpeed and the models import when they are first used: once here, and not in each rank. DeepSpeed also
    looks through all of it for garbage at each of its many reports on memory, unless it is frozen."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama"):
        import_module(name)
    gc.freeze()


def _fork(world_size: int, root: Path, cases: dict[str, Case]) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as store:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, f"{store}/store", root, cases))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT)
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def _rank(rank: int, world_size: int, store: str, root: Path, cases: dict[str, Case]) -> None:
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        import deepspeed
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        deepspeed.init_distributed(dist_backend="gloo")
        for name, case in cases.items():
            _train(case, root / name, rank)
        torch.distributed.barrier()
    except BaseException:  # noqa: BLE001  the parent sees the exit status, and whoever reads its output the reason
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # leaving DeepSpeed's process groups can hang after all work is done


def _net(plain: bool) -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        """Ranks' parts begin inside rows, and no number of elements divides by all world sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(37, 16)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
            self.cube = nn.Parameter(torch.randn(3, 5, 7))
            self.one = nn.Parameter(torch.tensor([0.5]))
            self.head = nn.Linear(16, 37, bias=False)
            if not plain:
                self.frozen = nn.Linear(16, 7)
                self.frozen.requires_grad_(False)
                self.head.weight = self.emb.weight
                self.register_buffer("scale", torch.tensor([1.5]))
                self.register_buffer("counts", torch.arange(3))
                self.register_buffer("transient", torch.ones(3), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.emb(tokens)
            for layer in self.layers:
                hidden = hidden + torch.relu(layer(hidden)) * self.one * self.cube.mean()
            logits = self.head(hidden)
            return logits if plain else logits * self.scale.to(logits.dtype) + self.frozen(hidden).mean()

    torch.manual_seed(0)
    return Net()


def _pair() -> Any:
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    tiny = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    policy, value = (
        LlamaForCausalLM(LlamaConfig(**tiny)),
        LlamaForSequenceClassification(LlamaConfig(**tiny, num_labels=1)),
    )

    class PolicyAndValueWrapper(nn.Module):
        """The modules of TRL's PPO wrapper, under its names."""

        def __init__(self) -> None:
            super().__init__()
            self.policy = policy
            self.value_model = value
            self.critic_backbone = value.model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.critic_backbone(tokens).last_hidden_state
            return self.policy(tokens).logits + self.value_model.score(hidden)

    return PolicyAndValueWrapper()


def _train(case: Case, directory: Path, rank: int) -> None:
    import deepspeed
    import torch

    model = _pair() if case.model == "pair" else _net(case.model == "plain")
    if case.model == "pair" and rank == 0:
        for part in ("policy", "value_model"):
            getattr(model, part).config.save_pretrained(directory / part)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups if case.model == "net" else trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        **case.config,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    client_state = {"rng": {"python": [rank, 7], "torch": torch.full((3,), rank, dtype=torch.uint8)}}
    engine.save_checkpoint(str(directory), client_state=client_state, **case.save)
    for weight in trained:
        weight._zero_optimizer_of_test = engine.optimizer
    truth = _truth(engine, case)
    if rank == 0:
        torch.save(truth, directory / "truth.pt")
    engine.destroy()


def _truth(engine: Any, case: Case) -> dict[str, dict[str, Any]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, Any]] = {"weights": {}, "sixteen": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, weight in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=case.stage == 3):
            found["sixteen"][name] = weight.detach().clone()
        shape = found["sixteen"][name].shape
        if not weight.requires_grad or not case.stage:
            found["weights"][name] = found["sixteen"][name]
        elif not case.zero.get("round_robin_gradients"):  # DeepSpeed's own look-ups go wrong with it
            found["weights"][name] = safe_get_full_fp32_param(weight).detach().clone().reshape(shape)
            for moment in ("exp_avg", "exp_avg_sq"):
                get = safe_get_full_optimizer_state if case.stage == 3 else _moment
                found[moment][name] = get(weight, moment).clone().reshape(shape)
    return found


def _moment(weight: Any, moment: str) -> Any:
    """A moment under stage 1 or 2, put together from what DeepSpeed knows of the live partitions."""
    import torch

    mapping = weight._hp_mapping
    whole = torch.zeros(weight.numel())
    if mapping is not None:
        flat = mapping.hp_fragment._base if mapping.hp_fragment._base is not None else mapping.hp_fragment
        wrapper = weight._zero_optimizer_of_test
        state = next(state for key, state in wrapper.optimizer.state.items() if key.data_ptr() == flat.data_ptr())
        ours, theirs = mapping.lp_fragment_address, mapping.hp_fragment_address
        whole[ours.start : ours.start + ours.numel] = state[moment][theirs.start : theirs.start + theirs.numel]
    torch.distributed.all_reduce(whole)
    return whole


def _consolidate(directory: Path) -> None:
    """What DeepSpeed's own tool reads of a checkpoint, and what it raises with tied weights and safetensors."""
    import torch
    from deepspeed.utils import zero_to_fp32

    found: dict[str, Any] = {"weights": {}, "error": "", "safetensors_error": ""}
    try:
        found["weights"] = {
            name: tensor.contiguous().clone()
            for name, tensor in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(directory)).items()
        }
        with tempfile.TemporaryDirectory() as out:
            try:
                zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(directory), out, safe_serialization=True)
            except Exception as error:  # noqa: BLE001
                found["safetensors_error"] = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001
        found["error"] = f"{type(error).__name__}: {error}"
    torch.save(found, directory / "fp32.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
