"""The part of `trainer.setup` that is Megatron's. Imports megatron-core only where it is called."""

from __future__ import annotations

import dataclasses
import importlib

import torch

from milepost.engines.base import TrainingEngine
from milepost.engines.megatron.install import check_installed
from milepost.engines.megatron.parallel import Parallel, start
from milepost.engines.optim import OptimizerSettings
from milepost.trainer.models import ModelSource
from milepost.trainer.ranks import Ranks, Share
from milepost.trainer.schema import MegatronConfig, TrainConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def deal_out(config: TrainConfig, ranks: Ranks) -> Ranks:
    """Make Megatron's process groups; the ranks, with what sequences are this one's. All ranks call it together.

    Raises CallError where megatron-core is missing, or the sizes do not go into the number of ranks.
    """
    check_installed()
    start(parallel_of(config.actor_rollout_ref.actor.megatron), ranks.device, config.trainer.seed)
    state = importlib.import_module("megatron.core.parallel_state")
    share = Share(
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
        state.get_data_parallel_group(),
        state.get_model_parallel_group(),
        state.get_model_parallel_src_rank(),
    )
    return dataclasses.replace(ranks, share=share)


def load_roles(
    config: TrainConfig,
    policy: ModelSource,
    critic: ModelSource,
    device: torch.device,
    optimizers: tuple[OptimizerSettings, OptimizerSettings],
) -> tuple[TrainingEngine, TrainingEngine]:
    """Actor and critic."""
    from milepost.trainer import megatron_models  # noqa: PLC0415  it is of use with megatron-core only

    actor, seed = config.actor_rollout_ref.actor, config.trainer.seed
    settings = megatron_models.MegatronSettings(
        parallel_of(actor.megatron),
        _DTYPES[actor.megatron.dtype],
        actor.megatron.use_distributed_optimizer,
        actor.checkpoint.megatron_format,
    )
    return (
        megatron_models.load_policy(policy, device, settings, optimizers[0], seed),
        megatron_models.load_critic(critic, device, settings, optimizers[1], seed),
    )


def parallel_of(config: MegatronConfig) -> Parallel:
    """The sizes that a config asks for."""
    stages = config.override_transformer_config
    return Parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
        config.sequence_parallel,
        stages.num_layers_in_first_pipeline_stage,
        stages.num_layers_in_last_pipeline_stage,
        stages.account_for_embedding_in_pipeline_split,
        stages.account_for_loss_in_pipeline_split,
    )
