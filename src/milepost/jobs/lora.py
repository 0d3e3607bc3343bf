"""The LoRA adapter of a checkpoint: how it was trained, its directory as PEFT loads it, and what it adds to the base.

Three files may say how it was trained: PEFT's own `adapter_config.json`, or verl's `lora_train_meta.json`, which knows
r, a whole-numbered alpha and the task, and nothing of rsLoRA. The rank is always that of the tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost.errors import CallError, DamagedError, MismatchError
from milepost.index import Box, TensorEntry, TensorIndex
from milepost.jobs.output import sync_tree
from milepost.layouts.huggingface import ADAPTER_CONFIG, LORA_META, SUBDIRECTORY, WEIGHTS
from milepost.layouts.safetensors import SafetensorsWriter
from milepost.mapping import Mapped
from milepost.mapping.lora import Adapter
from milepost.transfer import cast_dtype, execute, plan
from milepost.transfer.lowrank import LowRank

DIRECTORY = "lora_adapter"
"""Where an export keeps the adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_NO_PLAIN_PRODUCT = ("use_dora", "use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config")
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForTokenClassification": "TOKEN_CLS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "CAUSAL_LM",
}


@dataclass(frozen=True)
class AdapterExport:
    """An adapter as it is to lie in its directory: tensors under PEFT's names, and adapter_config.json."""

    index: TensorIndex
    config: Mapping[str, Any]

    def of_base(self, directory: Path) -> AdapterExport:
        """The same for a base model that will lie in `directory`, unless a file named another base."""
        named = self.config["base_model_name_or_path"] or str(directory.absolute())
        return replace(self, config={**self.config, "base_model_name_or_path": named})


@dataclass(frozen=True)
class Training:
    """What a file, or the user, says of an adapter's training.

    config:  PEFT's settings, as far as they are known; "lora_alpha" always is
    notes:   what could not be known, one line each
    """

    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def find_training(directories: Iterable[Path], alpha: float | None) -> Training:
    """Read the first of the files that says how the adapter was trained; `alpha`, if given, has the last word.

    directories:  the role's directory, and that of its companions

    Raises CallError where no file says alpha and none was given, DamagedError for a file that cannot be read.
    """
    places = [place for one in directories for place in (one, one / SUBDIRECTORY, one / DIRECTORY)]
    path = next((p / name for name in (ADAPTER_CONFIG, LORA_META) for p in places if (p / name).is_file()), None)
    config: dict[str, Any] = {} if path is None else _read(path)
    if path is not None and path.name == LORA_META and alpha is None and not config.get("lora_alpha"):
        raise CallError(
            f"{path}: says lora_alpha {config.get('lora_alpha')}; its writer cuts fractions off, so the true one "
            "is unknown. Give it with --lora-alpha"
        )
    if alpha is not None:
        config["lora_alpha"] = int(alpha) if float(alpha).is_integer() else alpha
    if config.get("lora_alpha") is None:
        where = ", ".join(dict.fromkeys(str(place) for place in places if place.is_dir()))
        raise CallError(f"no {ADAPTER_CONFIG} in {where} says the adapter's alpha; give it with --lora-alpha")
    if "use_rslora" in config:
        return Training(config)
    note = f"no {ADAPTER_CONFIG} says whether alpha is divided by r or by its root (use_rslora); took r"
    return Training(config, (note,))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
        alpha = config.get("lora_alpha", 0)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"lora_alpha is {alpha}")
        if not isinstance(config.get("r", 1), int) or config.get("r", 1) < 1:
            raise ValueError(f"r is {config['r']}")
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern, value in (config.get(key) or {}).items():
                re.compile(pattern)
                if not isinstance(value, int | float):
                    raise ValueError(f"{key} says {value} of {pattern}")
    except (ValueError, AttributeError, re.error) as error:
        raise DamagedError(f"{path}: does not say how an adapter was trained ({error})") from None
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise MismatchError(f"{path}: an adapter of type {kind}; milepost reads LORA")
    return dict(config)


def adapter_export(
    adapter: Adapter, base: TensorIndex, training: Training, model_config: Mapping[str, Any]
) -> AdapterExport:
    """The adapter's tensors and its adapter_config.json, made true to the tensors.

    base:  the model below the adapter, under its names in memory, which are those that PEFT meets
    """
    check_ranks(adapter, training)
    ranks = adapter.ranks()
    rank = training.config.get("r") or (ranks.most_common(1)[0][0] if ranks else 8)
    known = training.config
    config = {
        "peft_type": "LORA",
        "task_type": _task(model_config),
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "alpha_pattern": {},
        "target_modules": _target_modules(adapter, base),
        "modules_to_save": [*_last_parts(adapter.whole)] or None,
        "rank_pattern": {name: f.rank for name, f in adapter.modules.items() if f.rank != rank},
        **known,
        "r": rank,
        "use_dora": adapter.dora,
        "lora_bias": bool(adapter.biases),
        "inference_mode": True,
    }
    # The base of the export is the one that was trained with; an initialisation that changes it again would be wrong.
    if isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True
    config["base_model_name_or_path"] = config.get("base_model_name_or_path") or model_config.get("_name_or_path")
    return AdapterExport(base.with_entries(adapter.tensors), config)


