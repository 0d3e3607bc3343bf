"""Flat groups of ZeRO's optimizer files: one float32 tensor a rank for many weights, and moments of the same form.

What differs between the stages is where a weight lies in a flat group (`Place`) and how its ranks' parts are cut
(`Cut`); what is made of it is the same: entries of the weights and of their moments.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milepost.errors import DamagedError
from milepost.index import Box, ByteSource, Chunk, Shape, TensorEntry, itemsize, moment_name
from milepost.layouts.inert import TensorRef
from milepost.layouts.torchfile import TorchFile
from milepost.layouts.zero.runs import Runs, even_starts
from milepost.layouts.zero.states import OptimState

STEP = "step"
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Place:
    """A weight in a flat group: the element at which it begins, in the counting of the stage's `Cut`."""

    name: str
    shape: Shape
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One flat tensor of every rank: its file, and the byte at which it begins."""

    dtype: str
    files: tuple[str, ...]
    offsets: npt.NDArray[Any]


Cut = Callable[[Flat, Place], Runs]
"""Where the bytes of a weight lie in a flat tensor."""


@dataclass(frozen=True)
class Stored:
    """What the files of the ranks hold: weights by name, and moments by the index's names."""

    weights: Mapping[str, TensorEntry]
    moments: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class Group:
    """One flat group.

    places:   the weights in it
    masters:  each rank's float32 weights
    states:   each rank's optimizer state: moment -> tensor or number; empty where there is none
    lengths:  numbers of elements that a moment of each rank may have
    """

    places: Sequence[Place]
    masters: Sequence[TensorRef]
    states: Sequence[Mapping[str, Any]]
    lengths: Sequence[Collection[int]]


def flat_tensor(files: Sequence[TorchFile], refs: Sequence[Any], what: str) -> Flat:
    """The flat tensors of all ranks as one. DamagedError where one is none, or of another type."""
    offsets = []
    for file, ref in zip(files, refs, strict=True):
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or (ref.shape[0] > 1 and ref.strides != (1,)):
            raise DamagedError(f"{file.path}: {what} is no flat tensor")
        if ref.dtype != refs[0].dtype:
            raise DamagedError(f"{file.path}: {what} is {ref.dtype}, {files[0].path.name} has {refs[0].dtype}")
        offsets.append(file.chunk(ref).source.start())
    return Flat(refs[0].dtype, tuple(str(file.path) for file in files), np.array(offsets, np.int64))


def flat_refs(optim: OptimState, key: str) -> list[TensorRef]:
    """A rank's flat groups, which its file has under `key`. DamagedError where it has none."""
    groups = optim.state.get(key)
    if not isinstance(groups, list) or not all(isinstance(g, TensorRef) and len(g.shape) == 1 for g in groups):
        raise DamagedError(f"{optim.file.path}: no {key} in it, which files of its ZeRO stage have")
    return groups


def optimizer_states(optim: OptimState, inner: Any, count: int) -> dict[int, dict[str, Any]]:
    """State by number of flat group, from a torch optimizer's `state` and `param_groups`.

    A step that only the parameter group notes (old FusedAdam) is every tensor's. DamagedError where the optimizer
    numbers its tensors otherwise than the `count` flat groups.
    """
    states = inner.get("state", {}) if isinstance(inner, dict) else None
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else None
    if not isinstance(states, dict) or not isinstance(groups, list):
        raise DamagedError(f"{optim.file.path}: the state of its optimizer has another form than torch's")
    steps = {
        number: group[STEP]
        for group in groups
        if isinstance(group, dict) and isinstance(group.get(STEP), int) and isinstance(group.get("params"), list)
        for number in group["params"]
        if isinstance(number, int)
    }
    found = {}
    for number, state in states.items():
        if not isinstance(number, int) or not 0 <= number < count or not isinstance(state, dict):
            raise DamagedError(
                f"{optim.file.path}: its optimizer has a state of tensor {number!s:.20}, and {count} flat groups"
            )
        found[number] = {
            **({STEP: steps[number]} if number in steps else {}),
            **{str(moment): value for moment, value in state.items() if value is not None},
        }
    return found


def states_of(states: Sequence[Mapping[int, Mapping[str, Any]]], number: int) -> list[Mapping[str, Any]]:
    """The ranks' states of one flat group; empty where no rank has one."""
    found = [of_rank.get(number, {}) for of_rank in states]
    return found if any(found) else []


def cut_evenly(flat: Flat, place: Place) -> Runs:
    """ZeRO-3: each rank has its part of every weight, at the same position of its flat tensor."""
    size = itemsize(flat.dtype)
    starts = even_starts(math.prod(place.shape), len(flat.files))
    return Runs(place.shape, starts, flat.files, flat.offsets, place.position * size, size)


