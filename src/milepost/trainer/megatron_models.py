"""From a Hugging Face model directory to a Megatron engine, as `trainer.models` does it for FSDP2.

The weights' way is the same: each rank reads the bytes of its own boxes. transformers' model, without memory, says what
a directory must hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from milepost.engines.megatron.engine import MegatronEngine
from milepost.engines.megatron.model import build_chunks
from milepost.engines.megatron.parallel import Parallel
from milepost.engines.megatron.pipeline import PipelineModel
from milepost.engines.megatron.save import CLASSIC
from milepost.engines.optim import OptimizerSettings
from milepost.layouts.huggingface import read_config
from milepost.mapping import FAMILIES, value_head_config
from milepost.trainer.models import ModelSource, critic_on_meta, fill_from_directory, policy_on_meta, tied_names


@dataclass(frozen=True)
class MegatronSettings:
    """How a model is cut, in which dtype it computes, whether data-parallel ranks share out its optimizer, and in which
    form it is saved."""

    parallel: Parallel
    dtype: torch.dtype = torch.float32
    distributed: bool = False
    form: str = CLASSIC


def load_policy(
    source: ModelSource,
    device: torch.device,
    settings: MegatronSettings,
    optimizer: OptimizerSettings | None,
    seed: int,
) -> MegatronEngine:
    """A causal language model. `engines.megatron.parallel.start` comes before."""
    config = read_config(source.directory)
    return _finish(policy_on_meta(source, settings.dtype), source, config, device, settings, optimizer, seed, None)


def load_critic(
    source: ModelSource,
    device: torch.device,
    settings: MegatronSettings,
    optimizer: OptimizerSettings | None,
    seed: int,
) -> MegatronEngine:
    """A token classifier with one label on the same backbone. A head that the directory lacks is made from `seed`."""
    config = value_head_config(read_config(source.directory))
    model = critic_on_meta(source, settings.dtype)
    return _finish(model, source, config, device, settings, optimizer, seed, json.dumps(config, indent=2))


def _finish(
    model: Any,
    source: ModelSource,
    config: Mapping[str, Any],
    device: torch.device,
    settings: MegatronSettings,
    optimizer: OptimizerSettings | None,
    seed: int,
    config_text: str | None,
) -> MegatronEngine:
    """Build this rank's part, and fill it from the directory."""
    chunks = build_chunks(config, settings.parallel, device, settings.dtype)
    known = FAMILIES[config["model_type"]].settings(config)
    vocabulary = int(known["vocab_size"]) if config_text is None else None
    engine = MegatronEngine(
        PipelineModel(chunks, settings.parallel, vocabulary, device),
        config,
        optimizer=optimizer,
        distributed=settings.distributed,
        form=settings.form,
        seed=seed,
        companions=source.directory,
        config_text=config_text,
    )
    fill_from_directory(engine, model, source.directory, tied_names(model), seed)
    engine.finish_load()
    engine.model.eval()
    return engine
