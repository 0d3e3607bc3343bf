"""What the keys of a torch DCP folder mean: weights, optimizer moments, or other state.

Trainers save a nested state, and each nests it in its own way:

    ("model", "layers.0.weight")                           accelerate, HF Trainer, NeMo-RL
    ("app", "model", "layers.0.weight")                    PyTorch's tutorial
    ("layers.0.weight",)                                   torchtitan, beside ("optimizer", ...), ("train_state", ...)
    ("optimizer", "state", "layers.0.weight", "exp_avg")   get_optimizer_state_dict, FSDP.optim_state_dict
    ("optimizer", "state.layers.0.weight.exp_avg")         the same, flattened (torchtitan)
    ("optimizer", "state", 0, "exp_avg")                   optimizer.state_dict(): numbered, in the order of the model
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from milepost.errors import DamagedError
from milepost.index import Shape, moment_name
from milepost.layouts.dcp.metadata import KeyPath

_MODEL = frozenset({"model", "module", "state_dict", "model_state_dict", "models"})
_MODEL_PATHS = frozenset((name,) for name in _MODEL)
_OPTIMIZER = frozenset({"optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict"})
_SCHEDULER = frozenset({"lr_scheduler", "lr_schedulers", "scheduler", "sched"})
_OTHER = _OPTIMIZER | _SCHEDULER | {"train_state", "dataloader", "data_loader", "rng", "rng_state"}
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_FLAT_MOMENT = re.compile(
    r"(?:(?:optimizer|optim)\.)?state\.(.+)\.(exp_avg|exp_avg_sq|max_exp_avg_sq|step|momentum_buffer)", re.DOTALL
)
_GROUPS = re.compile(r"(?:(?:optimizer|optim)\.)?param_groups\..+", re.DOTALL)


@dataclass(frozen=True)
class Names:
    """Which key is which tensor.

    tensors:  name in the index -> key: weights, and moments as `optim/<weight>/<moment>`
    others:   keys of tensors that are neither
    """

    tensors: Mapping[str, str]
    others: tuple[str, ...]


def name_tensors(paths: Mapping[str, KeyPath], shapes: Mapping[str, Shape]) -> Names:
    """Tell weights, moments and other tensors apart by where they stood in the nested state.

    paths:   key -> path, of all keys, objects too
    shapes:  key -> shape, of the tensors

    Raises DamagedError where two keys would get one name.
    """
    moments: dict[str, tuple[str | int, str]] = {}
    rest: dict[str, KeyPath] = {}
    others: list[str] = []
    for key in shapes:
        path = paths[key]
        moment = _moment(path)
        if moment is not None:
            moments[key] = moment
        elif _is_group(path):
            others.append(key)
        else:
            rest[key] = path
    weights = _weights(rest)
    others += [key for key in rest if key not in weights]
    by_number = _by_number(moments, weights, shapes, sum(1 for path in paths.values() if _first_of_group(path)))
    names: dict[str, str] = {}
    for key in shapes:
        if key in weights:
            name = weights[key]
        elif key in moments:
            weight, moment_kind = moments[key]
            if isinstance(weight, int) and weight not in by_number:
                others.append(key)
                continue
            name = moment_name(by_number[weight] if isinstance(weight, int) else weight, moment_kind)
        else:
            continue
        if name in names:
            raise DamagedError(f"{names[name]} and {key} are both {name}; the folder holds more than one model")
        names[name] = key
    return Names(names, tuple(others))


def top_parts(paths: Mapping[str, KeyPath]) -> tuple[str, ...]:
    """What the state consists of: its first level, where that is nested."""
    return tuple(dict.fromkeys(str(path[0]) for path in paths.values() if len(path) > 1))


def _moment(path: KeyPath) -> tuple[str | int, str] | None:
    """Weight (or number of a parameter) and moment, where this is the path of a moment."""
    last = path[-1]
    if len(path) >= 3 and path[-3] == "state" and path[-4:-3] not in _MODEL_PATHS:
        weight = path[-2]
        return (int(weight) if str(weight).isdecimal() else weight), str(last)
    if not isinstance(last, str):
        return None
    if len(path) > 1 and last.startswith("state.") and path[-2:-1] not in _MODEL_PATHS:
        name, _, moment = last.removeprefix("state.").rpartition(".")
        return (name, moment) if name else None
    match = _FLAT_MOMENT.fullmatch(last)
    return (match[1], match[2]) if match and len(path) == 1 else None


def _is_group(path: KeyPath) -> bool:
    return "param_groups" in path or (isinstance(path[-1], str) and _GROUPS.fullmatch(path[-1]) is not None)


def _first_of_group(path: KeyPath) -> bool:
    """Whether this is the list of the parameters of one group, by number."""
    return len(path) >= 3 and path[-3] == "param_groups" and path[-1] == "params"


def _weights(paths: Mapping[str, KeyPath]) -> dict[str, str]:
    """Key -> name of the tensors of the model."""
    containers = {path: _model_container(path) for path in paths.values()}
    models = {container for container in containers.values() if container}
    if len(models) == 1:
        (model,) = models
        return {key: _dotted(path[len(model) :]) for key, path in paths.items() if containers[path] == model}
    if models:  # several: the prefix tells them apart
        return {key: _dotted(path) for key, path in paths.items() if containers[path]}
    weights = {key: path for key, path in paths.items() if len(path) == 1 or path[0] not in _OTHER}
    firsts = {path[0] for path in weights.values()}
    if len(firsts) == 1 and all(len(path) > 1 for path in weights.values()):
        return {key: _dotted(path[1:]) for key, path in weights.items()}
    return {key: _dotted(path) for key, path in weights.items()}


def _model_container(path: KeyPath) -> KeyPath:
    """The path up to a part that is called a model, else ()."""
    return next((path[: n + 1] for n, part in enumerate(path[:-1]) if part in _MODEL), ())


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _by_number(
    moments: Mapping[str, tuple[str | int, str]], weights: Mapping[str, str], shapes: Mapping[str, Shape], groups: int
) -> dict[int, str]:
    """Which weight each parameter number means: the order of the model, where counts and shapes leave no doubt."""
    numbers = sorted({weight for weight, _ in moments.values() if isinstance(weight, int)})
    if groups > 1 or len(numbers) != len(weights):
        return {}
    keys = dict(zip(numbers, weights, strict=True))
    for key, (weight, moment) in moments.items():
        if isinstance(weight, int) and moment in _LIKE_WEIGHT and shapes[key] != shapes[keys[weight]]:
            return {}
    return {number: weights[key] for number, key in keys.items()}