def cut_partition(partition: int) -> Cut:
    """ZeRO-1 and 2: the ranks' flat tensors are one long one, cut into `partition` elements each."""

    def cut(flat: Flat, place: Place) -> Runs:
        size, numel = itemsize(flat.dtype), math.prod(place.shape)
        first, inside = divmod(place.position, partition)
        last = (place.position + max(numel, 1) - 1) // partition
        starts = [0, *(rank * partition - place.position for rank in range(first + 1, last + 1))] if numel else []
        offsets = flat.offsets[first : last + 1].copy()
        offsets[:1] += inside * size
        return Runs(place.shape, starts, flat.files[first : last + 1], offsets, 0, size)

    return cut


def group_entries(
    files: Sequence[TorchFile], group: Group, cut: Cut
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """The weights of a group, and their moments under the index's names for them.

    Raises DamagedError where the ranks' files contradict each other.
    """
    masters = flat_tensor(files, group.masters, "the float32 weights")
    weights = {place.name: TensorEntry(masters.dtype, place.shape, cut(masters, place)) for place in group.places}
    kinds = {tuple(state) for state in group.states}
    if len(kinds) > 1:
        raise DamagedError(
            f"{files[0].path.parent}: the optimizer states of the ranks hold different moments; "
            "the files are of different saves"
        )
    moments: dict[str, dict[str, TensorEntry]] = {place.name: {} for place in group.places}
    for moment in kinds.pop() if kinds else ():
        values = [state[moment] for state in group.states]
        if isinstance(values[0], TensorRef) and values[0].shape:
            _check_lengths(files, moment, values, group.lengths)
            flat = flat_tensor(files, values, moment)
            for place in group.places:
                moments[place.name][moment] = TensorEntry(flat.dtype, place.shape, cut(flat, place))
        elif values[0] is not None:
            one = _scalar(files, moment, values)
            for place in group.places:
                moments[place.name][moment] = one
    return weights, {moment_name(name, m): entry for name, of_one in moments.items() for m, entry in of_one.items()}


def pieces(group: Group) -> list[list[tuple[tuple[TensorRef, Box], ...]]]:
    """All flat tensors of a group, each with the box of every rank, as `copies.refuse_copies` takes them."""
    columns = [group.masters]
    if group.states:
        columns += [[state[moment] for state in group.states] for moment in group.states[0]]
    found: list[list[tuple[tuple[TensorRef, Box], ...]]] = []
    for column in columns:
        if all(isinstance(ref, TensorRef) and len(ref.shape) == 1 for ref in column):
            longest = max(ref.shape[0] for ref in column)
            found.append([((ref, Box((rank * longest,), ref.shape)),) for rank, ref in enumerate(column)])
    return found


def _check_lengths(
    files: Sequence[TorchFile], moment: str, values: Sequence[Any], lengths: Sequence[Collection[int]]
) -> None:
    for file, value, allowed in zip(files, values, lengths, strict=True):
        if not isinstance(value, TensorRef) or len(value.shape) != 1 or value.shape[0] not in allowed:
            held = list(value.shape) if isinstance(value, TensorRef) else "no tensor"
            raise DamagedError(f"{file.path}: {moment} of a flat group of {min(allowed)} elements is {held}")


def _scalar(files: Sequence[TorchFile], moment: str, values: Sequence[Any]) -> TensorEntry:
    """A number that holds for all weights of a group, the same on every rank: the step count.

    A number that is no tensor in the file (DeepSpeedCPUAdam's, FusedAdam's) becomes a float32 scalar, which is what
    torch's own AdamW keeps.
    """
    first = values[0]
    if isinstance(first, TensorRef):
        entry = files[0].entry(first)
        same = _same_tensors(files, values)
    else:
        if isinstance(first, bool) or not isinstance(first, int | float) or abs(first) > _LARGEST:
            raise DamagedError(f"{files[0].path}: {moment} is neither a tensor nor a number of float32")
        source = ByteSource(str(files[0].path), 0, (), struct.pack("<f", first))
        entry = TensorEntry("float32", (), (Chunk(Box((), ()), source),))
        same = all(value == first for value in values)
    if not same:
        raise DamagedError(
            f"{files[0].path.parent}: {moment} differs between the optimizer files of the ranks; "
            "they are of different saves"
        )
    return entry


def _same_tensors(files: Sequence[TorchFile], values: Sequence[Any]) -> bool:
    """Whether small tensors are equal on all ranks. Equal checksums of their storages spare reading them."""
    if not all(isinstance(value, TensorRef) and value.shape == values[0].shape for value in values):
        return False
    checksums = {(file.checksum(value), value.dtype, value.offset) for file, value in zip(files, values, strict=True)}
    return (
        len(checksums) == 1
        or len({(value.dtype, file.entry(value).bits().tobytes()) for file, value in zip(files, values, strict=True)})
        == 1
    )
