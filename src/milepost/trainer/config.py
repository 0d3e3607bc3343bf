"""The config of a run: defaults, then a YAML file, then `key=value` overrides, merged and checked.

Between the defaults and the file stands `embedded.py`, where no model is named.

    config = load_config(Path("my.yaml"), ["trainer.total_training_steps=20", "data.train_files=[a.jsonl,b.jsonl]"])
    config.trainer.default_local_dir        # interpolations such as ${trainer.project_name} are resolved

Keys, defaults and meanings stand in `schema.py`. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from milepost.errors import CallError, ConfigError, NotFoundError
from milepost.trainer.config_text import config_yaml, json_schema, render_yaml
from milepost.trainer.embedded import EMBEDDED, MODEL_PATH
from milepost.trainer.fields import ConfigKey, config_keys, config_sections, current_name, unknown_key
from milepost.trainer.overrides import Override, parse_override, parse_value
from milepost.trainer.schema import DEEPSPEED, MEGATRON, ActorConfig, CriticConfig, TrainConfig
from milepost.units import parse_bytes

__all__ = ["ConfigRow", "TrainConfig", "config_yaml", "describe", "json_schema", "load_config", "render_yaml"]


@dataclass(frozen=True)
class ConfigRow:
    """One line of `milepost config`; `origin` is default, embedded, file or override."""

    key: str
    value: Any
    type: str
    meaning: str
    origin: str


EMBEDDED_ORIGIN = "embedded"


@dataclass(frozen=True)
class _Said:
    """What a key was set to, and where: `embedded`, `file my.yaml` or `override a=b`."""

    value: Any
    origin: str


def load_config(config_file: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Merge the defaults, `config_file` and `overrides`.

    Args:
        config_file: YAML with any of the keys; the others keep their default. Where there is no X.yml, X.yaml is
            read, and the other way.
        overrides: `key=value`, `+key=value` and `++key=value` set a key, `~key` gives it back its default. The
            last one wins.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: a key is unknown, a value has the wrong type or range, or two values contradict each other.
    """
    said = _said(config_file, overrides)
    nested: dict[str, Any] = {}
    for name, value in _resolved(said).items():
        *sections, last = name.split(".")
        place = nested
        for part in sections:
            place = place.setdefault(part, {})
        place[last] = value
    typed = OmegaConf.structured(TrainConfig)
    _unlock(typed)
    config = cast(TrainConfig, OmegaConf.to_object(OmegaConf.merge(typed, nested)))
    for contradiction in _contradictions(config):
        raise ConfigError(contradiction)
    return config


def describe(config_file: Path | None, overrides: Sequence[str] = ()) -> list[ConfigRow]:
    """The merged config key by key, with where each value comes from. Raises as `load_config` does."""
    load_config(config_file, overrides)
    said = _said(config_file, overrides)
    return [
        ConfigRow(
            key=name,
            value=value,
            type=config_keys()[name].type_name,
            meaning=config_keys()[name].meaning,
            origin=said[name].origin.split(" ")[0] if name in said else "default",
        )
        for name, value in _resolved(said).items()
    ]


def _said(config_file: Path | None, overrides: Sequence[str]) -> dict[str, _Said]:
    said = {} if config_file is None else _from_file(config_file)
    for text in overrides:
        _apply(parse_override(text), said)
    if MODEL_PATH not in said or said[MODEL_PATH].value is None:
        said = {name: _Said(value, EMBEDDED_ORIGIN) for name, value in EMBEDDED.items()} | said
    return said


def _as_spelled(path: Path) -> Path:
    """A config file by its name; X.yml and X.yaml both name the one that is there."""
    other = {".yml": ".yaml", ".yaml": ".yml"}.get(path.suffix)
    if other is None or path.is_file() or not path.with_suffix(other).is_file():
        return path
    return path.with_suffix(other)


def _from_file(path: Path) -> dict[str, _Said]:
    path = _as_spelled(path)
    origin = f"file {path}"
    if not path.is_file():
        raise NotFoundError(f"config file {path} does not exist")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{origin}{line}: not YAML: {reason}") from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: expected sections with keys, got a list")
    said: dict[str, _Said] = {}
    _flatten(content, "", origin, said)
    return said


def _flatten(content: Mapping[Any, Any], prefix: str, origin: str, said: dict[str, _Said]) -> None:
    """Enter the keys of a nested mapping into `said`, by their dotted names."""
    for part, value in content.items():
        name = current_name(f"{prefix}{part}")
        if name in config_keys():
            said[name] = _Said(value, origin)
        elif name not in config_sections():
            raise unknown_key(name, origin)
        elif isinstance(value, dict):
            _flatten(value, f"{name}.", origin, said)
        elif value is not None:
            raise ConfigError(f"{origin}: {name} is a section, it cannot be {value!r}")


