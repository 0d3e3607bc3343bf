"""Moments that FSDP1 with `use_orig_params` gives its optimizer: a flat run of each weight, numbered and without names.

FSDP1 lays the weights of a module one after the other, cuts the whole into equal parts, and shows each rank of the
sharding group its run of every weight: possibly none, possibly all. `optimizer.state_dict()` numbers the weights in the
order of `model.parameters()`, which is the order of the model's state dict, where a tied weight stands under each of
its names. So the runs of the ranks, in order, make up a weight, and how long they are together tells whether the order
is the assumed one. What more than one order would explain is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from milepost.errors import DamagedError, MismatchError
from milepost.index import Box, ByteSource, Chunk, TensorEntry, contiguous_strides, itemsize, moment_name
from milepost.layouts.copies import content_of, refuse_copy
from milepost.layouts.dtensor import sharded_ref
from milepost.layouts.flat_runs import boxes_of_run
from milepost.layouts.pickles import TensorRef
from milepost.layouts.sharded_tensor import sharded_tensor_ref
from milepost.layouts.torchfile import TorchFile

_Key = tuple[int, str]
_UNKNOWN = (
    "which weight each number means cannot be told: FSDP1's one flat run for several weights, parameters that were "
    "left out, or another order than the model's"
)


@dataclass(frozen=True, slots=True)
class _Run:
    """One rank's run of a moment."""

    dtype: str
    source: ByteSource
    length: int
    checksum: tuple[int, int] | None


@dataclass
class _Found:
    """What the files of all ranks hold: runs by the rank's place among those that share the weights, and scalars."""

    runs: dict[_Key, dict[int, _Run]] = field(default_factory=dict)
    scalars: dict[_Key, TensorEntry] = field(default_factory=dict)


def is_flat(state: Mapping[Any, Any]) -> bool:
    """Whether the moments of one rank's optimizer are flat runs and numbers, and none a sharded tensor."""
    values = [value for moments in state.values() if isinstance(moments, Mapping) for value in moments.values()]
    return bool(values) and all(isinstance(value, TensorRef) and len(value.shape) < 2 for value in values)


def read_flat(
    files: Sequence[TorchFile],
    models: Sequence[TorchFile],
    keys: Sequence[int],
    weights: Mapping[str, TensorEntry],
    names: Sequence[str],
) -> dict[str, TensorEntry]:
    """The moments as entries `optim/<weight>/<moment>`, each of its weight's shape.

    files, models:  the optimizer's and the model's file of each rank
    keys:           numbers of the parameters, in order
    names:          weights that can be parameters, in the model's order, a tied one under each name

    Raises MismatchError where it cannot be told which weight a number means, DamagedError where ranks contradict each
    other.
    """
    found = _Found()
    values = {name: xxhash.xxh3_128() for name in names}
    contents: dict[bytes, tuple[int, int]] = {}
    for rank, file in enumerate(files):
        model = models[rank]
        place = _place(model)
        for name in names:
            values[name].update(_fingerprint(model, name))
        pieces = _add(file, place, keys, found)
        content = content_of(file, pieces)
        other, its_place = contents.setdefault(content, (rank, place)) if content else (rank, place)
        if its_place != place:
            theirs = _add(files[other], its_place, keys, _Found())
            refuse_copy(files[other], file, [([left], [right]) for left, right in zip(theirs, pieces, strict=True)])
    numels = [_numel(found, key) for key in keys]
    named = dict(zip(keys, _named(files[0], numels, weights, names, values), strict=True))
    of_keys: dict[int, dict[str, TensorEntry]] = {key: {} for key in keys}
    for (key, moment), runs in found.runs.items():
        of_keys[key][moment] = _joined(weights[named[key]], runs)
    for (key, moment), entry in found.scalars.items():
        of_keys[key][moment] = entry
    return {moment_name(named[key], moment): entry for key, of in of_keys.items() for moment, entry in of.items()}


def _place(model: TorchFile) -> int:
    """The rank's number among those that share the weights; replicas have the same."""
    for value in model.root.values():
        shards = sharded_tensor_ref(value)
        if shards is not None:
            return shards.group_rank
        ref = sharded_ref(value)
        if ref is not None:
            return ref.mesh.coordinate[-1]
    raise MismatchError(f"{model.path}: holds no sharded weight, so that it does not tell the order of the ranks")


def _fingerprint(model: TorchFile, name: str) -> bytes:
    """What is equal for two names of a tied weight: FSDP1 saves each of them as a tensor of its own."""
    value = model.root.get(name)
    shards, ref = sharded_tensor_ref(value), sharded_ref(value)
    pieces = shards.shards if shards is not None else ((ref.local, ref.box),) if ref is not None else ()
    if not model.has_checksums:
        return name.encode()
    return repr([(model.checksum(local), local.strides, local.offset, box) for local, box in pieces]).encode()


