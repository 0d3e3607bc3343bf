"""Megatron engines of tiny models for tests, beside FSDP2's of the same models, and what all ranks hold together."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist

from milepost.checkpoint.live import LiveSink
from milepost.checkpoint.restore import fit, open_for
from milepost.engines.base import Engine, Inputs, PipelineEngine
from milepost.engines.optim import OptimizerSettings
from milepost.transfer import execute, plan

CPU = torch.device("cpu")
LR = 1e-2
SAME_STEPS = LR / 100
"""Weights no further apart have taken the same steps: Adam moves each by its rate, and where a gradient is hardly more
than Adam's epsilon, the rounding of another order of sums, which differs between processors, decides how much of it."""
WORDS = 33
TINY = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "norm_topk_prob": True},
}


def save_model(directory: Path, kind: str, **others: Any) -> Path:
    """A random model of 4 layers and 33 words, which no size of tensor parallelism divides, in transformers' form."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(kind))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **KINDS[kind], **others}))
    with torch.no_grad():  # biases and norms of a new model are all 0 and 1
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(directory)
    return directory


def settings(grad_clip: float = 1.0) -> OptimizerSettings:
    return OptimizerSettings(LR, (0.9, 0.95), 0.01, lambda step: 1 / (1 + step), grad_clip)


def make(directory: Path, parallel: Any, **options: Any) -> Any:
    """A Megatron engine over all ranks, cut anew: what was cut before in another way is of no use any more."""
    _cut_as(parallel)
    return remake(directory, parallel, **options)


def remake(
    directory: Path,
    parallel: Any,
    *,
    critic: bool = False,
    trained: bool = True,
    form: str = "classic",
    distributed: bool = False,
    dtype: torch.dtype = torch.float32,
    **clip: float,
) -> Any:
    """Another engine, cut as the last one."""
    from milepost.trainer.megatron_models import MegatronSettings, load_critic, load_policy
    from milepost.trainer.models import ModelSource

    load = load_critic if critic else load_policy
    optimizer = settings(**clip) if trained else None
    how = MegatronSettings(parallel, dtype, distributed, form)
    return load(ModelSource(directory), CPU, how, optimizer, seed=1)


def _cut_as(parallel: Any) -> None:
    """Megatron's process groups for a layout. It makes dozens, each with threads of its own, so they are made once."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from milepost.engines.megatron.parallel import start

    if parallel not in _GROUPS:
        parallel_state.destroy_model_parallel()
        start(parallel, CPU, seed=1)
        dist.barrier()  # gloo loses connections where some ranks make the next groups while others still make these
        _GROUPS[parallel] = {
            name: value
            for name, value in vars(parallel_state).items()
            if name.startswith("_") and not name.startswith("__") and not callable(value)
        }
    vars(parallel_state).update(_GROUPS[parallel])
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.set_rng_state(state)


_GROUPS: dict[Any, dict[str, Any]] = {}


def share() -> Any:
    """Whose sequences are whose, as the trainer finds out."""
    from megatron.core import parallel_state as state

    from milepost.trainer.ranks import Share

    return Share(
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
        state.get_data_parallel_group(),
        state.get_model_parallel_group(),
        state.get_model_parallel_src_rank(),
    )


def make_fsdp(directory: Path, *, critic: bool = False, **clip: float) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.engines.fsdp import MESH_DIM, Sharding
    from milepost.trainer.models import ModelSource, load_critic, load_policy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(MESH_DIM,))
    load = load_critic if critic else load_policy
    source, optimizer = ModelSource(directory), settings(**clip)
    return load(source, mesh, CPU, dtype=torch.float32, sharding=Sharding(), optimizer=optimizer, seed=1)


