"""The shares of data-parallel ranks in an optimizer that Megatron distributes, joined to moments of whole parameters.

    optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp{dp}.pt
        state         number -> {"step", "exp_avg", "exp_avg_sq", ("param")}: flat runs; the parameter's own in float32
                      where the model's weights are of 16 bits
        param_groups  hyperparameters, and a name for each number
        shares        number -> {"shape", "start", "tp"}: of which tensor of one rank, from which element on

Milepost writes these (`engines.megatron.distributed_optimizer`); a file without `shares` holds whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from milepost.errors import DamagedError, IncompleteError
from milepost.index import ByteSource, Chunk, Shape, TensorEntry, contiguous_strides, itemsize, moment_name
from milepost.layouts.flat_runs import boxes_of_run
from milepost.layouts.inert import TensorRef
from milepost.layouts.torchfile import TorchFile

SHARES = "shares"


@dataclass(frozen=True, slots=True)
class Share:
    """A run of a moment, or the count of steps, which every share has.

    name:   the moment's
    tp:     the tensor-parallel rank whose part of the tensor the run is of
    shape:  of that part
    start:  the element of it at which the run begins
    """

    name: str
    tp: int
    shape: Shape
    start: int
    file: TorchFile
    ref: TensorRef


def shares_of(file: TorchFile, names: Mapping[Any, str]) -> Iterator[Share]:
    """What one file holds.

    names:  number of a parameter -> its name

    Raises DamagedError where the file contradicts itself.
    """
    places = file.root[SHARES]
    for number, state in file.root["state"].items():
        place = places.get(number) if isinstance(places, dict) else None
        shape, start, tp = _place(place)
        if number not in names or not isinstance(state, dict) or min(*shape, start, tp) < 0:
            raise DamagedError(f"{file.path}: does not say what the state of parameter {number} is a share of")
        for kind, ref in state.items():
            if not isinstance(ref, TensorRef):
                continue
            run = len(ref.shape) == 1 and ref.strides == (1,) and start + ref.shape[0] <= math.prod(shape)
            if ref.shape and not run:
                raise DamagedError(f"{file.path}: {kind} of {names[number]} is no run of {list(shape)}")
            yield Share(moment_name(names[number], str(kind)), tp, shape, start, file, ref)


def _place(place: Any) -> tuple[Shape, int, int]:
    """Shape, start and tensor-parallel rank of a share; -1 where the file does not say them."""
    fields = [place.get(key) for key in ("shape", "start", "tp")] if isinstance(place, dict) else []
    match fields:
        case [tuple() as shape, int() as start, int() as tp] if all(isinstance(n, int) for n in shape):
            return shape, start, tp
    return (), -1, -1


def joined(shares: list[Share]) -> dict[tuple[str, int], TensorEntry]:
    """Name and tensor-parallel rank -> the part of that rank, from the runs of all data-parallel ranks.

    Raises IncompleteError where runs are missing, DamagedError where they overlap or differ in what is one number.
    """
    groups: dict[tuple[str, int], list[Share]] = {}
    for share in shares:
        groups.setdefault((share.name, share.tp), []).append(share)
    return {key: _entry(sorted(group, key=lambda share: share.start)) for key, group in groups.items()}


def _entry(runs: list[Share]) -> TensorEntry:
    first = runs[0]
    if not first.ref.shape:
        return _one_number(runs)
    reached = 0
    for run in runs:
        if (run.shape, run.ref.dtype) != (first.shape, first.ref.dtype):
            raise DamagedError(f"{run.name}: {run.file.path} and {first.file.path} hold shares of different tensors")
        if run.start < reached:
            raise DamagedError(f"{run.name}: {run.file.path} repeats elements that another rank's file holds")
        if run.start > reached:
            raise _missing(run, reached)
        reached = run.start + run.ref.shape[0]
    if reached < math.prod(first.shape):
        raise _missing(runs[-1], reached)
    return TensorEntry(first.ref.dtype, first.shape, tuple(chunk for run in runs for chunk in _chunks(run)))


def _missing(run: Share, element: int) -> IncompleteError:
    return IncompleteError(
        f"{run.name}: elements from {element} on are in no file beside {run.file.path}; a data-parallel rank's file is "
        "missing (likely on another node's local disk): bring it here and try again"
    )


def _chunks(run: Share) -> Iterator[Chunk]:
    position = run.file.start(run.ref)
    for box in boxes_of_run(run.shape, run.start, run.ref.shape[0]):
        yield Chunk(box, ByteSource(str(run.file.path), position, contiguous_strides(box.sizes)))
        position += box.volume * itemsize(run.ref.dtype)


def _one_number(runs: list[Share]) -> TensorEntry:
    entry = runs[0].file.entry(runs[0].ref)
    value = entry.numpy()
    for run in runs[1:]:
        if not np.array_equal(run.file.entry(run.ref).numpy(), value):
            raise DamagedError(f"{run.name}: {runs[0].file.path} and {run.file.path} differ; one is of another save")
    return entry
