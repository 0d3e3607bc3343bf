"""From a Hugging Face model directory to a sharded model, each rank reading only the bytes that it will own.

The model is built without memory for its weights, sharded, given memory for this rank's parts, and filled through the
index of the directory, as a resume fills it from a checkpoint. No rank ever holds the whole model.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from milepost.checkpoint.live import LiveSink
from milepost.engines.base import Engine, LiveTensor
from milepost.engines.fsdp import FsdpEngine, Sharding, materialise, shard
from milepost.engines.optim import OptimizerSettings
from milepost.errors import CallError, IncompleteError, MismatchError, NotFoundError
from milepost.index import OPTIMIZER_PREFIX, TensorEntry
from milepost.layouts import open_directory
from milepost.layouts.huggingface import CONFIG, read_config
from milepost.mapping import to_live_form
from milepost.trainer.rollout import SpecialTokens
from milepost.transfer import execute, plan

_WINDOW_BYTES = 8 << 20
VALUE_HEAD_STD = 0.02
"""Spread of a new value head where the config names no initializer_range."""


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face model directory, and whether code that lies in it may be run."""

    directory: Path
    trust_remote_code: bool = False


class _WeightsOnMeta(TorchFunctionMode):
    """Inside it `torch.empty` makes tensors without memory: those are weights. What is computed (rotary frequencies
    and other buffers) is made with other functions, and so is real and right."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def load_policy(
    source: ModelSource,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    dtype: torch.dtype,
    sharding: Sharding,
    optimizer: OptimizerSettings | None,
    seed: int,
) -> FsdpEngine:
    """A causal language model; frozen where `optimizer` is None. `dtype` is that of the sharded weights."""
    model = policy_on_meta(source, dtype)
    if optimizer is None:
        model.requires_grad_(requires_grad=False)
    return _finish(model, source, mesh, device, sharding, optimizer, seed, None)


def load_critic(
    source: ModelSource,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    dtype: torch.dtype,
    sharding: Sharding,
    optimizer: OptimizerSettings,
    seed: int,
) -> FsdpEngine:
    """A token classifier with one label on the same backbone, as verl has it. A head that the directory lacks is made
    from `seed`."""
    model = critic_on_meta(source, dtype)
    return _finish(model, source, mesh, device, sharding, optimizer, seed, model.config.to_json_string())


def policy_on_meta(source: ModelSource, dtype: torch.dtype) -> Any:
    """A causal language model whose weights have no memory."""
    config = read_model_config(source)
    with _WeightsOnMeta():
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=source.trust_remote_code
        )
    # transformers fills what a call to `generate` leaves open from here: a repetition penalty that a chat model brings
    # along would make the sampled distribution another one than the log-probs are computed for.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return model


def critic_on_meta(source: ModelSource, dtype: torch.dtype) -> Any:
    """A token classifier with one label, on the backbone of a causal language model. Its weights have no memory."""
    config = read_model_config(source)
    config.num_labels = 1
    config.classifier_dropout = 0.0  # a value is a number, and noise in it is noise in every advantage
    with _WeightsOnMeta():
        model = AutoModelForTokenClassification.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=source.trust_remote_code
        )
    model.config.architectures = [type(model).__name__]
    return model


def read_model_config(source: ModelSource) -> Any:
    """transformers' config of a model directory."""
    if not (source.directory / CONFIG).is_file():
        raise NotFoundError(
            f"{source.directory}: no {CONFIG} here; actor_rollout_ref.model.path and critic.model.path take a local "
            "Hugging Face model directory"
        )
    try:
        return AutoConfig.from_pretrained(source.directory, trust_remote_code=source.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise CallError(f"{source.directory}: transformers cannot read its config: {_first_line(error)}") from error


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory, with a pad token: its own, or else its end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise CallError(
            f"{directory}: no tokenizer that transformers can read ({_first_line(error)}); "
            "set actor_rollout_ref.model.tokenizer_path"
        ) from error
    # Without tokenizer files transformers makes an empty one of the class that belongs to the model.
    if not tokenizer("1")["input_ids"]:
        raise CallError(
            f"{directory}: its tokenizer knows no text; copy the model's tokenizer files here, or set "
            "actor_rollout_ref.model.tokenizer_path"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    found: PreTrainedTokenizerBase = tokenizer
    return found


def special_tokens(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """What ends a response: the tokens that the generation config, the config or the tokenizer name. Chat models have
    several, and a rollout that knows only one of them runs on into the next turn."""
    named: list[Any] = [tokenizer.eos_token_id, getattr(read_model_config(source), "eos_token_id", None)]
    if (source.directory / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(source.directory).eos_token_id)
    eos: set[int] = set()
    for value in named:
        eos.update(value if isinstance(value, list) else [] if value is None else [value])
    if not eos:
        raise CallError(f"{source.directory}: neither config nor tokenizer names an end-of-sequence token")
    return SpecialTokens(tuple(sorted(eos)), int(tokenizer.pad_token_id))


def convert_gguf(directory: Path, gguf_file: str, target: Path) -> None:
    """Turn a GGUF file into a Hugging Face model directory, once: `target` appears whole or not at all.

    Needs the packages gguf and accelerate. Weights become float32, so no value changes.
    """
    if target.exists():
        return
    if not (directory / gguf_file).is_file():
        raise NotFoundError(f"{directory / gguf_file}: no such file")
    part = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    try:
        read = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf_file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file)
        # What was read counts as quantised for ever, and as such cannot be saved: its values move into a plain model.
        config = copy.deepcopy(read.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        part.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(target)
    except ImportError as error:
        raise CallError(
            f"reading a GGUF file needs more packages: pip install 'milepost[smollm2]' ({error})"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _finish(
    model: Any,
    source: ModelSource,
    mesh: DeviceMesh,
    device: torch.device,
    sharding: Sharding,
    optimizer: OptimizerSettings | None,
    seed: int,
    config_text: str | None,
) -> FsdpEngine:
    """Shard a model without memory, give it memory, and fill it from its directory."""
    aliases = tied_names(model)
    shard(model, mesh, sharding)
    materialise(model, device)
    engine = FsdpEngine(
        model, mesh, optimizer=optimizer, seed=seed, companions=source.directory, config_text=config_text
    )
    fill_from_directory(engine, model, source.directory, aliases, seed)
    engine.finish_load()
    model.eval()
    return engine


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied weights, to the first name of each."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) in first:
            aliases[name] = first[id(weight)]
        else:
            first[id(weight)] = name
    return aliases


def fill_from_directory(
    engine: Engine, model: Any, directory: Path, aliases: Mapping[str, str], seed: int, prefix: str = ""
) -> None:
    """Write the weights of a Hugging Face directory into an engine's boxes, and make a head that the directory lacks.
    `engine.finish_load` is left to the caller.

    Args:
        model: the Hugging Face model: the engine's, or the part of it whose weights' names begin with `prefix`.
        aliases: the model's other names of tied weights, to the first name of each.

    Raises MismatchError where shapes differ or the directory holds weights of another architecture, IncompleteError
    where it lacks some.
    """
    live = {
        name.removeprefix(prefix): tensor
        for name, tensor in engine.tensors().items()
        if name.startswith(prefix) and not name.startswith(OPTIMIZER_PREFIX)
    }
    index = to_live_form(open_directory(directory, "huggingface"), read_config(directory), {*live, *aliases})
    entries = {name: entry for name, entry in index.entries.items() if name not in aliases}
    for alias, name in aliases.items():
        if name not in entries and alias in index.entries:
            entries[name] = index.entries[alias]
    head = _head(model, live, entries)
    _check(model, directory, live, entries, head)
    for name in head:
        _make_head(name, live[name], model, seed)
    sink = LiveSink({name: tensor for name, tensor in live.items() if name not in head})
    execute(plan(index.with_entries(entries), sink.wanted(), _WINDOW_BYTES), sink)


def _head(model: Any, live: Mapping[str, LiveTensor], entries: Mapping[str, TensorEntry]) -> set[str]:
    """Names of the weights outside the backbone that the directory does not hold: a new value head."""
    if "ForTokenClassification" not in type(model).__name__:
        return set()
    return {name for name in live if name not in entries and not name.startswith(f"{model.base_model_prefix}.")}


def _check(
    model: Any,
    directory: Path,
    live: Mapping[str, LiveTensor],
    entries: Mapping[str, TensorEntry],
    head: set[str],
) -> None:
    missing = [name for name in live if name not in entries and name not in head]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IncompleteError(f"{directory}: its weights lack {missing[0]}{more}, which {_architecture(model)} needs")
    unknown = [name for name in entries if name not in live and not _may_be_left(name, model)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise MismatchError(f"{directory}: {unknown[0]}{more} in it is no weight of {_architecture(model)}")
    for name, tensor in live.items():
        if name in entries and entries[name].shape != tensor.shape:
            raise MismatchError(
                f"{directory}: {name} has shape {list(entries[name].shape)}, its config asks for {list(tensor.shape)}"
            )


def _may_be_left(name: str, model: Any) -> bool:
    """Whether a tensor of the directory is rightly unused: another head than the critic's, or what transformers
    itself passes over for this architecture."""
    if "ForTokenClassification" in type(model).__name__ and not name.startswith(f"{model.base_model_prefix}."):
        return True
    patterns = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return any(re.search(pattern, name) for pattern in patterns)


def _make_head(name: str, tensor: LiveTensor, model: Any, seed: int) -> None:
    """A new value head: normal weights, zero bias; the same whole tensor on every rank, of which each keeps its box."""
    whole = torch.zeros(tensor.shape)
    if len(tensor.shape) > 1:
        std = getattr(model.config, "initializer_range", VALUE_HEAD_STD)
        whole.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
    for box, view in tensor.boxes:
        view.copy_(whole[box.slices()])


def _architecture(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
