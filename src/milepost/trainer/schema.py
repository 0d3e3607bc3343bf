"""Every config key, once: its type, its default and its meaning.

The dataclasses here are the only place where a key exists. `config.py` merges files and overrides into them, prints
them, and writes `configs/ppo_trainer.yaml` from them. Names and meanings follow verl's where verl has the key; the
defaults are those for a real model; `embedded.py` holds what the embedded additions, which need no download, set.

A default such as `II("critic.model.path")` is an OmegaConf interpolation: the value of that other key, unless this
one is set. `II(".save_contents")` is relative to the section it stands in.
"""

# ruff: noqa: RUF009  (key() and section() return dataclass fields, one for each use)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import II

DTYPES = {"fp32": ("float32",), "bf16": ("bfloat16",), "fp16": ("float16", "half")}
FSDP2, DEEPSPEED, MEGATRON = "fsdp2", "deepspeed", "megatron"
STRATEGIES = {FSDP2: ("fsdp",), DEEPSPEED: (), MEGATRON: ()}
MEGATRON_FORMS = ("classic", "dist")
ZERO_DTYPES = {name: DTYPES[name] for name in ("fp32", "bf16")}
MEGATRON_DTYPES = ZERO_DTYPES
SAVEABLE = ("model", "optimizer", "extra", "hf_model")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
KL_KINDS = {"kl": ("k1",), "abs": (), "mse": ("k2",), "low_var_kl": ("k3",)}


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    length: int | None = None,
) -> Any:
    """A dataclass field for one config key.

    Args:
        default: its value where nobody sets it; a list or dict is copied for each instance.
        meaning: one line, shown by `milepost config`.
        choices: the values it may have; for a list, each element. A mapping also names accepted spellings of each.
        minimum, above, maximum: the range of a number, `above` being exclusive. `None` and, where the meaning says
            so, -1 stand outside it.
        length: how many elements a list must have.
    """
    named = choices if isinstance(choices, Mapping) else dict.fromkeys(choices or (), ())
    metadata = {
        "help": meaning,
        "choices": tuple(named),
        "spellings": {other: name for name, others in named.items() for other in others},
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "length": length,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, meaning: str) -> Any:
    """A dataclass field for a section, holding `kind()` by default."""
    return field(default_factory=kind, metadata={"help": meaning})


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = key([], "JSONL or parquet files of training prompts; empty: the embedded additions")
    val_files: list[str] = key([], "files of held-out prompts; empty: the embedded ones, or none if train_files is set")
    prompt_key: str = key("prompt", "column that holds the prompt: text, or a list of chat messages")
    ground_truth_key: str = key(
        "ground_truth", "column with what the reward compares to; a dot enters it: reward_model.ground_truth"
    )
    train_max_samples: int = key(-1, "use only the first so many training prompts; -1: all", minimum=-1)
    val_max_samples: int = key(-1, "use only the first so many held-out prompts; -1: all", minimum=-1)
    train_batch_size: int = key(256, "prompts per training step, over all processes", minimum=1)
    val_batch_size: int | None = key(
        None, "prompts per generation at validation, over all processes; null: all at once", minimum=1
    )
    max_prompt_length: int = key(512, "longest prompt, in tokens", minimum=1)
    max_response_length: int = key(512, "longest response, in tokens", minimum=1)
    filter_overlong_prompts: bool = key(False, "leave prompts longer than max_prompt_length out of the data set")
    truncation: str = key(
        "error",
        "a prompt that is too long: stop, or drop tokens at its left or right end",
        choices=("error", "left", "right"),
    )
    shuffle: bool = key(True, "visit the training prompts in a seeded random order, another one each epoch")
    seed: int | None = key(None, "seed of that order; null: trainer.seed", minimum=0)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "extra variables for the tokenizer's chat template")


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = key(None, "local Hugging Face model directory; null: the embedded base model")
    tokenizer_path: str | None = key(None, "directory of the tokenizer; null: the model's own")
    gguf_file: str | None = key(None, "load the weights from this GGUF file in `path` (extra: smollm2)")
    trust_remote_code: bool = key(False, "run the Python code that lies in the model directory")


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(1e-6, "learning rate of AdamW after the warm-up", minimum=0)
    betas: list[float] = key([0.9, 0.999], "decay of the running means of AdamW", length=2, minimum=0, maximum=1)
    weight_decay: float = key(0.01, "decoupled weight decay", minimum=0)
    lr_warmup_steps: int = key(-1, "steps in which the rate rises from 0; -1: by lr_warmup_steps_ratio", minimum=-1)
    lr_warmup_steps_ratio: float = key(0.0, "the same as a fraction of total_training_steps", minimum=0, maximum=1)
    lr_scheduler_type: str = key(
        "constant", "course of the rate after the warm-up", choices=("constant", "cosine", "linear")
    )
    min_lr_ratio: float = key(0.0, "where cosine and linear end, as a fraction of lr", minimum=0, maximum=1)
    total_training_steps: int = key(-1, "length of the schedule; -1: that of the training", minimum=-1)


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    lr: float = key(1e-5, "learning rate of AdamW after the warm-up", minimum=0)


