"""What milepost saves of a Megatron engine besides its weights: moments, schedule, hyperparameters, random states.

    {role}/optim/distrib_optim_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt    optimizer.state_dict(): numbers, and a name for each;
                                                                 of a distributed optimizer shares (`shares`)
    {role}/optim/opt_param_scheduler.pt                          the schedule
    {role}/rng_states/rng_states_pp{pp}_..._dp{dp}.pt            {"rank", "rng"}

in classic form, beside `model/`. Files of others, without names, are for `buffers` and `numbered`.
A dist checkpoint has the same in `common.pt` and in its shards (`DistObjects`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError
from milepost.index import TensorEntry, moment_name
from milepost.layouts.inert import TensorRef
from milepost.layouts.megatron.recovered import agreed, count_entry
from milepost.layouts.megatron.shares import SHARES, Share, joined, shares_of
from milepost.layouts.torchfile import TorchFile

SCHEDULE = "opt_param_scheduler"
_OPTIMIZER = re.compile(r"distrib_optim_pp(\d+)_tp(\d+)_cp\d+_dp(\d+)\.pt")
_STATE = re.compile(r"rng_states_pp\d+_tp\d+_cp\d+_dp\d+\.pt")
_RNG_KEY = re.compile(r"rng_state/shard_.+")
_GROUP_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_.+")
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

    moments:  whole pieces
    shared:   name and tensor-parallel rank -> a piece that data-parallel ranks share
    groups:   hyperparameters of each group
    """

    moments: tuple[Moment, ...] = ()
    shared: Mapping[tuple[str, int], TensorEntry] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    files: tuple[Path, ...] = ()


def read_optimizer(folder: Path) -> Optimizer:
    """The optimizer's files beside a folder of ranks.

    Raises DamagedError where they contradict themselves, IncompleteError where a rank's is missing.
    """
    found = []
    shares: list[Share] = []
    ranks: dict[tuple[int, int], set[int]] = {}
    for path in _files(folder, "optim", _OPTIMIZER):
        match = _OPTIMIZER.fullmatch(path.name)
        file = TorchFile(path)
        names = _names(file)
        if match is None or names is None:
            return Optimizer()
        found.append((int(match[2]), file, names))
        if SHARES in file.root:
            ranks.setdefault((int(match[1]), int(match[2])), set()).add(int(match[3]))
            shares += shares_of(file, names)
    moments = (m for tp, file, names in found if SHARES not in file.root for m in _moments(tp, file, names))
    if not found:
        return Optimizer()
    _check_all_there(folder, ranks)
    _, first, _ = found[0]
    groups = _groups(first.plain(first.root["param_groups"]))
    return Optimizer(tuple(moments), joined(shares), groups, tuple(file.path for _, file, _ in found))


def _check_all_there(folder: Path, ranks: Mapping[tuple[int, int], set[int]]) -> None:
    """Raise where of some model-parallel rank not as many data-parallel ranks have a file as of another."""
    count = 1 + max((dp for there in ranks.values() for dp in there), default=-1)
    for (pp, tp), there in ranks.items():
        missing = sorted(set(range(count)) - there)
        if missing:
            raise IncompleteError(
                f"{folder.parent / 'optim'}: distrib_optim_pp{pp}_tp{tp}_cp0_dp{missing[0]}.pt is missing (likely on "
                "another node's local disk, or not copied whole); bring it here and try again"
            )


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
        groups = next((found["param_groups"] for found in self._optimizers() if found.get("param_groups")), None)
        return None if groups is None else _groups(groups)

    def _optimizers(self) -> Iterator[Mapping[str, Any]]:
        """What was saved of each optimizer besides its tensors: in `common.pt`, and of `dp_reshardable` in an object
        of each group of ranks. The mapping with `param_groups` lies one level deeper where the optimizer is
        distributed, in the first of two where experts have their own."""
        of_groups = (self._objects[name] for name in self._objects if _GROUP_KEY.fullmatch(name))
        for found in itertools.chain((self._common().get("optimizer"),), of_groups):
            inner = found[0] if isinstance(found, list) and found else found
            for key in (0, "optimizer"):
                if isinstance(inner, dict) and isinstance(inner.get(key), dict):
                    inner = inner[key]
            if isinstance(inner, dict):
                yield inner

    def _common(self) -> Mapping[str, Any]:
        found = self._objects.get("common")
        return found if isinstance(found, dict) else {}

    def steps(self, weights: Collection[str], common: Path) -> dict[str, TensorEntry] | str:
        """The count of the optimizer's steps for each weight that has moments, or why it is not known: one number for
        all of them."""
        try:
            counts = {count for optimizer in self._optimizers() for count in _counts(optimizer)}
        except DamagedError as error:
            return f"optimizer state: the steps that it has counted cannot be read: {error}"
        steps = agreed(counts)
        return (
            steps if isinstance(steps, str) else {moment_name(n, "step"): count_entry(common, steps) for n in weights}
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._objects
        yield from KEYS

    def __len__(self) -> int:
        return len(self._objects) + len(KEYS)


def _counts(optimizer: Mapping[str, Any]) -> set[float]:
    """The counts of steps that are noted: at one place for all parameters, or in each of their groups."""
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    whole = optimizer.get("step", state.get("common_step") if isinstance(state, dict) else None)
    of_groups = [group.get("step") for group in groups or () if isinstance(group, dict)]
    return {float(count) for count in (of_groups if whole is None else [whole]) if isinstance(count, int | float)}


def _plain(path: Path) -> Any:
    file = TorchFile(path)
    return file.plain(file.root)


def _of_ranks(states: Iterable[Any]) -> dict[int, Any]:
    """The random states of ranks, as milepost notes them; in a dist checkpoint each lies in a list of its own."""
    plain = [part for state in states for part in (state if isinstance(state, list) else [state])]
    return {state["rank"]: state["rng"] for state in plain if isinstance(state, dict) and {"rank", "rng"} <= set(state)}