def sequences(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [rows, 9]: some rows are padded on the left, some on the right, some on both sides."""
    ids = torch.randint(3, WORDS, (rows, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 4] = 0
        mask[row, 9 - row % 3 :] = 0
    return ids, mask


KEEP = 6


def train(engine: Any, steps: int, ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[float, float]]:
    """Optimizer steps of either kind of engine on all rows, which the data-parallel ranks share, in two micro-batches:
    (loss, norm) of each. The loss is a token mean over all rows."""
    own = range(engine.data_rank, len(ids), engine.data_size)
    parts = [list(own)[: len(own) // 2], list(own)[len(own) // 2 :]]
    count = float(mask[:, -KEEP:].sum())

    def loss_of(rows: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, -KEEP:].float()
        each = logits.logsumexp(-1) + logits.square().mean(-1)
        return (each * mask[rows, -KEEP:]).sum() / count

    told = []
    for _ in range(steps):
        engine.model.train()
        losses: list[torch.Tensor] = []
        if isinstance(engine, PipelineEngine):

            def loss(number: int, outputs: Any) -> Any:
                value = loss_of(parts[number], outputs.logits)
                return value * engine.data_size, value.detach().clone()

            losses = engine.forward_backward([Inputs(ids[rows], mask[rows], KEEP) for rows in parts], loss)
        else:
            for rows in parts:
                position = (mask[rows].cumsum(-1) - 1).clamp(min=0)
                out = engine.forward(input_ids=ids[rows], attention_mask=mask[rows], position_ids=position)
                value = loss_of(rows, out.logits)
                losses.append(value.detach())
                engine.backward(value * engine.data_size, last=rows is parts[-1])
        total = torch.stack(list(losses)).sum()
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (engine.data_rank, float(total)))
        told.append((sum(dict(shares).values()), engine.step()))
        engine.advance_schedule()
    engine.model.eval()
    return told


def whole(engine: Engine) -> dict[str, np.ndarray]:
    """Every tensor of the training state whole. Boxes of ranks that hold the same must be the same bits."""
    own = {
        name: (tensor.shape, [(box, view.detach().numpy().copy()) for box, view in tensor.boxes])
        for name, tensor in engine.tensors().items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    assert len({tuple(held) for held in ranks}) == 1
    found: dict[str, np.ndarray] = {}
    for name, (shape, _) in own.items():
        value, seen = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for held in ranks:
            for box, part in held[name][1]:
                place = box.slices()
                assert part.shape == box.sizes
                assert (~seen[place] | (value[place] == part)).all(), f"{name}: ranks differ"
                value[place], seen[place] = part, True
        assert seen.all(), f"{name}: not all of it is held"
        found[name] = value
    return found


def load(engine: Engine, directory: Path) -> Mapping[str, str]:
    """As a resume loads a role's directory."""
    live = engine.tensors()
    fitted = fit("actor", open_for(directory, live), live)
    sink = LiveSink(fitted.wanted)
    execute(plan(fitted.index, sink.wanted(), 1 << 20), sink)
    remarks = engine.load_objects(fitted.index.objects)
    engine.finish_load()
    return remarks


def save_as_megatron(engine: Any, folder: Path) -> None:
    """What Megatron-LM writes in classic form: of a distributed optimizer, on the first data-parallel rank the state of
    all of them, gathered by Megatron itself; of another one its own `state_dict`."""
    from megatron.core import parallel_state

    from milepost.engines.megatron.model import on_device
    from milepost.engines.megatron.save import Place

    with on_device(CPU):
        if engine.updates.sharded:
            optimizer = engine.updates.megatron
            states = [inner.get_parameter_state_dp_zero(use_gloo_comm=False) for inner in optimizer.chained_optimizers]
            writes = any(state is not None for state in states)
        else:
            optimizer, states = _as_megatrons(engine), []
            writes = parallel_state.get_expert_data_parallel_rank() == 0
        directory = folder / Place.here().folder
        if writes:
            directory.mkdir(parents=True)
            chunks = engine.model.chunks
            names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
            models = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks, strict=True)}
            arguments = argparse.Namespace(data_parallel_size=engine.data_size)
            whole = {"args": arguments, "iteration": 2, "optimizer": optimizer.state_dict(), **models}
            torch.save(whole, directory / "model_optim_rng.pt")
        if writes and states:
            torch.save(states[0] if len(states) == 1 else states, directory / "distrib_optim.pt")
    dist.barrier()


def save_buckets(engine: Any, folder: Path) -> None:
    """A dist checkpoint as Megatron-LM and verl write it where they are asked for no other form of the optimizer: the
    buckets of its DistributedOptimizer (dp_reshardable), by Megatron itself."""
    import megatron_cpu
    from megatron.core import parallel_state

    from milepost.engines.megatron.model import on_device
    from milepost.engines.megatron.state import unwrapped

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",
    }
    engine.tensors()
    if dist.get_rank() == 0:
        (folder / "dist_ckpt").mkdir(parents=True)
    dist.barrier()
    with on_device(CPU):
        chunks = [unwrapped(chunk) for chunk in engine.model.chunks]
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        models = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
        optimizer = engine.updates.megatron.sharded_state_dict(models, metadata=metadata)
        megatron_cpu.save({**models, "optimizer": optimizer, "iteration": 2}, folder / "dist_ckpt")
    dist.barrier()


def _as_megatrons(engine: Any) -> Any:
    """Megatron's optimizer for a model in bfloat16, with the masters and moments of an engine's AdamW, in two groups of
    which one does not decay."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=LR, bf16=True, params_dtype=torch.bfloat16, weight_decay=0.01)
    optimizer = get_megatron_optimizer(config, engine._gradients.wrapped, use_gloo_process_groups=False)
    updates = engine.updates
    names = {parameter: name for name, parameter in updates.parameters.items()}
    for inner in optimizer.chained_optimizers:
        for parameters, masters in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                name = names[parameter]
                master.data.copy_(updates.masters[name].detach())
                inner.optimizer.state[master] = {"step": torch.tensor(updates.count(name)), **updates.state(name)}
    return optimizer


class Folder:
    """The plainest RoleFiles."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.directory / name).open("xb") as file:
            yield file

    def save(self, name: str, state: Any) -> None:
        with self.create(name) as file:
            torch.save(state, file)

    def save_row(self, name: str, values: Iterable[torch.Tensor | memoryview]) -> list[tuple[int, int]]:
        places = []
        with self.create(name) as file:
            for value in values:
                start = file.tell()
                if isinstance(value, memoryview):
                    file.write(value)
                else:
                    torch.save(value.detach().clone(), file)
                places.append((start, file.tell() - start))
        return places


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def expert_by_expert(held: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a transformers model, whose layers hold all experts as one, in the form of its files."""
    found: dict[str, np.ndarray] = {}
    for name, value in held.items():
        before, stacked, after = name.partition(".mlp.experts.")
        if not stacked:
            found[name] = value
            continue
        which, slash, moment = after.partition("/")
        for expert in range(EXPERTS["num_experts"]):
            part = value[expert] if value.shape else value
            names = ["gate_proj", "up_proj"] if which == "gate_up_proj" else ["down_proj"]
            halves = np.split(part, len(names)) if part.shape else [part] * len(names)
            for own, half in zip(names, halves, strict=True):
                found[f"{before}{stacked}{expert}.{own}.weight{slash}{moment}"] = half
    return found