def write_adapter(adapter: AdapterExport, directory: Path, dtype: str, window_bytes: int, workers: int) -> None:
    """Write the adapter into a new directory, and flush it to disk."""
    directory.mkdir()
    written = {n: replace(entry, dtype=cast_dtype(n, entry.dtype, dtype)) for n, entry in adapter.index.items()}
    wanted = ((name, Box.whole(entry.shape)) for name, entry in adapter.index.items())
    with SafetensorsWriter(directory, written, max(1, adapter.index.nbytes * 8)) as writer:
        execute(plan(adapter.index, wanted, window_bytes), writer, workers=workers)
    (directory / WEIGHTS).rename(directory / ADAPTER_WEIGHTS)
    text = json.dumps(adapter.config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / ADAPTER_CONFIG).write_text(text + "\n")
    sync_tree(directory)


def beside(model: TensorIndex, adapter: TensorIndex) -> TensorIndex:
    """A model and its adapter as one index, the adapter's names below its directory's."""
    return model.with_entries({**model, **{f"{DIRECTORY}/{name}": entry for name, entry in adapter.items()}})


def check_ranks(adapter: Adapter, training: Training) -> None:
    """Raise MismatchError where a file says another rank than the tensors have: it is another run's."""
    rank = training.config.get("r")
    for module, factors in adapter.modules.items():
        said = _by_pattern(module, training.config.get("rank_pattern"), rank)
        if said is not None and said != factors.rank:
            raise MismatchError(
                f"{module}: its LoRA factors have rank {factors.rank}, the adapter's settings say {said}; "
                "they are another run's"
            )


def scale_of(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """The factor of a module's update: alpha / r, or alpha / sqrt(r) under rsLoRA (https://arxiv.org/abs/2312.03732)."""
    alpha = float(_by_pattern(module, config.get("alpha_pattern"), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def updates(adapter: Adapter, training: Training, mapped: Mapped) -> dict[str, LowRank]:
    """What the adapter adds to which tensor of the mapped base.

    Raises MismatchError where the sum is not W + scale * B @ A (DoRA and the like), where the base is quantised, and
    where a tied weight would be changed for both of its uses.
    """
    check_ranks(adapter, training)
    special = [name for name in _NO_PLAIN_PRODUCT if training.config.get(name)]
    if adapter.dora or special:
        raise MismatchError(f"{(special or ['DoRA'])[0]}: its merge is more than W + scale*B*A; --lora keep exports it")
    if training.config.get("alora_invocation_tokens"):
        raise MismatchError("an adapter that acts only after its invocation tokens cannot be merged; use --lora keep")
    if adapter.biases:
        raise MismatchError(f"{adapter.biases[0]}: a LoRA bias; milepost does not merge it, --lora keep exports it")
    renamed = {} if mapped.architecture is None else mapped.architecture.renamed
    found: dict[str, tuple[str, TensorEntry]] = {}
    for module in adapter.modules:
        memory = f"{module}.weight"
        name = renamed.get(memory, memory)
        shared = next((pair for pair in mapped.tied.items() if name in pair), None)
        if shared is not None:
            raise MismatchError(
                f"{module}: {shared[0]} and {shared[1]} are one tensor, of which the adapter changes one use only, so "
                "no merged model equals it; use --lora keep"
            )
        entry = mapped.index.get(name)
        if entry is None or len(entry.shape) != 2:
            raise MismatchError(f"{module}: no matrix {name} for its LoRA update; --lora keep exports the adapter")
        if entry.dtype not in ("float32", "bfloat16", "float16"):
            raise MismatchError(f"{name} is {entry.dtype}: a quantised base cannot take the adapter; use --lora keep")
        found[module] = name, entry
    turned = bool(training.config.get("fan_in_fan_out")) or any(
        entry.shape != adapter.modules[module].update(1, transposed=False).shape for module, (_, entry) in found.items()
    )
    result = {}
    for module, (name, entry) in found.items():
        factors = adapter.modules[module]
        update = factors.update(scale_of(module, factors.rank, training.config), turned)
        if update.shape != entry.shape:
            raise MismatchError(f"{module}: its LoRA update is {list(update.shape)}, {name} is {list(entry.shape)}")
        result[name] = update
    return result


def _by_pattern(module: str, patterns: Mapping[str, Any] | None, otherwise: Any) -> Any:
    """PEFT's rule: the first pattern that the end of the module's name matches."""
    return next((v for key, v in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _target_modules(adapter: Adapter, base: TensorIndex) -> list[str]:
    """Last parts of names where they say exactly which modules have an adapter, else whole names."""
    suffixes = set(_last_parts(adapter.modules))
    modules = {name.removesuffix(".weight") for name, entry in base.items() if len(entry.shape) > 1}
    meant = {module for module in modules if module.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if meant <= set(adapter.modules) else list(adapter.modules)


def _last_parts(modules: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(module.rpartition(".")[2] for module in modules)


def _task(model_config: Mapping[str, Any]) -> str | None:
    named = (model_config.get("architectures") or [""])[0]
    return next((task for suffix, task in _TASKS.items() if named.endswith(suffix)), None)
