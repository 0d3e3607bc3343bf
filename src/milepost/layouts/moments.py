"""Moments in the optimizer's files of the FSDP layout: which weight each belongs to, where the files tell.

Five forms are read:

    by name           FSDP.optim_state_dict(...): `state` has a weight's name for each key
    flattened         torch's get_optimizer_state_dict, flattened: keys `state.<weight>.<moment>`
    by number, named  optimizer.state_dict() of an optimizer that was given named parameters: `param_names`
    by number         the same without names (verl): the order of the model, where the counts agree

    flat, by number       FSDP1 with `use_orig_params`: a flat run of each weight (`layouts.flat_moments`)

FSDP1 without `use_orig_params` gives its optimizer one flat run of each FlatParameter, and a plain
`optimizer.state_dict()` of it says neither which weights a run is made of nor where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from milepost.errors import DamagedError, MismatchError
from milepost.index import OPTIMIZER_PREFIX, TensorEntry, moment_name
from milepost.layouts.flat_moments import is_flat, read_flat
from milepost.layouts.join import join_ranks, rank_part, state_dict
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile

_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_FLATTENED = ("state.", "param_groups.")


def read_moments(
    files: Sequence[TorchFile], models: Sequence[TorchFile], weights: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], list[dict[str, Any]] | None]:
    """The moments as entries `optim/<weight>/<moment>`, and the hyperparameters of the groups where the files have any.

    files:    the optimizer's file of each rank
    models:   the model's file of each rank; that of rank 0 has the order of the weights
    weights:  the entries of all weights

    Raises MismatchError where the files are good and do not tell whose moments they hold, DamagedError where they are
    not good.
    """
    if _is_flattened(files[0]):
        entries = join_ranks(files, lambda file: _flattened(file, weights))
        groups = None
    else:
        sharded = _sharded_names(models[0])
        numbers = _numbers(files[0])
        if numbers and sharded and is_flat(_field(files[0], "state", dict)):
            entries = read_flat(files, models, numbers, weights, sharded)
        else:
            names = _parameter_names(files[0], weights, sharded)
            entries = join_ranks(files, lambda file: _moments(file, names, weights))
        groups = param_groups(files[0])
    _check_shapes(entries, weights)
    return entries, groups


def _is_flattened(file: TorchFile) -> bool:
    keys = state_dict(file)
    return bool(keys) and all(key.startswith(_FLATTENED) for key in keys)


def _flattened(file: TorchFile, weights: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Any]]:
    for key, value in state_dict(file).items():
        if key.startswith(_FLATTENED[0]):
            weight, _, moment = key.removeprefix(_FLATTENED[0]).rpartition(".")
            _check_known(file, [weight], weights)
            yield moment_name(weight, moment), value


def _check_known(file: TorchFile, names: list[Any], weights: Mapping[str, TensorEntry]) -> None:
    unknown = [name for name in names if not isinstance(name, str) or name not in weights]
    if unknown:
        raise DamagedError(f"{file.path}: moments of {unknown[0]}, which the model files lack")


def _sharded_names(model: TorchFile) -> list[str]:
    """Names that can be parameters, in model order, a tied weight once: all but whole tensors, if any is sharded."""
    seen: set[str] = set()
    names = []
    for name, value in state_dict(model).items():
        part = rank_part(value)
        if part is not None:
            key = part.pieces[0][0].storage.key if part.pieces else name
            if key not in seen:
                seen.add(key)
                names.append(name)
    return names


def _numbers(optimizer: TorchFile) -> list[int] | None:
    """The parameters of an optimizer of one group that numbers them and has no names."""
    groups = _field(optimizer, "param_groups", list)
    if len(groups) != 1 or not isinstance(groups[0], dict) or "param_names" in groups[0]:
        return None
    keys = groups[0].get("params")
    if not isinstance(keys, list) or not all(type(key) is int for key in keys) or len(set(keys)) < len(keys):
        return None
    return keys


def _parameter_names(
    optimizer: TorchFile, weights: Mapping[str, TensorEntry], sharded: list[str]
) -> dict[int | str, str]:
    """Which weight each key of the optimizer's state means: a number, or the weight's name itself."""
    groups = _field(optimizer, "param_groups", list)
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise DamagedError(f"{optimizer.path}: parameter groups without parameters")
    keys = [key for group in groups for key in group["params"]]
    if keys and all(isinstance(key, str) for key in keys):
        names = keys
        _check_known(optimizer, names, weights)
    elif all(isinstance(group.get("param_names"), list) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        _check_known(optimizer, names, weights)
    else:
        names = sharded or [name for name, entry in weights.items() if entry.alias_of is None]
        if any(isinstance(key, str) for key in keys):
            raise DamagedError(f"{optimizer.path}: parameters are not numbered one by one")
        if len(keys) != len(names) or len(groups) > 1:
            raise MismatchError(
                f"{optimizer.path}: {len(keys)} parameters without names in {len(groups)} groups for {len(names)} "
                "weights; several groups, parameters that were left out, or FSDP1's one flat run for several weights "
                "make it unknown which are whose"
            )
    if len(keys) != len(names) or not all(isinstance(key, int | str) for key in keys) or len(set(keys)) < len(keys):
        raise DamagedError(f"{optimizer.path}: parameters are not numbered one by one")
    return dict(zip(keys, names, strict=True))


def _refuse_flat(file: TorchFile, names: Mapping[int | str, str], weights: Mapping[str, TensorEntry]) -> None:
    """Raise MismatchError for a whole tensor in the place of a sharded one: FSDP1's flat runs."""
    for key, state in _field(file, "state", dict).items():
        for moment, value in state.items() if isinstance(state, dict) else ():
            weight = weights[names[key]] if key in names else None
            if moment in _LIKE_WEIGHT and isinstance(value, TensorRef) and weight and value.shape != weight.shape:
                raise MismatchError(
                    f"{file.path}: {moment_name(names[key], moment)}: shape {list(value.shape)} for a weight of shape "
                    f"{list(weight.shape)}; FSDP1 flattens its parameters, or the optimizer numbers its parameters in "
                    "another order than the model"
                )


def _moments(
    file: TorchFile, names: Mapping[int | str, str], weights: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, Any]]:
    _refuse_flat(file, names, weights)
    for key, state in _field(file, "state", dict).items():
        if key not in names or not isinstance(state, dict):
            raise DamagedError(f"{file.path}: a state of parameter {key}, which no group holds")
        for moment, value in state.items():
            if value is not None:
                yield moment_name(names[key], str(moment)), value


def _check_shapes(moments: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry]) -> None:
    """Raise where a running average has another shape than its weight: then the order of parameters was another."""
    for name, entry in moments.items():
        weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if moment in _LIKE_WEIGHT and entry.shape != weights[weight].shape:
            raise MismatchError(
                f"{name}: shape {list(entry.shape)} for a weight of shape {list(weights[weight].shape)}; the optimizer "
                "numbers its parameters in another order than the model"
            )


def param_groups(file: TorchFile) -> list[dict[str, Any]]:
    """Hyperparameters of the groups, without the parameters they hold."""
    groups: list[dict[str, Any]] = file.plain(_field(file, "param_groups", list))
    return [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]


def _field(file: TorchFile, name: str, kind: type) -> Any:
    value = state_dict(file).get(name)
    if not isinstance(value, kind):
        raise DamagedError(f"{file.path}: no {name} in it, so it is no optimizer's state dict")
    return value