def _apply(override: Override, said: dict[str, _Said]) -> None:
    origin = f"override {override.text}"
    name, inner = _split_mapping_key(current_name(override.key))
    if override.delete:
        _delete(override, name, inner, said)
        return
    key = config_keys().get(name)
    words_are_text = key is not None and key.element is str and key.shape is not dict
    value = _value_of(override, words_are_text)
    if key is None and name in config_sections() and isinstance(value, dict):
        _flatten(value, f"{name}.", origin, said)
    elif key is None and name in config_sections():
        raise ConfigError(f"{origin}: {name} is a section, it cannot be {value!r}")
    elif key is None:
        raise unknown_key(name, origin)
    elif inner:
        before = said[name].value if name in said else key.default
        said[name] = _Said(_with_inner(before, inner, value), origin)
    else:
        said[name] = _Said(value, origin)


def _value_of(override: Override, words_are_text: bool) -> object:
    try:
        return parse_value(override.value or "", words_are_text=words_are_text)
    except ValueError as error:
        raise ConfigError(f"override {override.text}: {error}") from error


def _delete(override: Override, name: str, inner: list[str], said: dict[str, _Said]) -> None:
    """`~key`: what was said of it, or of a whole section, is taken back; `~key=value` only if it was that."""
    origin = f"override {override.text}"
    if name not in config_keys() and name not in config_sections():
        raise unknown_key(name, origin)
    there = [k for k in said if k == name or k.startswith(f"{name}.")]
    if override.value is not None:
        expected = _value_of(override, words_are_text=False)
        current = said[name].value if name in said else getattr(config_keys().get(name), "default", None)
        if inner or current != expected:
            raise ConfigError(f"{origin}: {override.key} is {current!r}, not {expected!r}; nothing taken back")
    if inner:
        before = said[name].value if name in said else {}
        said[name] = _Said(_without_inner(before, inner, origin), origin)
        return
    for k in there:
        del said[k]


def _split_mapping_key(name: str) -> tuple[str, list[str]]:
    """Split `data.apply_chat_template_kwargs.a.b` behind the key that holds a free mapping."""
    for key in config_keys().values():
        if key.shape is dict and name.startswith(f"{key.name}."):
            return key.name, name.removeprefix(f"{key.name}.").split(".")
    return name, []


def _with_inner(mapping: Any, inner: Sequence[str], value: object) -> dict[str, Any]:
    copy = dict(mapping) if isinstance(mapping, dict) else {}
    copy[inner[0]] = _with_inner(copy.get(inner[0]), inner[1:], value) if inner[1:] else value
    return copy


def _without_inner(mapping: Any, inner: Sequence[str], origin: str) -> dict[str, Any]:
    if not isinstance(mapping, dict) or inner[0] not in mapping:
        raise ConfigError(f"{origin}: there is no such entry")
    copy = dict(mapping)
    if inner[1:]:
        copy[inner[0]] = _without_inner(copy[inner[0]], inner[1:], origin)
    else:
        del copy[inner[0]]
    return copy


def _resolved(said: Mapping[str, _Said]) -> dict[str, Any]:
    """Every key with its final value: interpolations resolved, types and ranges checked."""
    raw = OmegaConf.create({})
    for name, key in config_keys().items():
        OmegaConf.update(raw, name, said[name].value if name in said else key.default, force_add=True)
    return {name: _final(raw, key, said.get(name)) for name, key in config_keys().items()}


