"""How a LoRA adapter was trained, as far as files say it.

Three files may say it: PEFT's own `adapter_config.json`, or verl's `lora_train_meta.json`, which knows r, a
whole-numbered alpha and the task, and nothing of rsLoRA. The rank is always that of the tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import CallError, DamagedError, MismatchError
from milepost.index import Shape
from milepost.layouts.huggingface import ADAPTER_CONFIG, LORA_META, SUBDIRECTORY
from milepost.mapping import Mapped
from milepost.mapping.lora import Adapter, Factors, owner_of, parameter_of

DIRECTORY = "lora_adapter"
"""Where an export keeps the adapter."""


@dataclass(frozen=True)
class Training:
    """What a file, or the user, says of an adapter's training.

    config:  PEFT's settings, as far as they are known; "lora_alpha" always is
    notes:   what could not be known, one line each
    """

    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def scale(self, target: Target) -> float:
        """The factor of an update: alpha / r, or alpha / sqrt(r) under rsLoRA (https://arxiv.org/abs/2312.03732)."""
        alpha = float(self._of(target, "alpha_pattern", "lora_alpha"))
        return alpha / (math.sqrt(target.rank) if self.config.get("use_rslora") else target.rank)

    def check_rank(self, target: Target) -> None:
        """Raise MismatchError where the settings say another rank than the tensors have: they are another run's."""
        said = self._of(target, "rank_pattern", "r")
        if said is not None and said != target.rank:
            raise MismatchError(
                f"{target.module}: its LoRA factors have rank {target.rank}, the adapter's settings say {said}; "
                "they are another run's"
            )

    def _of(self, target: Target, patterns: str, otherwise: str) -> Any:
        """PEFT's rule: the first pattern that matches the end of the name that was targeted."""
        name = self.targeted_name(target)
        found = (v for key, v in (self.config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", name))
        return next(found, self.config.get(otherwise))

    def targeted_name(self, target: Target) -> str:
        """The name by which PEFT chose what to adapt: the parameter's where `target_parameters` names it, else the
        module's."""
        return target.parameter if self._by_parameter(target.parameter) else owner_of(target.module)

    def _by_parameter(self, parameter: str) -> bool:
        named = self.config.get("target_parameters")
        if named is None:
            return not parameter.endswith(".weight")
        return any(parameter == name or parameter.endswith(f".{name}") for name in named)


@dataclass(frozen=True)
class Target:
    """One parameter that an adapter changes.

    module:     the adapter's name of it
    factors:    what the adapter holds of it
    parameter:  the model's name of the parameter, as in memory
    shape:      its shape, [out, in] or [experts, out, in], each also with the last two turned
    """

    module: str
    factors: Factors
    parameter: str
    shape: Shape

    @property
    def experts(self) -> int:
        """How many matrices the parameter is a stack of; 0 for one matrix."""
        return self.shape[0] if len(self.shape) == 3 else 0

    @property
    def rank(self) -> int:
        """r."""
        return self.factors.rank // (self.experts or 1)


def targets(adapter: Adapter, shapes: Mapping[str, Shape]) -> tuple[Target, ...]:
    """The parameters that an adapter changes, in its order; `shapes`: those of the model, under its names in memory.

    Raises MismatchError where the factors fit nothing, or two of them one parameter.
    """
    found: dict[str, Target] = {}
    for module, factors in adapter.modules.items():
        name = parameter_of(module, factors, shapes)
        if name in found:
            raise MismatchError(f"{found[name].module} and {module} would both change {name}")
        found[name] = Target(module, factors, name, shapes[name])
    return tuple(found.values())


def shapes_in_memory(mapped: Mapped) -> dict[str, Shape]:
    """The shape of every parameter, under its name in memory, which is the one that PEFT meets."""
    shapes = {name: entry.shape for name, entry in mapped.index.items()}
    shapes |= {alias: shapes[name] for alias, name in mapped.tied.items() if name in shapes}
    if mapped.architecture is None:
        return shapes
    for memory, saved in mapped.architecture.renamed.items():
        if saved in shapes:
            shapes[memory] = shapes.pop(saved)
    for memory, experts in mapped.architecture.fused.items():
        if all(part in shapes for parts in experts for part in parts):
            rows = sum(shapes[part][0] for part in experts[0])
            shapes[memory] = (len(experts), rows, shapes[experts[0][0]][1])
    return shapes


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
        config = json.loads(path.read_bytes())
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
        if not all(isinstance(name, str) for name in config.get("target_parameters") or ()):
            raise ValueError("target_parameters are no names")
    except (ValueError, AttributeError, TypeError, re.error, RecursionError) as error:
        raise DamagedError(f"{path}: does not say how an adapter was trained ({error})") from None
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise MismatchError(f"{path}: an adapter of type {kind}; milepost reads LORA")
    return dict(config)
