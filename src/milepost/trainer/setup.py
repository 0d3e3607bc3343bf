"""From a config to a trainer that is ready to run: models, data, reward, record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedTokenizerBase

from milepost.checkpoint.comm import on_rank_0
from milepost.checkpoint.diary.events import EVENTS, EventLog
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.preemption import Durations, Preemption
from milepost.checkpoint.remote.mirror import try_at_start
from milepost.checkpoint.retention import Retention
from milepost.engines.base import TrainingEngine
from milepost.engines.deepspeed.install import check_installed
from milepost.engines.deepspeed.setup import ZeroSettings, start
from milepost.engines.fsdp import MESH_DIM, Sharding
from milepost.engines.optim import OptimizerSettings
from milepost.errors import CallError
from milepost.layouts.huggingface import CONFIG, HuggingFaceLayout
from milepost.trainer import megatron_setup, zero_models
from milepost.trainer.base_model import build_base_model
from milepost.trainer.data import PromptDataset
from milepost.trainer.experience import Collector, ForwardSizes, Judge, Models
from milepost.trainer.kl import make_kl_controller
from milepost.trainer.logging import warm_start_bar
from milepost.trainer.loop import PpoTrainer
from milepost.trainer.models import (
    ModelSource,
    convert_gguf,
    load_critic,
    load_policy,
    load_tokenizer,
    special_tokens,
)
from milepost.trainer.ranks import Ranks
from milepost.trainer.reward import load_reward
from milepost.trainer.rollout import Sampling
from milepost.trainer.sampler import GlobalSampler
from milepost.trainer.schedule import lr_factor, schedule_steps
from milepost.trainer.schema import (
    DEEPSPEED,
    MEGATRON,
    DataConfig,
    DeepSpeedConfig,
    FsdpConfig,
    OptimConfig,
    TrainConfig,
    TrainerConfig,
)
from milepost.trainer.task import addition_datasets
from milepost.trainer.validate import Validator
from milepost.units import parse_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVERTED = "from_gguf"


def retention(trainer: TrainerConfig) -> Retention:
    """Which steps of a run stay."""
    return Retention(
        keep_last=trainer.max_actor_ckpt_to_keep,
        keep_every=trainer.keep_every,
        keep_best=trainer.keep_best,
        keep_best_count=trainer.keep_best_count,
        keep_best_mode=trainer.keep_best_mode,
        keep_exports=trainer.keep_exports,
    )


@dataclass(frozen=True)
class Datasets:
    """Prompts to train on, and held-out ones where there are any."""

    train: PromptDataset
    validation: PromptDataset | None


def build_trainer(
    config: TrainConfig,
    ranks: Ranks,
    *,
    run_id: str,
    attempt: int,
    preemption: Preemption,
    durations: Durations | None = None,
) -> PpoTrainer:
    """Put a run together. All ranks call it; what fails on one is raised on all."""
    # What is cheap to find wrong is looked at before models are made or loaded.
    reward = ranks.each(lambda: load_reward(config.reward.path, config.reward.reward_kwargs))
    datasets_read = ranks.each(lambda: read_datasets(config))
    remote = config.trainer.remote_dir
    events = EventLog(run_directory(config) / EVENTS)
    if (
        remote is not None and not attempt
    ):  # a restart need not find out again, and would wait where there is no network
        on_rank_0(ranks.comm, lambda: try_at_start(remote, run_directory(config), events))
    policy_source, critic_source = prepare_models(config, ranks)
    tokenizer_path = config.actor_rollout_ref.model.tokenizer_path
    tokenizer = ranks.each(
        lambda: load_tokenizer(
            policy_source.directory if tokenizer_path is None else Path(tokenizer_path).expanduser(),
            trust_remote_code=policy_source.trust_remote_code,
        )
    )
    datasets = ranks.each(lambda: filtered(datasets_read, config, tokenizer))
    total_steps = training_steps(config, len(datasets.train))
    if config.actor_rollout_ref.actor.strategy == MEGATRON:
        ranks = megatron_setup.deal_out(config, ranks)
    # Outside of `each`: the ranks meet in it.
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=(MESH_DIM,))
    models = ranks.each(lambda: load_models(config, mesh, ranks.device, policy_source, critic_source, total_steps))
    ranks.each(lambda: check_positions(models, config.data))
    judge = Judge(tokenizer, reward)
    tokens = ranks.each(lambda: special_tokens(policy_source, tokenizer))
    controller = make_kl_controller(config.algorithm.kl_ctrl)
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    sampler = ranks.each(lambda: GlobalSampler(datasets.train.fingerprint, seed, shuffle=config.data.shuffle))
    root = run_directory(config)
    actor = config.actor_rollout_ref.actor
    manager = CheckpointManager(
        root,
        models.roles,
        parts={"data": sampler, "kl": controller},
        retention=retention(config.trainer),
        remote=remote,
        comm=ranks.comm,
        events=events,
        fingerprint=fingerprint(config, policy_source, datasets),
        save_contents=actor.checkpoint.save_contents,
        load_contents=actor.checkpoint.load_contents,
        run_id=run_id,
        attempt=attempt,
        save_timeout=config.trainer.save_timeout,
        staging_limit=None if config.trainer.staging_limit is None else parse_bytes(config.trainer.staging_limit),
    )
    rollout = config.actor_rollout_ref.rollout
    collector = Collector(
        models,
        judge,
        Sampling(
            config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            do_sample=rollout.do_sample,
        ),
        tokens,
        ForwardSizes(
            policy=rollout.log_prob_micro_batch_size_per_gpu,
            reference=config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
            values=config.critic.forward_micro_batch_size_per_gpu,
        ),
        config.algorithm,
        controller,
        ranks,
        preemption.turn,
    )
    validator = None
    if datasets.validation is not None:
        held_out = Sampling(
            config.data.max_response_length,
            temperature=rollout.val_kwargs.temperature,
            top_p=rollout.val_kwargs.top_p,
            top_k=rollout.val_kwargs.top_k,
            do_sample=rollout.val_kwargs.do_sample,
        )
        validator = Validator(datasets.validation, judge, held_out, tokens, config.data, ranks, preemption.turn)
    return PpoTrainer(
        config,
        ranks,
        models,
        collector,
        controller,
        datasets.train,
        sampler,
        validator,
        manager,
        preemption,
        total_steps,
        attempt,
        durations,
    )


def run_directory(config: TrainConfig) -> Path:
    """The folder of the run."""
    return Path(config.trainer.default_local_dir).expanduser()


def prepare_models(config: TrainConfig, ranks: Ranks) -> tuple[ModelSource, ModelSource]:
    """The model directories of policy and critic. Rank 0 makes those that must be made first; the others wait."""
    model, critic = config.actor_rollout_ref.model, config.critic.model
    return (
        ModelSource(_directory(config, ranks, model.path, model.gguf_file), model.trust_remote_code),
        ModelSource(_directory(config, ranks, critic.path, critic.gguf_file), critic.trust_remote_code),
    )


def _directory(config: TrainConfig, ranks: Ranks, path: str | None, gguf_file: str | None) -> Path:
    if path is None:
        directory = Path(config.task.base_model_dir).expanduser()
        on_rank_0(ranks.comm, lambda: _make_base_model(directory, config))
        return directory
    directory = Path(path).expanduser()
    if gguf_file is None:
        return directory
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", Path(gguf_file).stem)
    target = run_directory(config) / f"{_CONVERTED}_{name}"
    on_rank_0(ranks.comm, lambda: convert_gguf(directory, gguf_file, target))
    return target


def _make_base_model(directory: Path, config: TrainConfig) -> None:
    with warm_start_bar() as show:
        build_base_model(directory, config.task, config.warm_start, show)


def read_datasets(config: TrainConfig) -> Datasets:
    """The prompts that the config names, or the embedded additions."""
    data = config.data

    def read(files: list[str], most: int) -> PromptDataset:
        return PromptDataset.from_files(
            files, prompt_key=data.prompt_key, ground_truth_key=data.ground_truth_key, max_samples=most
        )

    train, held_out = addition_datasets(config.task)
    if data.train_files:
        train = read(data.train_files, data.train_max_samples)
    validation: PromptDataset | None = None if data.train_files else held_out
    if data.val_files:
        validation = read(data.val_files, data.val_max_samples)
    return Datasets(train, validation)


def filtered(datasets: Datasets, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Without the prompts that are too long, where the config wants them out. The embedded ones are short."""
    data = config.data
    if not data.filter_overlong_prompts:
        return datasets

    def short(dataset: PromptDataset) -> PromptDataset:
        return dataset.without_overlong(tokenizer, data.max_prompt_length, data.apply_chat_template_kwargs)

    train, validation = datasets.train, datasets.validation
    return Datasets(
        short(train) if data.train_files else train,
        short(validation) if validation is not None and data.val_files else validation,
    )