def _final(raw: Any, key: ConfigKey, said: _Said | None) -> Any:
    origin = f"{said.origin}: " if said else ""
    try:
        value = OmegaConf.select(raw, key.name, throw_on_resolution_failure=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{origin}{key.name}: {str(error).splitlines()[0]}") from error
    before = said.value if said else key.default
    try:
        return key.check(value, interpolated="${" in str(before))
    except ValueError as error:
        raise ConfigError(f"{origin}{key.name}: {error} ({key.meaning})") from error


def _unlock(node: Any) -> None:
    """Let a structured config be merged into: OmegaConf makes nodes of frozen dataclasses read-only, one by one."""
    OmegaConf.set_readonly(node, False)
    for child in node.values() if OmegaConf.is_dict(node) else ():
        if OmegaConf.is_dict(child):
            _unlock(child)


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """What values that are good alone say against each other, one sentence each."""
    data, trainer, task, warm_start = config.data, config.trainer, config.task, config.warm_start
    updates: dict[str, ActorConfig | CriticConfig] = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor,
        "critic": config.critic,
    }
    for name, role in updates.items():
        if data.train_batch_size % role.ppo_mini_batch_size:
            yield (
                f"data.train_batch_size={data.train_batch_size} is not a multiple of "
                f"{name}.ppo_mini_batch_size={role.ppo_mini_batch_size}"
            )
        if role.deepspeed_config.offload_optimizer and role.deepspeed_config.zero_stage == 1:
            yield (
                f"{name}.deepspeed_config: offload_optimizer=true needs zero_stage 2 or 3; with it DeepSpeed's stage 1 "
                "skips every update after one gradient that is not finite"
            )
    if trainer.staging_limit is not None:
        try:
            parse_bytes(trainer.staging_limit)
        except CallError as error:
            yield f"trainer.staging_limit: {error}"
    for name, every in (("save_freq", trainer.save_freq), ("test_freq", trainer.test_freq)):
        if every == 0:
            yield f"trainer.{name}=0 means nothing; -1 turns it off"
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N"
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} is read only with trainer.resume_mode=resume_path, "
            f"and that is {trainer.resume_mode}"
        )
    if trainer.max_actor_ckpt_to_keep != trainer.max_critic_ckpt_to_keep:
        yield (
            f"trainer.max_actor_ckpt_to_keep={trainer.max_actor_ckpt_to_keep} and trainer.max_critic_ckpt_to_keep="
            f"{trainer.max_critic_ckpt_to_keep} differ; a step holds both roles and is kept or removed whole"
        )
    yield from _megatron_contradictions(config)
    if trainer.joint_engine:
        yield from _joint_contradictions(config)
    actor_step, critic_step = config.actor_rollout_ref.actor.checkpoint, config.critic.checkpoint
    for name in ("save_contents", "load_contents", "async_save"):
        ours, theirs = getattr(actor_step, name), getattr(critic_step, name)
        if ours != theirs:
            yield (
                f"actor_rollout_ref.actor.checkpoint.{name}={ours} and critic.checkpoint.{name}={theirs} differ; "
                "a step holds both roles alike"
            )
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.do_sample and sampling.temperature == 0:
        yield "actor_rollout_ref.rollout.val_kwargs: do_sample=true needs a temperature above 0"
    if config.reward.path is not None and not all(config.reward.path.rpartition(":")[::2]):
        yield f"reward.path={config.reward.path}: expected module:function or file.py:function"
    pairs = (task.max_first + 1) * (task.max_second + 1)
    if task.val_size >= pairs:
        yield f"task.val_size={task.val_size} leaves none of the {pairs} additions to train on"
    if warm_start.hidden_size % (2 * warm_start.num_attention_heads):
        yield "warm_start.hidden_size must be a multiple of 2 * warm_start.num_attention_heads"
    if warm_start.num_attention_heads % warm_start.num_key_value_heads:
        yield "warm_start.num_attention_heads must be a multiple of warm_start.num_key_value_heads"


def _megatron_contradictions(config: TrainConfig) -> Iterator[str]:
    """Megatron deals the processes out once for a program: both roles are cut alike, or neither is Megatron's."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    if MEGATRON not in (actor.strategy, critic.strategy):
        return
    if actor.strategy != critic.strategy:
        yield (
            f"actor_rollout_ref.actor.strategy={actor.strategy} and critic.strategy={critic.strategy}: with {MEGATRON} "
            "both must be it, since it deals out the processes for the whole program"
        )
    section = "critic.megatron."
    for key in (name.removeprefix(section) for name in config_keys() if name.startswith(section)):
        ours, theirs = (attrgetter(key)(role.megatron) for role in (actor, critic))
        if ours != theirs:
            yield f"critic.megatron.{key}={theirs} must be as actor_rollout_ref.actor.megatron.{key}={ours}"


def _joint_contradictions(config: TrainConfig) -> Iterator[str]:
    """What one engine for both roles cannot do: it makes both updates in one step of one optimizer."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    for name, strategy in (("actor_rollout_ref.actor", actor.strategy), ("critic", critic.strategy)):
        if strategy != DEEPSPEED:
            yield f"trainer.joint_engine=true needs {name}.strategy={DEEPSPEED}, and that is {strategy}"
    for key in (
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_epochs",
        "grad_clip",
        "deepspeed_config",
    ):
        ours, theirs = getattr(actor, key), getattr(critic, key)
        if (vars(ours) != vars(theirs)) if key == "deepspeed_config" else ours != theirs:
            yield (
                f"trainer.joint_engine=true updates policy and value model together: critic.{key} must be as "
                f"actor_rollout_ref.actor.{key}"
            )
    if config.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup}: with trainer.joint_engine=true no step updates "
            "the value model alone"
        )
    if "hf_model" in actor.checkpoint.save_contents:
        yield (
            "actor_rollout_ref.actor.checkpoint.save_contents: with trainer.joint_engine=true a step holds two models "
            "in one state dict: leave out hf_model, and run milepost merge --role policy"
        )
