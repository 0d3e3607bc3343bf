"""Checkpoints of real shapes for measuring, made in one process: the ranks are played one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from milepost.layouts.fsdp import CONFIG_FILE, config_text, rank_file


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model by its sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    def config(self) -> Qwen2Config:
        """As config.json has it; embeddings tied, as Qwen2-0.5B's are."""
        return Qwen2Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        )


TINY = Shape(64, 128, 2, 4, 2, 1000)
HALF_B = Shape(896, 4864, 24, 14, 2, 151936)
"""Qwen2-0.5B: 494 M parameters, 1.98 GB in float32."""


def make(directory: Path, shape: Shape, world_size: int, *, sparse: bool = False) -> int:
    """Write the model files of every rank and `huggingface/`; returns the bytes of the weights.

    sparse: the files have their sizes and hold no data, so that size costs neither disk nor time
    """
    (directory / "huggingface").mkdir(parents=True)
    config = shape.config()
    config.save_pretrained(directory / "huggingface")
    (directory / CONFIG_FILE).write_text(config_text(world_size))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "huggingface"))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
            with FakeTensorMode() if sparse else contextlib.nullcontext():
                locals_ = {name: _local(sizes, rank, world_size, sparse) for name, sizes in shapes.items()}
            state = {
                name: DTensor.from_local(
                    local,
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=torch.Size(shapes[name]),
                    stride=_strides(shapes[name]),
                )
                for name, local in locals_.items()
            }
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
            with torch.serialization.skip_data(materialize_fake_tensors=True) if sparse else contextlib.nullcontext():
                torch.save(state, directory / rank_file("model", world_size, rank))
    return sum(4 * torch.Size(sizes).numel() for sizes in shapes.values())


def make_zero3(directory: Path, tag: str, shape: Shape, world_size: int, sub_group_size: int = 100_000_000) -> int:
    """Write a model in DeepSpeed's files of ZeRO stage 3, without moments, and `huggingface/`; returns the bytes of
    the weights.

    Each weight is flattened, padded and cut evenly over the ranks; a rank's parts lie one after the other in flat
    tensors of about `sub_group_size` elements. Facts: `milepost.layouts.zero.stage3`.
    """
    (directory / tag).mkdir(parents=True)
    (directory / "latest").write_text(tag)
    config = shape.config()
    config.save_pretrained(directory / "huggingface")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "huggingface"))
    groups: list[dict[str, torch.Size]] = [{}]
    filled = 0
    for name, tensor in model.named_parameters():
        if filled >= sub_group_size:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor.shape
        filled += -(-tensor.numel() // world_size)
    generator = torch.Generator().manual_seed(0)
    for rank in range(world_size):
        flat = []
        for group in groups:
            parts = []
            for sizes in group.values():
                part = -(-sizes.numel() // world_size)
                values = torch.randn(part, generator=generator)
                values[max(0, sizes.numel() - rank * part) :] = 0  # padding
                parts.append(values)
            flat.append(torch.cat(parts))
        names = [name for group in groups for name in group]
        state = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in (*names, "lm_head.weight")},
            "buffer_names": [],
            "param_shapes": groups,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {"lm_head.weight": "model.embed_tokens.weight"} if rank == 0 else {},
            "global_steps": 1,
            "dp_world_size": world_size,
            "ds_version": "0.19.8",
        }
        inner = {"state": {}, "param_groups": [{"params": list(range(len(groups)))}]}
        optimizer = {
            "zero_stage": 3,
            "partition_count": world_size,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": flat,
        }
        torch.save(state, directory / tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            directory / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return sum(4 * sizes.numel() for group in groups for sizes in group.values())


def _local(sizes: tuple[int, ...], rank: int, world_size: int, sparse: bool) -> torch.Tensor:
    part = -(-sizes[0] // world_size)
    rows = max(0, min(part, sizes[0] - rank * part))
    return torch.empty(rows, *sizes[1:]) if sparse else torch.randn(rows, *sizes[1:])


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(sizes, device="meta").stride()


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
