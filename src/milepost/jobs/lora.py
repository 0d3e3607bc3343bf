"""The directory of a LoRA adapter, as PEFT loads it: `--lora keep`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost.cast import cast_dtype
from milepost.errors import MismatchError
from milepost.index import Box, Shape, TensorIndex
from milepost.jobs.lora_training import DIRECTORY, Target, Training, shapes_in_memory
from milepost.jobs.output import sync_tree
from milepost.layouts.huggingface import ADAPTER_CONFIG, WEIGHTS
from milepost.layouts.safetensors import SafetensorsWriter
from milepost.mapping import Mapped
from milepost.mapping.lora import BASE_LAYER, Factors, LoraRun, owner_of, parameter_of
from milepost.transfer import execute, plan

ADAPTER_WEIGHTS = "adapter_model.safetensors"

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


def adapter_export(run: LoraRun, training: Training, mapped: Mapped) -> AdapterExport:
    """The adapter's tensors and its adapter_config.json, made true to the tensors; `mapped`: the base."""
    adapter, known = run.adapter, training.config
    shapes = shapes_in_memory(mapped)
    found = [_target(module, factors, shapes) for module, factors in adapter.modules.items()]
    for target in found:
        training.check_rank(target)
    ranks = Counter(target.rank for target in found)
    rank = known.get("r") or (ranks.most_common(1)[0][0] if ranks else 8)
    named = {training.targeted_name(target): target for target in found}
    modules = [owner_of(target.module) for name, target in named.items() if name != target.parameter]
    config = {
        "peft_type": "LORA",
        "task_type": _task(mapped),
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "alpha_pattern": {},
        "target_modules": _target_modules(modules, run.base) or None,
        "target_parameters": sorted(name for name, target in named.items() if name == target.parameter) or None,
        "modules_to_save": [*_last_parts(adapter.whole)] or None,
        "rank_pattern": {name: target.rank for name, target in named.items() if target.rank != rank},
        **known,
        "r": rank,
        "use_dora": adapter.dora,
        "lora_bias": adapter.biased,
        "inference_mode": True,
    }
    # The base of the export is the one that was trained with; an initialisation that changes it again would be wrong.
    if isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True
    config["base_model_name_or_path"] = config.get("base_model_name_or_path") or mapped.config.get("_name_or_path")
    # Biases that were trained in place are the base's own here, and the adapter's too, as on the base that it names.
    trained = {name: bias for name, bias in run.biases.items() if _is_trained(name, str(config["bias"]))}
    return AdapterExport(run.base.with_entries({**adapter.tensors, **trained}), config)


def _is_trained(bias: str, which: str) -> bool:
    """Whether PEFT's setting `bias` ("none", "all", "lora_only") has this one trained."""
    return which == "all" or (which == "lora_only" and bias.endswith(f".{BASE_LAYER}.bias"))


def _target(module: str, factors: Factors, shapes: Mapping[str, Shape]) -> Target:
    """What a module's factors change; where the base does not show it (a quantised one), a matrix called weight."""
    try:
        name = parameter_of(module, factors, shapes)
    except MismatchError:
        return Target(module, factors, f"{owner_of(module)}.weight", (factors.b.shape[0], factors.a.shape[1]))
    return Target(module, factors, name, shapes[name])


def write_adapter(adapter: AdapterExport, directory: Path, dtype: str, window_bytes: int, workers: int) -> None:
    """Write the adapter into a new directory, and flush it to disk."""
    directory.mkdir()
    written = {n: replace(entry, dtype=cast_dtype(n, entry.dtype, dtype)) for n, entry in adapter.index.items()}
    wanted = ((name, Box.whole(entry.shape)) for name, entry in adapter.index.items())
    with SafetensorsWriter(directory, written, max(1, adapter.index.nbytes * 8)) as writer:
        execute(plan(adapter.index, wanted, window_bytes), writer, workers=workers)
    (directory / WEIGHTS).rename(directory / ADAPTER_WEIGHTS)
    text = json.dumps(adapter.config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    sync_tree(directory)


def beside(model: TensorIndex, adapter: TensorIndex) -> TensorIndex:
    """A model and its adapter as one index, the adapter's names below its directory's."""
    return model.with_entries({**model, **{f"{DIRECTORY}/{name}": entry for name, entry in adapter.items()}})


def _target_modules(adapted: Sequence[str], base: TensorIndex) -> list[str]:
    """Last parts of names where they say exactly which modules have an adapter, else whole names."""
    suffixes = set(_last_parts(adapted))
    modules = {name.removesuffix(".weight") for name, entry in base.items() if len(entry.shape) > 1}
    meant = {module for module in modules if module.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if meant <= set(adapted) else list(adapted)


def _last_parts(modules: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(module.rpartition(".")[2] for module in modules)


def _task(mapped: Mapped) -> str | None:
    known = "" if mapped.architecture is None else mapped.architecture.class_name
    named = (mapped.config.get("architectures") or [known])[0]
    return next((task for suffix, task in _TASKS.items() if named.endswith(suffix)), None)