@dataclass(frozen=True)
class FsdpConfig:
    model_dtype: str = key("fp32", "dtype of the sharded weights and of the moments", choices=DTYPES)
    dtype: str = key("bf16", "dtype of the gathered weights in forward and backward", choices=DTYPES)
    reduce_dtype: str = key("fp32", "dtype in which gradients are summed over the processes", choices=DTYPES)
    reshard_after_forward: bool = key(
        True, "drop gathered weights after each forward; false: hold them, which takes memory"
    )


@dataclass(frozen=True)
class DeepSpeedConfig:
    zero_stage: int = key(
        3, "what is cut over the processes: 1 moments, 2 gradients too, 3 weights too", minimum=1, maximum=3
    )
    dtype: str = key(
        "bf16", "dtype of the weights in forward and backward; the optimizer's are fp32", choices=ZERO_DTYPES
    )
    reduce_dtype: str = key("fp32", "dtype in which gradients are summed over the processes", choices=ZERO_DTYPES)
    offload_optimizer: bool = key(
        False, "keep moments and fp32 weights in host memory, for DeepSpeedCPUAdam, which is compiled once"
    )
    ds_config: dict[str, Any] = key({}, "further keys of DeepSpeed's own config, laid over what follows from the above")


def _as_the_actor(name: str, meaning: str, **rule: Any) -> Any:
    return key(II(f"actor_rollout_ref.actor.deepspeed_config.{name}"), meaning, **rule)


@dataclass(frozen=True)
class CriticDeepSpeedConfig(DeepSpeedConfig):
    zero_stage: int = _as_the_actor("zero_stage", "as the actor's", minimum=1, maximum=3)
    dtype: str = _as_the_actor("dtype", "as the actor's", choices=ZERO_DTYPES)
    reduce_dtype: str = _as_the_actor("reduce_dtype", "as the actor's", choices=ZERO_DTYPES)
    offload_optimizer: bool = _as_the_actor("offload_optimizer", "as the actor's")
    ds_config: dict[str, Any] = _as_the_actor("ds_config", "as the actor's")


@dataclass(frozen=True)
class TransformerOverrides:
    num_layers_in_first_pipeline_stage: int | None = key(
        None, "layers of the first stage; null: as many as each of the others", minimum=1
    )
    num_layers_in_last_pipeline_stage: int | None = key(
        None, "layers of the last stage; null: as many as each of the others", minimum=1
    )
    account_for_embedding_in_pipeline_split: bool = key(
        False, "divide the layers as if the embedding were one, so that the first stage has one less"
    )
    account_for_loss_in_pipeline_split: bool = key(
        False, "divide the layers as if the loss were one, so that the last stage has one less"
    )


