"""From a config to a trainer that is ready to run: models, data, reward, record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from milepost.checkpoint.comm import on_rank_0_at_length
from milepost.checkpoint.diary.events import EVENTS, EventLog
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.preemption import Durations, Preemption
from milepost.checkpoint.remote.mirror import try_at_start
from milepost.checkpoint.retention import Retention
from milepost.engines.fsdp import MESH_DIM
from milepost.errors import CallError
from milepost.layouts.huggingface import CONFIG, HuggingFaceLayout
from milepost.trainer import megatron_setup
from milepost.trainer.base_model import build_base_model, build_tokenizer
from milepost.trainer.data import PromptDataset
from milepost.trainer.experience import Collector, ForwardSizes, Judge
from milepost.trainer.kl import make_kl_controller
from milepost.trainer.lengths import check_positions, check_prompts
from milepost.trainer.logging import warm_start_bar
from milepost.trainer.loop import PpoTrainer
from milepost.trainer.models import (
    ModelSource,
    convert_gguf,
    load_tokenizer,
    special_tokens,
)
from milepost.trainer.ranks import Ranks
from milepost.trainer.reward import load_reward
from milepost.trainer.roles import load_models
from milepost.trainer.rollout import Sampling
from milepost.trainer.sampler import GlobalSampler
from milepost.trainer.schema import (
    MEGATRON,
    TrainConfig,
    TrainerConfig,
)
from milepost.trainer.task import addition_datasets
from milepost.trainer.validate import Validator
from milepost.units import parse_bytes

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
    late = _tokenizer_is_in_gguf(config)
    if not late:
        on_rank_0_at_length(ranks.comm, lambda: check_lengths(datasets_read, config, tokenizer_beforehand(config)))
    remote = config.trainer.remote_dir
    events = EventLog(run_directory(config) / EVENTS)
    if remote is not None and not attempt:
        # A restart need not find out again, and would wait where there is no network.
        on_rank_0_at_length(ranks.comm, lambda: try_at_start(remote, run_directory(config), events))
    policy_source, critic_source = prepare_models(config, ranks)
    tokenizer_path = config.actor_rollout_ref.model.tokenizer_path
    tokenizer = ranks.each(
        lambda: load_tokenizer(
            policy_source.directory if tokenizer_path is None else Path(tokenizer_path).expanduser(),
            trust_remote_code=policy_source.trust_remote_code,
        )
    )
    if late:
        on_rank_0_at_length(ranks.comm, lambda: check_lengths(datasets_read, config, tokenizer))
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
        on_rank_0_at_length(ranks.comm, lambda: _make_base_model(directory, config))
        return directory
    directory = Path(path).expanduser()
    if gguf_file is None:
        return directory
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", Path(gguf_file).stem)
    target = run_directory(config) / f"{_CONVERTED}_{name}"
    on_rank_0_at_length(ranks.comm, lambda: convert_gguf(directory, gguf_file, target))
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


def _tokenizer_is_in_gguf(config: TrainConfig) -> bool:
    """Whether the tokenizer is known only once a GGUF file has been converted."""
    model = config.actor_rollout_ref.model
    return model.path is not None and model.gguf_file is not None and model.tokenizer_path is None


def tokenizer_beforehand(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, where it is known before models are made."""
    model = config.actor_rollout_ref.model
    path = model.path if model.tokenizer_path is None else model.tokenizer_path
    if path is None:
        return build_tokenizer()
    return load_tokenizer(Path(path).expanduser(), trust_remote_code=model.trust_remote_code)


def check_lengths(datasets: Datasets, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse prompts that are too long, in files whose long prompts are not left out, and among the embedded ones."""
    data = config.data
    for name, files, dataset in (
        ("data.train_files", data.train_files, datasets.train),
        ("data.val_files", data.val_files, datasets.validation),
    ):
        if dataset is not None and not (files and data.filter_overlong_prompts):
            check_prompts(dataset, data, tokenizer, name)


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
