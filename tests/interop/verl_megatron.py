"""verl's side of Megatron checkpoints, on one rank: its checkpoint manager saves a model of megatron-core, and its
merger merges what milepost converted. A module of its own, run in a real process; verl takes seconds to import."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import megatron_cpu
import torch
from megatron_checkpoints import PADDED
from megatron_models import Parallel, build, fill
from safetensors.torch import load_file


def save_and_merge(model: str, saved: str, converted: str, merged: str) -> None:
    """`saved`: a role's folder that verl is to write `model` into; `converted`: a role's folder that holds the model as
    milepost converted it, which verl is to merge into `merged`."""
    megatron_cpu.install()
    torch.set_grad_enabled(False)
    megatron_cpu.parallel()
    from megatron.core.models.gpt import gpt_layer_specs
    from verl.utils import device

    usual = gpt_layer_specs.get_gpt_decoder_block_spec

    def of_local_layers(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        config.bias_dropout_fusion = config.masked_softmax_fusion = False
        return usual(config, use_transformer_engine=False, **{**options, "normalization": "RMSNorm"})

    with (  # what verl asks of a GPU, and Transformer Engine's layers, which are not here
        patch.object(device, "get_nccl_backend", lambda: "gloo"),
        patch.object(device, "get_device_name", lambda: "cpu"),
        patch.object(device, "get_torch_device", lambda: torch.cpu),
        patch.object(gpt_layer_specs, "get_gpt_decoder_block_spec", of_local_layers),
    ):
        _save(Path(model), Path(saved))
        _merge(converted, merged)


def _save(model: Path, role: Path) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from transformers import AutoConfig
    from verl.trainer.config import CheckpointConfig
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    hf = AutoConfig.from_pretrained(model)
    (chunk,) = build(hf, Parallel(), PADDED)
    fill([chunk], hf, load_file(model / "model.safetensors"), PADDED)
    manager = MegatronCheckpointManager(
        config=SimpleNamespace(model=SimpleNamespace(path=str(model))),
        checkpoint_config=CheckpointConfig(save_contents=["model", "extra"], load_contents=["model", "extra"]),
        model_config=None,
        transformer_config=chunk.config,
        role="actor",
        model=[chunk],
        arch=hf.architectures[0],
        hf_config=hf,
        param_dtype=torch.float32,
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        processing_class=None,
        optimizer=None,
        optimizer_scheduler=None,
        use_distributed_optimizer=False,
        use_dist_checkpointing=True,
    )
    with patch.object(filesystem_async, "_results_queue", queue.Queue()):  # it would start a process to keep them
        manager.save_checkpoint(local_path=str(role), global_step=3)


def _merge(converted: str, merged: str) -> None:
    from megatron.core import parallel_state
    from verl.model_merger.__main__ import main

    arguments = ["merge", "--backend", "megatron", "--local_dir", converted, "--target_dir", merged]
    with (
        patch.object(sys, "argv", ["merge", *arguments, "--use_cpu_initialization", "--tie-word-embedding"]),
        patch.object(torch.distributed, "init_process_group", lambda *_, **__: None),  # it is there already
        patch.object(torch.distributed, "destroy_process_group", lambda *_, **__: None),
    ):
        parallel_state.destroy_model_parallel()  # the merger makes its own groups
        main()