@dataclass(frozen=True)
class MegatronConfig:
    tensor_model_parallel_size: int = key(1, "processes that each hold a part of every matrix", minimum=1)
    pipeline_model_parallel_size: int = key(1, "stages, each with its own layers", minimum=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "chunks of layers that each stage holds in turn; null: one", minimum=2
    )
    expert_model_parallel_size: int = key(
        1, "processes over which the experts are dealt out; they see different sequences", minimum=1
    )
    expert_tensor_parallel_size: int | None = key(
        None,
        "processes that each hold a part of an expert; null: tensor_model_parallel_size",
        minimum=1,
    )
    sequence_parallel: bool | None = key(
        None, "cut what lies between matrices along the sequence too; null: with experts only, which need it"
    )
    dtype: str = key(
        "fp32", "dtype of the weights in forward and backward; the optimizer's are fp32", choices=MEGATRON_DTYPES
    )
    use_distributed_optimizer: bool = key(
        False, "Megatron's distributed optimizer: data-parallel processes share out fp32 weights and moments"
    )
    override_transformer_config: TransformerOverrides = section(
        TransformerOverrides, "how many layers the stages of the pipeline have"
    )


def _as_the_actors_megatron(name: str, **rule: Any) -> Any:
    return key(II(f"actor_rollout_ref.actor.megatron.{name}"), "as the actor's", **rule)


@dataclass(frozen=True)
class CriticTransformerOverrides(TransformerOverrides):
    num_layers_in_first_pipeline_stage: int | None = _as_the_actors_megatron(
        "override_transformer_config.num_layers_in_first_pipeline_stage", minimum=1
    )
    num_layers_in_last_pipeline_stage: int | None = _as_the_actors_megatron(
        "override_transformer_config.num_layers_in_last_pipeline_stage", minimum=1
    )
    account_for_embedding_in_pipeline_split: bool = _as_the_actors_megatron(
        "override_transformer_config.account_for_embedding_in_pipeline_split"
    )
    account_for_loss_in_pipeline_split: bool = _as_the_actors_megatron(
        "override_transformer_config.account_for_loss_in_pipeline_split"
    )


@dataclass(frozen=True)
class CriticMegatronConfig(MegatronConfig):
    tensor_model_parallel_size: int = _as_the_actors_megatron("tensor_model_parallel_size", minimum=1)
    pipeline_model_parallel_size: int = _as_the_actors_megatron("pipeline_model_parallel_size", minimum=1)
    virtual_pipeline_model_parallel_size: int | None = _as_the_actors_megatron(
        "virtual_pipeline_model_parallel_size", minimum=2
    )
    expert_model_parallel_size: int = _as_the_actors_megatron("expert_model_parallel_size", minimum=1)
    expert_tensor_parallel_size: int | None = _as_the_actors_megatron("expert_tensor_parallel_size", minimum=1)
    sequence_parallel: bool | None = _as_the_actors_megatron("sequence_parallel")
    dtype: str = _as_the_actors_megatron("dtype", choices=MEGATRON_DTYPES)
    use_distributed_optimizer: bool = _as_the_actors_megatron("use_distributed_optimizer")
    override_transformer_config: CriticTransformerOverrides = section(
        CriticTransformerOverrides, "how many layers the critic's stages have"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "what a step holds; the first three go together, hf_model adds Hugging Face weights",
        choices=SAVEABLE,
    )
    load_contents: list[str] = key(II(".save_contents"), "what a resume reads", choices=SAVEABLE)
    megatron_format: str = key(
        "classic", "strategy megatron: a file for each rank, or Megatron's dist_checkpointing", choices=MEGATRON_FORMS
    )
    async_save: bool = key(
        False, "write steps while training goes on: it waits only for a copy of the state in memory; the last one waits"
    )


