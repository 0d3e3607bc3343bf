"""Real FSDP2 checkpoints of small models, sharded over two ranks in one launch, beside the models they came from."""

from __future__ import annotations

import json
from collections.abc import Callable
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
}
CHAT_TEMPLATE = "{# changed by the user #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n"
GENERATION = {"eos_token_id": [151643, 151645], "top_p": 0.8, "transformers_version": "4.57.0"}
BIG_ROWS = 32768  # x 2048 float32: 256 MiB


def make_zoo(root: Path) -> Path:
    """Fill `root` with a directory a case: `<case>/actor` as FSDP2 sharded it over two ranks, `<case>/reference` as
    transformers saved the same model before."""
    run_ranks(_make, 2, root)
    return root


def _make(root: Path) -> None:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        Qwen2Config,
        Qwen2ForTokenClassification,
        Qwen3MoeConfig,
    )

    torch.manual_seed(7)
    tied = AutoModelForCausalLM.from_config(Qwen2Config(**TINY, tie_word_embeddings=True))
    untied = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=False))
    moe = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            **TINY, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        )
    )
    critic = Qwen2ForTokenClassification(Qwen2Config(**TINY, num_labels=1))
    for case, model in (("tied", tied), ("untied", untied), ("moe", moe), ("critic", critic)):
        _write(root / case, model, layers=model.model.layers)
    _write_named(root / "prefixed", untied, lambda name: f"module._orig_mod._fsdp_wrapped_module.{name}")
    _write_named(root / "headless", tied, lambda name: name, drop="model.layers.1.")
    _write_custom(root / "custom")


def _write(directory: Path, model: Any, layers: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    role = directory / "actor"
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        model.save_pretrained(directory / "reference")
        _companions(role, model.config)
    dist.barrier()
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    torch.save(model.state_dict(), role / f"model_world_size_{world}_rank_{rank}.pt")


def _write_named(directory: Path, model: Any, name_of: Callable[[str], str], drop: str = "\0") -> None:
    """The state dict of an already sharded model under other names, or with a layer gone."""
    import torch
    import torch.distributed as dist

    role = directory / "actor"
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        _companions(role, model.config)
    dist.barrier()
    state = {name_of(name): value for name, value in model.state_dict().items() if not name.startswith(drop)}
    torch.save(state, role / f"model_world_size_{world}_rank_{rank}.pt")


def _write_custom(directory: Path) -> None:
    """A model type that milepost does not know, with what casts and replication must respect, and one big tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(3)
    whole = {
        "layers.0.weight": torch.randn(7, 5),
        "layers.0.gate.e_score_correction_bias": torch.randn(4),
        "norm.weight": torch.ones(16),
    }
    buffers = {"scale": torch.tensor(2.5), "steps": torch.tensor([9]), "positions": torch.arange(6)}
    sharded = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    role = directory / "actor"
    big = directory / "big"
    if rank == 0:
        for place in (role, big):
            (place / "huggingface").mkdir(parents=True)
            (place / "huggingface" / "config.json").write_text('{"model_type": "custom", "dtype": "float32"}')
        torch.save(whole | buffers, directory / "expected.pt")
    dist.barrier()
    torch.save(sharded | buffers, role / f"model_world_size_{world}_rank_{rank}.pt")
    large = distribute_tensor(torch.arange(BIG_ROWS, dtype=torch.float32)[:, None].expand(-1, 2048).contiguous(), mesh)
    torch.save({"big.weight": large}, big / f"model_world_size_{world}_rank_{rank}.pt")


def _companions(role: Path, config: Any) -> None:
    folder = role / "huggingface"
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0",  "odd": "spacing"}\n')