def _add(file: TorchFile, place: int, keys: Sequence[int], found: _Found) -> list[tuple[TensorRef, Box]]:
    """Take in one rank's state; returns its runs as pieces of flat tensors, at the place's own boxes."""
    pieces = []
    state = file.root.get("state") if isinstance(file.root, dict) else None
    if not isinstance(state, dict) or not all(isinstance(moments, dict) for moments in state.values()):
        raise DamagedError(f"{file.path}: holds no optimizer's state")
    known = set(keys)
    for key, moments in state.items():
        if key not in known:
            raise DamagedError(f"{file.path}: a state of parameter {key}, which no group holds")
        for moment, value in moments.items():
            if not isinstance(value, TensorRef) or len(value.shape) > 1:
                raise MismatchError(f"{file.path}: {moment} of parameter {key} is no flat run")
            chunk = file.chunk(value)
            if not value.shape:
                entry = file.entry(value)
                first = found.scalars.setdefault((key, moment), entry)
                if first is not entry and not np.array_equal(first.bits(), entry.bits()):
                    raise DamagedError(f"{file.path}: {moment} of parameter {key} differs from that of another rank")
                continue
            if not value.shape[0]:
                continue
            if not chunk.contiguous:
                raise DamagedError(f"{file.path}: {moment} of parameter {key} is not one run")
            pieces.append((value, Box((place * value.shape[0],), value.shape)))
            noted = file.checksum(value)
            whole = noted is not None and noted[1] == value.shape[0] * itemsize(value.dtype) and file.has_checksums
            run = _Run(value.dtype, chunk.source, value.shape[0], noted if whole else None)
            kept = found.runs.setdefault((key, moment), {}).setdefault(place, run)
            alike = (kept.dtype, kept.length) == (run.dtype, run.length)
            if not alike or (kept.checksum and run.checksum and kept.checksum != run.checksum):
                raise DamagedError(
                    f"{kept.source.file} and {file.path} hold other values of {moment} of parameter {key}, though "
                    "their ranks are replicas"
                )
    return pieces


def _numel(found: _Found, key: int) -> int | None:
    """Elements of a parameter, as its moments tell; None where it has none."""
    numels = {sum(run.length for run in runs.values()) for (of, _), runs in found.runs.items() if of == key}
    if len(numels) > 1:
        raise MismatchError(f"the moments of parameter {key} are of different lengths: {sorted(numels)}")
    return numels.pop() if numels else None


def _named(
    file: TorchFile,
    numels: Sequence[int | None],
    weights: Mapping[str, TensorEntry],
    names: Sequence[str],
    values: Mapping[str, xxhash.xxh3_128],
) -> list[str]:
    """The weight of each parameter: the names in order, without some that repeat an earlier one's values, where just
    one choice of these gives every parameter its number of elements."""
    first: dict[tuple[Any, ...], str] = {}
    repeats = [
        first.setdefault((weights[name].dtype, weights[name].shape, values[name].digest()), name) != name
        for name in names
    ]
    spare = len(names) - len(numels)
    # Ways to go on after `used` parameters, and the names left out so far; 2 stands for more than one.
    ways = {(len(numels), spare): 1}
    for number in reversed(range(len(names))):
        numel, repeat = weights[names[number]].numel, repeats[number]
        for left_out in range(max(0, spare) + 1):
            used = number - left_out
            if not 0 <= used <= len(numels):
                continue
            fits = used < len(numels) and numels[used] in (None, numel)
            count = ways.get((used + 1, left_out), 0) if fits else 0
            count += ways.get((used, left_out + 1), 0) if repeat else 0
            ways[used, left_out] = min(2, count)
    if ways.get((0, 0), 0) != 1:
        raise MismatchError(f"{file.path}: {len(numels)} parameters without names for {len(names)} weights; {_UNKNOWN}")
    chosen: list[str] = []
    for number, name in enumerate(names):
        used, left_out = len(chosen), number - len(chosen)
        fits = used < len(numels) and numels[used] in (None, weights[name].numel)
        if fits and ways.get((used + 1, left_out), 0):
            chosen.append(name)
    return chosen


def _joined(weight: TensorEntry, runs: Mapping[int, _Run]) -> TensorEntry:
    """The runs of all places, one after the other, as boxes of the weight's shape."""
    chunks = []
    start = 0
    dtypes = {run.dtype for run in runs.values()}
    if len(dtypes) > 1:
        raise DamagedError(f"{next(iter(runs.values())).source.file}: the ranks' moments are of types {sorted(dtypes)}")
    for _, run in sorted(runs.items()):
        offset = run.source.start()
        for box in boxes_of_run(weight.shape, start, run.length):
            chunks.append(Chunk(box, ByteSource(run.source.file, offset, contiguous_strides(box.sizes))))
            offset += box.volume * itemsize(run.dtype)
        start += run.length
    return TensorEntry(dtypes.pop(), weight.shape, tuple(chunks))