@dataclass(frozen=True)
class CriticCheckpointConfig(CheckpointConfig):
    save_contents: list[str] = key(
        II("actor_rollout_ref.actor.checkpoint.save_contents"),
        "as the actor's: one step holds both",
        choices=SAVEABLE,
    )
    load_contents: list[str] = key(
        II("actor_rollout_ref.actor.checkpoint.load_contents"),
        "as the actor's: one step holds both",
        choices=SAVEABLE,
    )
    megatron_format: str = key(
        II("actor_rollout_ref.actor.checkpoint.megatron_format"), "as the actor's", choices=MEGATRON_FORMS
    )
    async_save: bool = key(II("actor_rollout_ref.actor.checkpoint.async_save"), "as the actor's: one step holds both")


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = key("fsdp2", "training engine", choices=STRATEGIES)
    ppo_mini_batch_size: int = key(128, "sequences per optimizer update, over all processes", minimum=1)
    ppo_micro_batch_size_per_gpu: int = key(8, "sequences per forward and backward of one process", minimum=1)
    ppo_epochs: int = key(1, "passes over the batch of one step", minimum=1)
    clip_ratio: float = key(0.2, "PPO's epsilon: how far the probability ratio counts", minimum=0)
    clip_ratio_low: float | None = key(None, "epsilon below 1; null: clip_ratio", minimum=0, maximum=1)
    clip_ratio_high: float | None = key(None, "epsilon above 1; null: clip_ratio", minimum=0)
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", minimum=0)
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    use_kl_loss: bool = key(False, "add the KL to the reference model to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", minimum=0)
    kl_loss_type: str = key("low_var_kl", "estimator of that KL", choices=KL_KINDS)
    optim: OptimConfig = section(OptimConfig, "optimizer and learning rate of the actor")
    fsdp_config: FsdpConfig = section(FsdpConfig, "strategy fsdp2: sharding and dtypes of the actor and the reference")
    deepspeed_config: DeepSpeedConfig = section(DeepSpeedConfig, "strategy deepspeed: ZeRO and dtypes of the actor")
    megatron: MegatronConfig = section(MegatronConfig, "strategy megatron: how actor and critic are cut")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what a step holds of the actor")


@dataclass(frozen=True)
class ValidationSamplingConfig:
    temperature: float = key(0.0, "divides the logits; 0 with do_sample=false: greedy", minimum=0)
    top_p: float = key(1.0, "sample from the likeliest tokens up to this mass", above=0, maximum=1)
    top_k: int = key(-1, "sample from so many likeliest tokens; -1: all", minimum=-1)
    do_sample: bool = key(False, "sample; false: always the likeliest token")