def check_positions(models: Models, data: DataConfig) -> None:
    """Refuse sequences that are longer than the positions that a model has learned: it has no vector for those behind,
    and the first long response would end the run."""
    longest = data.max_prompt_length + data.max_response_length
    for key, model in (("actor_rollout_ref.model.path", models.policy), ("critic.model.path", models.value_model)):
        positions = learned_positions(model)
        if positions is not None and positions < longest:
            raise CallError(
                f"{key}: this model has learned {positions} positions, and data.max_prompt_length="
                f"{data.max_prompt_length} + data.max_response_length={data.max_response_length} is {longest}: lower "
                "them"
            )


def learned_positions(model: Any) -> int | None:
    """For how many positions a model has learned a vector; None for one that turns or biases by position, or none."""
    names = ("wpe", "embed_positions", "position_embeddings")
    found = [
        getattr(module, "num_embeddings", None)
        for name, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        if name.rpartition(".")[2] in names
    ]
    counts = [count for count in found if isinstance(count, int)]
    config = getattr(model, "config", None)
    # Some keep a few rows for padding: what the config says is what can be used.
    told = getattr(config, "max_position_embeddings", None)
    return min([*counts, *([told] if isinstance(told, int) else [])]) if counts else None


def training_steps(config: TrainConfig, prompts: int) -> int:
    """The last step: as set, or so many that all epochs' prompts have been seen."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    steps = config.trainer.total_epochs * prompts // config.data.train_batch_size
    if not steps:
        raise CallError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {prompts} prompts of "
            f"{config.trainer.total_epochs} epochs: there is no step to train"
        )
    return steps


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


def model_fingerprint(directory: Path) -> str:
    """xxh3_128 over a model's config and, for each file of weights, its name, size and first megabyte: another place of
    the same model is no other model, and reading gigabytes at every start is too much."""
    digest = xxhash.xxh3_128((directory / CONFIG).read_bytes())
    for path in HuggingFaceLayout().open(directory).files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 20))
    return digest.hexdigest()


def fingerprint(config: TrainConfig, policy: ModelSource, datasets: Datasets) -> dict[str, str]:
    """What a resume compares with the run that saved: settings that change what training does, and the data."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    return {
        "model": model_fingerprint(policy.directory),
        "data": str(datasets.train.fingerprint),
        "data.train_batch_size": str(config.data.train_batch_size),
        "actor_rollout_ref.actor.optim.lr": str(actor.optim.lr),
        "critic.optim.lr": str(config.critic.optim.lr),
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(actor.ppo_mini_batch_size),
        "actor_rollout_ref.actor.ppo_epochs": str(actor.ppo_epochs),
        "actor_rollout_ref.rollout.temperature": str(config.actor_rollout_ref.rollout.temperature),
        "algorithm.gamma": str(algorithm.gamma),
        "algorithm.lam": str(algorithm.lam),
        "trainer.seed": str(config.trainer.seed),
    }
