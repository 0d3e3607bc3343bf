"""Which engine holds which role, and how the config lays it out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from milepost.engines.base import TrainingEngine
from milepost.engines.deepspeed.install import check_installed
from milepost.engines.deepspeed.setup import ZeroSettings, start
from milepost.engines.fsdp import Sharding
from milepost.engines.optim import OptimizerSettings
from milepost.trainer import megatron_setup, zero_models
from milepost.trainer.experience import Models
from milepost.trainer.models import ModelSource, load_critic, load_policy
from milepost.trainer.schedule import lr_factor, schedule_steps
from milepost.trainer.schema import DEEPSPEED, MEGATRON, DeepSpeedConfig, FsdpConfig, OptimConfig, TrainConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_models(
    config: TrainConfig,
    mesh: DeviceMesh,
    device: torch.device,
    policy: ModelSource,
    critic: ModelSource,
    total_steps: int,
) -> Models:
    """Actor, critic and, where a KL is asked for, the reference. Here it is decided which engine holds which.

    The reference is under FSDP2 whatever trains the actor: nothing of it is ever updated or saved.
    """
    role, critic_role, seed = config.actor_rollout_ref.actor, config.critic, config.trainer.seed
    optimizer = _optimizer(role.optim, role.grad_clip, total_steps)
    critic_optimizer = _optimizer(critic_role.optim, critic_role.grad_clip, total_steps)
    if DEEPSPEED in (role.strategy, critic_role.strategy):
        check_installed()
        start(device)
    actor: TrainingEngine
    value_model: TrainingEngine
    if config.trainer.joint_engine:
        both = (optimizer, critic_optimizer)
        actor = zero_models.load_joint(policy, critic, device, _zero(role.deepspeed_config), both, seed)
        value_model = actor
    elif role.strategy == MEGATRON:
        actor, value_model = megatron_setup.load_roles(config, policy, critic, device, (optimizer, critic_optimizer))
    else:
        if role.strategy == DEEPSPEED:
            actor = zero_models.load_policy(policy, device, _zero(role.deepspeed_config), optimizer, seed)
        else:
            actor = load_policy(policy, mesh, device, **_fsdp(role.fsdp_config), optimizer=optimizer, seed=seed)
        if critic_role.strategy == DEEPSPEED:
            zero = _zero(critic_role.deepspeed_config)
            value_model = zero_models.load_critic(critic, device, zero, critic_optimizer, seed)
        else:
            fsdp = _fsdp(critic_role.fsdp_config)
            value_model = load_critic(critic, mesh, device, **fsdp, optimizer=critic_optimizer, seed=seed)
    reference = None
    if config.algorithm.use_kl_in_reward or role.use_kl_loss:
        fsdp = _fsdp(role.fsdp_config)
        if role.strategy == DEEPSPEED:
            fsdp = _as_zero(role.deepspeed_config)
        elif role.strategy == MEGATRON:
            fsdp = {"dtype": _DTYPES[role.megatron.dtype], "sharding": Sharding(_DTYPES[role.megatron.dtype])}
        reference = load_policy(policy, mesh, device, **fsdp, optimizer=None, seed=seed)
    return Models(actor, value_model, reference)


def _fsdp(config: FsdpConfig) -> dict[str, Any]:
    sharding = Sharding(_DTYPES[config.dtype], _DTYPES[config.reduce_dtype], config.reshard_after_forward)
    return {"dtype": _DTYPES[config.model_dtype], "sharding": sharding}


def _as_zero(config: DeepSpeedConfig) -> dict[str, Any]:
    """FSDP2 of a frozen model whose forward computes what that of the same weights under ZeRO does."""
    return {"dtype": _DTYPES[config.dtype], "sharding": Sharding(_DTYPES[config.dtype])}


def _zero(config: DeepSpeedConfig) -> ZeroSettings:
    return ZeroSettings(
        config.zero_stage,
        _DTYPES[config.dtype],
        _DTYPES[config.reduce_dtype],
        config.offload_optimizer,
        config.ds_config,
    )


def _optimizer(config: OptimConfig, grad_clip: float, total_steps: int) -> OptimizerSettings:
    total, warmup = schedule_steps(config, total_steps)

    def factor(step: int) -> float:
        return lr_factor(
            step,
            kind=config.lr_scheduler_type,
            total_steps=total,
            warmup_steps=warmup,
            min_lr_ratio=config.min_lr_ratio,
        )

    beta1, beta2 = config.betas
    return OptimizerSettings(config.lr, (beta1, beta2), config.weight_decay, factor, grad_clip)
