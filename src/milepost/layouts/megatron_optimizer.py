"""What milepost saves of a Megatron engine besides its weights: moments, schedule, hyperparameters, random states.

    {role}/optim/distrib_optim_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt    optimizer.state_dict(): numbers, and a name for each
    {role}/optim/opt_param_scheduler.pt                          the schedule
    {role}/rng_states/rng_states_pp{pp}_..._dp{dp}.pt            {"rank", "rng"}

in classic form, beside `model/`. Optimizers of others number their parameters without names; such files are left.
A dist checkpoint has the same in `common.pt` and in its shards (`DistObjects`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError
from milepost.index import Box, ByteSource, Chunk, TensorEntry, moment_name
from milepost.layouts.inert import TensorRef
from milepost.layouts.torchfile import TorchFile

SCHEDULE = "opt_param_scheduler"
_OPTIMIZER = re.compile(r"distrib_optim_pp\d+_tp(\d+)_cp\d+_dp\d+\.pt")
_STATE = re.compile(r"rng_states_pp\d+_tp\d+_cp\d+_dp\d+\.pt")
_RNG_KEY = re.compile(r"rng_state/shard_.+")
_NOT_HYPERPARAMETERS = ("params", "param_names")
KEYS = ("param_groups", "scheduler", "rng")


@dataclass(frozen=True, slots=True)
class Moment:
    """A piece of a moment: its name, the tensor-parallel rank that holds it, and where it lies."""

    name: str
    tp: int
    file: TorchFile
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer's files of all ranks; nothing where there are none whose parameters have names.

    groups:  hyperparameters of each group
    """

    moments: tuple[Moment, ...] = ()
    groups: list[dict[str, Any]] | None = None
    files: tuple[Path, ...] = ()


def read_optimizer(folder: Path) -> Optimizer:
    """The optimizer's files beside a folder of ranks.

    Raises DamagedError where they contradict themselves.
    """
    found = []
    for path in _files(folder, "optim", _OPTIMIZER):
        match = _OPTIMIZER.fullmatch(path.name)
        file = TorchFile(path)
        names = _names(file)
        if match is None or names is None:
            return Optimizer()
        found.append((int(match[1]), file, names))
    moments = tuple(moment for tp, file, names in found for moment in _moments(tp, file, names))
    if not found:
        return Optimizer()
    _, first, _ = found[0]
    return Optimizer(moments, _groups(first.plain(first.root["param_groups"])), tuple(f.path for _, f, _ in found))


def state_files(folder: Path) -> list[Path]:
    """The files with random states, one of every rank that saved; empty where another program wrote."""
    return _files(folder, "rng_states", _STATE)


def _files(folder: Path, place: str, pattern: re.Pattern[str]) -> list[Path]:
    """Files of a folder beside `model/`."""
    directory = folder.parent / place
    if folder.name != "model" or not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))


def _names(file: TorchFile) -> dict[Any, str] | None:
    """Which parameter each number of the state means; None where the file does not say."""
    root = file.root
    if not isinstance(root, dict) or not isinstance(root.get("state"), dict):
        return None
    names: dict[Any, str] = {}
    for group in root.get("param_groups") or ():
        if not isinstance(group, dict) or not isinstance(group.get("param_names"), list):
            return None
        numbers, named = group.get("params"), group["param_names"]
        if not isinstance(numbers, list) or len(numbers) != len(named):
            raise DamagedError(f"{file.path}: {len(named)} names for other parameters")
        names |= dict(zip(numbers, named, strict=True))
    return names


def _moments(tp: int, file: TorchFile, names: Mapping[Any, str]) -> Iterator[Moment]:
    for number, state in file.root["state"].items():
        if number not in names or not isinstance(state, dict):
            raise DamagedError(f"{file.path}: a state of parameter {number}, which no group holds")
        for kind, value in state.items():
            if isinstance(value, TensorRef):
                yield Moment(moment_name(names[number], str(kind)), tp, file, value)


def _groups(groups: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS} for group in groups]


class ClassicObjects(Mapping[str, Any]):
    """Megatron-LM's arguments, and what milepost saves besides; files are read when something of them is asked for."""

    def __init__(self, folder: Path, optimizer: Optimizer, arguments: Mapping[str, Any]) -> None:
        self._folder = folder
        self._optimizer = optimizer
        self._arguments = arguments

    def __getitem__(self, key: str) -> Any:
        if key == "args":
            return self._arguments
        if key == "param_groups":
            return self._optimizer.groups
        if key == "scheduler":
            path = self._folder.parent / "optim" / f"{SCHEDULE}.pt"
            return _plain(path) if self._optimizer.files and path.is_file() else None
        if key == "rng":
            return _of_ranks(_plain(path) for path in state_files(self._folder))
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("args", *KEYS))

    def __len__(self) -> int:
        return 1 + len(KEYS)


class DistObjects(Mapping[str, Any]):
    """The objects of a dist checkpoint, and those that a resume asks for, where milepost saved them in it."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def __getitem__(self, key: str) -> Any:
        if key not in KEYS:
            return self._objects[key]
        common = self._common()
        if key == "scheduler":
            return common.get(SCHEDULE)
        if key == "rng":
            return _of_ranks(self._objects[name] for name in self._objects if _RNG_KEY.fullmatch(name))
        groups = (common.get("optimizer") or {}).get("param_groups")
        return None if groups is None else _groups(groups)

    def _common(self) -> Mapping[str, Any]:
        found = self._objects.get("common")
        return found if isinstance(found, dict) else {}

    def steps(self, weights: Collection[str], common: Path) -> dict[str, TensorEntry]:
        """The count of the optimizer's steps for each weight that has moments: one number in `common.pt`."""
        optimizer = self._common().get("optimizer")
        count = optimizer.get("step") if isinstance(optimizer, dict) else None
        if not isinstance(count, int | float):
            return {}
        source = ByteSource(str(common), 0, (), struct.pack("<f", count))
        entry = TensorEntry("float32", (), (Chunk(Box((), ()), source),))
        return {moment_name(name, "step"): entry for name in weights}

    def __iter__(self) -> Iterator[str]:
        yield from self._objects
        yield from KEYS

    def __len__(self) -> int:
        return len(self._objects) + len(KEYS)


def _plain(path: Path) -> Any:
    file = TorchFile(path)
    return file.plain(file.root)


def _of_ranks(states: Iterable[Any]) -> dict[int, Any]:
    """The random states of ranks, as milepost notes them; in a dist checkpoint each lies in a list of its own."""
    plain = [part for state in states for part in (state if isinstance(state, list) else [state])]
    return {state["rank"]: state["rng"] for state in plain if isinstance(state, dict) and {"rank", "rng"} <= set(state)}