@dataclass(frozen=True)
class RolloutConfig:
    temperature: float = key(1.0, "divides the logits when sampling and in every log-prob", above=0)
    top_p: float = key(1.0, "sample from the likeliest tokens up to this mass", above=0, maximum=1)
    top_k: int = key(-1, "sample from so many likeliest tokens; -1: all", minimum=-1)
    do_sample: bool = key(True, "sample; false: always the likeliest token")
    log_prob_micro_batch_size_per_gpu: int = key(
        II("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        "sequences per forward of one process when log-probs are computed",
        minimum=1,
    )
    val_kwargs: ValidationSamplingConfig = section(ValidationSamplingConfig, "sampling at validation")


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int = key(
        II("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"),
        "sequences per forward of one process of the reference",
        minimum=1,
    )


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = section(ModelConfig, "the model that is trained, and its frozen reference")
    actor: ActorConfig = section(ActorConfig, "the policy update")
    rollout: RolloutConfig = section(RolloutConfig, "generation of responses")
    ref: RefConfig = section(RefConfig, "the frozen reference")


@dataclass(frozen=True)
class CriticModelConfig:
    path: str | None = key(II("actor_rollout_ref.model.path"), "model whose backbone the critic starts from")
    gguf_file: str | None = key(II("actor_rollout_ref.model.gguf_file"), "load it from this GGUF file in `path`")
    trust_remote_code: bool = key(
        II("actor_rollout_ref.model.trust_remote_code"), "run the Python code that lies in the model directory"
    )


@dataclass(frozen=True)
class CriticConfig:
    strategy: str = key(II("actor_rollout_ref.actor.strategy"), "training engine", choices=STRATEGIES)
    ppo_mini_batch_size: int = key(
        II("actor_rollout_ref.actor.ppo_mini_batch_size"),
        "sequences per optimizer update, over all processes",
        minimum=1,
    )
    ppo_micro_batch_size_per_gpu: int = key(
        II("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        "sequences per forward and backward of one process",
        minimum=1,
    )
    forward_micro_batch_size_per_gpu: int = key(
        II(".ppo_micro_batch_size_per_gpu"), "sequences per forward when values are computed", minimum=1
    )
    ppo_epochs: int = key(II("actor_rollout_ref.actor.ppo_epochs"), "passes over the batch of one step", minimum=1)
    cliprange_value: float = key(0.5, "how far a value may move from its old one in the loss", above=0)
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    model: CriticModelConfig = section(CriticModelConfig, "the backbone of the critic")
    optim: CriticOptimConfig = section(CriticOptimConfig, "optimizer and learning rate of the critic")
    fsdp_config: FsdpConfig = section(FsdpConfig, "strategy fsdp2: sharding and dtypes of the critic")
    deepspeed_config: CriticDeepSpeedConfig = section(
        CriticDeepSpeedConfig, "strategy deepspeed: ZeRO and dtypes of the critic"
    )
    megatron: CriticMegatronConfig = section(CriticMegatronConfig, "strategy megatron: how the critic is cut")
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig, "what a step holds of the critic")


@dataclass(frozen=True)
class KLControlConfig:
    type: str = key("fixed", "hold the coefficient, or steer it to target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "coefficient of the KL in the reward; adaptive: its first value", minimum=0)
    horizon: int = key(10000, "adaptive: sequences over which the coefficient follows", minimum=1)
    target_kl: float = key(0.1, "adaptive: KL per token to keep, in nats", above=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    gamma: float = key(1.0, "discount per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda of GAE: 0 trusts the critic, 1 the observed rewards", minimum=0, maximum=1)
    adv_estimator: str = key("gae", "estimator of the advantage", choices=("gae",))
    whiten_advantages: bool = key(True, "scale advantages to mean 0, variance 1 over the whole batch")
    use_kl_in_reward: bool = key(True, "subtract the KL to the reference from each token's reward")
    kl_penalty: str = key("kl", "estimator of that KL", choices=KL_KINDS)
    kl_ctrl: KLControlConfig = section(KLControlConfig, "coefficient of the KL in the reward")


@dataclass(frozen=True)
class RewardConfig:
    path: str | None = key(None, "reward function, as module:function or file.py:function; null: the additions'")
    reward_kwargs: dict[str, Any] = key({}, "keyword arguments passed to it at every call")


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str = key("milepost", "first folder of the run, and its project in the trackers")
    experiment_name: str = key("ppo", "second folder of the run, and its name in the trackers")
    default_local_dir: str = key("checkpoints/${trainer.project_name}/${trainer.experiment_name}", "folder of the run")
    total_epochs: int = key(30, "passes over the training prompts", minimum=1)
    total_training_steps: int | None = key(None, "steps to train; null: by total_epochs", minimum=1)
    save_freq: int = key(10, "save every so many steps, and the last; -1: only the last", minimum=-1)
    test_freq: int = key(10, "validate every so many steps, and after the last; -1: never", minimum=-1)
    val_before_train: bool = key(True, "validate before the first step too")
    joint_engine: bool = key(
        False, "strategy deepspeed: one engine holds policy and value model, and one optimizer step updates both"
    )
    critic_warmup: int = key(0, "first steps in which only the critic is trained", minimum=0)
    resume_mode: str = key(
        "auto",
        "go on from the newest good step, start anew, or go on from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "the global_step_N folder that resume_mode=resume_path reads")
    max_actor_ckpt_to_keep: int | None = key(
        None, "newest steps to keep; null: all. A step holds actor and critic, so one number rules both", minimum=1
    )
    max_critic_ckpt_to_keep: int | None = key(
        II(".max_actor_ckpt_to_keep"), "the same number again, as verl spells it for the critic", minimum=1
    )
    async_save: bool = key(
        II("actor_rollout_ref.actor.checkpoint.async_save"), "the same as actor_rollout_ref.actor.checkpoint.async_save"
    )
    staging_limit: str | None = key(
        None,
        "async_save: most memory of a process for the copy of its state, such as 8GiB; what is beyond it is written "
        "while training waits. null: as much as its state has",
    )
    keep_every: int | None = key(
        None, "steps whose number is a multiple of this stay, beside max_actor_ckpt_to_keep", minimum=1
    )
    keep_best: str | None = key(
        None,
        "the step with the best value of this metric (critic/score/mean, val/...) stays, beside max_actor_ckpt_to_keep",
    )
    keep_best_count: int = key(1, "how many of the best stay", minimum=1)
    keep_best_mode: str = key("max", "what is best", choices=("max", "min"))
    keep_exports: int | None = key(
        None, "newest steps that keep what hf_model adds to save_contents; null: all that stay", minimum=0
    )
    remote_dir: str | None = key(
        None,
        "URL (s3://bucket/run) to which steps are uploaded too, and from which a new machine goes on; an upload that "
        "fails is told of and tried again, and is an error at the end of the run only; null: none",
    )
    on_save_error: str = key(
        "raise", "a step that cannot be saved: end the run, or tell of it and train on", choices=("raise", "warn")
    )
    save_timeout: float = key(
        1800.0, "seconds after which a save is given up on all ranks: a file system that hangs never answers", above=0
    )
    stop_signals: list[str] = key(
        ["SIGTERM", "SIGUSR1"],
        "signals, to any process of the run, on which all ranks save and exit with status 75",
        choices={name: (name.removeprefix("SIG"),) for name in SIGNALS},
    )
    shutdown_timeout: float = key(
        600.0, "seconds after such a signal, or after machines have come, until workers are killed", above=0
    )
    esi_deadline_env: str | None = key(
        None,
        "environment variable with the unix time at which the machine goes, such as the end of a capacity block: the "
        "run saves before, and exits with 75",
    )
    esi_redundant_time: float = key(
        60.0, "seconds to be left before that time, beyond the longest step and save of late", minimum=0
    )
    stall_action: str = key(
        "warn",
        "a phase that hangs: tell of it and write all stacks; restart: end the workers too, so that all "
        "start again; off: do not watch",
        choices=("warn", "restart", "off"),
    )
    stall_factor: float = key(
        10.0, "a phase hangs once it takes so many times as long as it did before, and at least stall_floor", minimum=1
    )
    stall_floor: float = key(
        600.0,
        "seconds below which no phase counts as hanging; where nothing is known of it yet, three times as many",
        above=0,
    )
    stall_once: float = key(
        3600.0,
        "seconds after which that hangs which comes once a start: file locks, models, the resume with what it fetches, "
        "the end with what it uploads",
        above=0,
    )
    nnodes: int = key(1, "machines", minimum=1)
    n_gpus_per_node: int = key(1, "processes per machine, with or without GPUs", minimum=1)
    logger: list[str] = key(["console", "tensorboard"], "where metrics go", choices=("console", "tensorboard"))
    seed: int = key(1, "seed of weights, sampling and data order", minimum=0)
    deterministic: bool = key(True, "refuse operations that may differ from run to run; on a GPU warn of them")
    device: str = key("auto", "where to train; auto: cuda where there is one", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class TaskConfig:
    base_model_dir: str = key("${trainer.default_local_dir}/base_model", "where the embedded base model is made, once")
    max_first: int = key(99, "largest first number", minimum=0)
    max_second: int = key(9, "largest second number", minimum=0)
    val_size: int = key(128, "additions held out; all others are trained on", minimum=1)
    seed: int = key(1, "seed of the additions and of the base model", minimum=0)


@dataclass(frozen=True)
class WarmStartConfig:
    hidden_size: int = key(96, "width of the model", minimum=1)
    intermediate_size: int = key(256, "width of its MLP", minimum=1)
    num_hidden_layers: int = key(2, "layers", minimum=1)
    num_attention_heads: int = key(4, "attention heads", minimum=1)
    num_key_value_heads: int = key(2, "key and value heads", minimum=1)
    slip_rate: float = key(
        0.6, "fraction of the examples it learns from whose sum is one too low", minimum=0, maximum=1
    )
    steps: int = key(180, "supervised steps; 0: random weights", minimum=0)
    batch_size: int = key(128, "additions per supervised step", minimum=1)
    lr: float = key(3e-3, "highest learning rate of the supervised steps", above=0)


@dataclass(frozen=True)
class TrainConfig:
    """The whole config of `milepost train`."""

    data: DataConfig = section(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "policy, generation and reference")
    critic: CriticConfig = section(CriticConfig, "the value model")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "rewards and advantages")
    reward: RewardConfig = section(RewardConfig, "the reward function")
    trainer: TrainerConfig = section(TrainerConfig, "the run: names, folders, saving, resuming")
    task: TaskConfig = section(TaskConfig, "the embedded task: additions such as 17+5=")
    warm_start: WarmStartConfig = section(WarmStartConfig, "the embedded base model and its supervised warm start")
