"""The buckets in which Megatron's DistributedOptimizer writes its state into a dist checkpoint as `dp_reshardable`.

    [chained_{c}.]optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{buffer}.dtype_{types}.bucket_idx_{bucket}.{kind}

with kind `param` (the float32 copies), `exp_avg` and `exp_avg_sq`, each one flat tensor whose boxes the data-parallel
ranks wrote; no name is in them. It is Megatron-LM's and verl's own choice where they are asked for no other. A group is
the ranks that hold the same part of the model: tensor-parallel ranks are counted first, then stages (of experts:
tensor-parallel ranks of experts, expert-parallel ranks, stages). A group has a buffer for each chunk of its model and
each element type of its parameters; `chained_1` are the experts, where these are dealt out to ranks.

What is told by nothing in the files is derived:

    the parameters of a rank        from the boxes of the weights (`rank_models`)
    their order in a buffer         the opposite of the model's, each from a multiple of 64 elements on
    where a bucket ends             by its number of elements, which is that of its parameters, to the last one
    which layers a stage had        as many as fill its buffer, one stage after the other as the model runs through them
    what else the order hangs on    by trying (`rank_models.Order`)

and proved: at each place the float32 copy, rounded, must be the weight. Copies that several ranks hold alike are taken
from the first of them, as the weights are. Source: megatron-core 0.16, `optimizer/distrib_optimizer.py`
(`sharded_param_state_dp_reshardable`), `distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from milepost.index import Box, Chunk, TensorEntry
from milepost.layouts.megatron.rank_models import ALL, DENSE, EXPERTS, Order, Parameter, RankModels, Region, rank_models
from milepost.layouts.megatron.recovered import ALIGNMENT, MASTER, MOMENTS, ROUNDED, beginning

_BUCKET = re.compile(
    r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,7})\.gbuf_idx_(\d{1,5})\.dtype_.+?"
    r"\.bucket_idx_(\d{1,7})\.(\w+)"
)
_KINDS = (MASTER, *MOMENTS)
_NO_ORDER = "their numbers are in no order of the model's parameters that Megatron is known to write"
_MISSING = "buckets are missing, as the numbers in their names tell"

State = dict[str, dict[str, TensorEntry]]
"""Name of a weight -> kind -> what lies in the buckets, of the weight's shape."""


class _Bucket:
    """The tensors of one bucket, whose runs are found by bisection; headers are read when a kind is first asked for."""

    def __init__(self, kinds: Mapping[str, TensorEntry]) -> None:
        self.kinds = kinds
        self.numel = kinds[MASTER].numel
        self._sorted: dict[str, tuple[list[int], list[Chunk]]] = {}

    def runs(self, kind: str, start: int, length: int) -> Iterator[Chunk]:
        """What ranks wrote of the elements [start, start + length)."""
        if kind not in self._sorted:
            chunks = sorted(self.kinds[kind].chunks, key=lambda chunk: chunk.box.offsets)
            self._sorted[kind] = [chunk.box.offsets[0] for chunk in chunks], chunks
        starts, chunks = self._sorted[kind]
        part = TensorEntry(self.kinds[kind].dtype, (self.numel,), ())
        first = max(0, bisect_right(starts, start) - 1)
        last = bisect_right(starts, start + length - 1)
        yield from replace(part, chunks=chunks[first:last]).pieces(Box((start,), (length,)))


Buffers = Sequence[Sequence[_Bucket]]
"""Buffer -> its buckets, of one group of ranks."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A parameter, and where in which bucket it begins."""

    parameter: Parameter
    bucket: _Bucket
    start: int

    def parts(self, kind: str) -> Iterator[tuple[Region, Chunk]]:
        """What lies there of each of the parameter's regions, as boxes of weights."""
        dtype = self.bucket.kinds[kind].dtype
        for run in self.bucket.runs(kind, self.start, self.parameter.numel):
            yield from self.parameter.parts(run, run.box.offsets[0] - self.start, dtype)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A chunk of the model on a pipeline rank: its layers, and whether the model begins and ends there."""

    rank: int
    layers: range
    first: bool
    last: bool


def is_bucket(key: str) -> bool:
    """Whether a tensor of a dist checkpoint is of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def read_buckets(tensors: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry]) -> State | str:
    """The state that lies in buckets, or why it cannot be told which weights it is of.

    tensors:  all whose keys are of buckets
    weights:  of the model, by Megatron's names
    """
    optimizers = _optimizers(tensors)
    if isinstance(optimizers, str):
        return optimizers
    models = rank_models(weights)
    if isinstance(models, str):
        return models
    unproved = sorted(set(models.dtypes.values()) - set(ROUNDED))
    if unproved:
        return f"the weights are of {unproved[0]}, to which milepost cannot round"
    for order in models.orders():
        placed = _laid_out(optimizers, models, order)
        if placed is not None:
            kept = _first_of_copies(placed)
            if all(_is_master(part) for part in kept):
                return _state(kept, weights)
    return _NO_ORDER


def _optimizers(tensors: Mapping[str, TensorEntry]) -> list[list[Buffers]] | str:
    """The groups of each optimizer: of all parameters, or of those that are no experts and of the experts."""
    found: dict[tuple[int, ...], dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        match = _BUCKET.fullmatch(key)
        assert match is not None
        found.setdefault(tuple(int(match[place] or 0) for place in range(1, 5)), {})[match[5]] = entry
    optimizers: list[Any] = []
    for place in sorted(found):
        kinds = found[place]
        if set(_KINDS) - set(kinds):
            return f"a bucket holds no {min(set(_KINDS) - set(kinds))}"
        if len({entry.shape for entry in kinds.values()}) > 1 or len(kinds[MASTER].shape) != 1:
            return "a bucket holds tensors of several lengths"
        level = optimizers
        for number in place[:-1]:
            if number == len(level):
                level.append([])
            if number != len(level) - 1:
                return _MISSING
            level = level[number]
        if place[-1] != len(level):
            return _MISSING
        level.append(_Bucket(kinds))
    if len(optimizers) > 2:
        return "there are more than two optimizers"
    return optimizers


def _laid_out(optimizers: Sequence[Sequence[Buffers]], models: RankModels, order: Order) -> list[_Placed] | None:
    """Where all parameters of all ranks lie; None where the buckets are not as long as that makes them."""
    dense, *apart = optimizers
    stages, rest = divmod(len(dense), models.tp)
    if rest or not stages:
        return None
    part, whole = DENSE if apart else ALL, range(models.experts)
    firsts = [dense[rank * models.tp] for rank in range(stages)]
    chunks = _stages(firsts, models, order, part)
    if chunks is None:
        return None
    placed: list[_Placed] = []
    for group, buffers in enumerate(dense):
        own = [_parameters(c, models, order, group, part, whole) for c in chunks if c.rank == group // models.tp]
        placed_here = _in_buffers(own, buffers)
        if placed_here is None:
            return None
        placed += placed_here
    for groups in apart:
        ranks, rest = divmod(len(groups), models.etp * stages)
        if rest or not ranks or models.experts % ranks:
            return None
        for group, buffers in enumerate(groups):
            held, count = group // models.etp % ranks, models.experts // ranks
            experts, stage = range(held * count, held * count + count), group // (models.etp * ranks)
            own = [_parameters(c, models, order, group, EXPERTS, experts) for c in chunks if c.rank == stage]
            placed_here = _in_buffers(own, buffers)
            if placed_here is None:
                return None
            placed += placed_here
    return placed


def _stages(firsts: Sequence[Buffers], models: RankModels, order: Order, part: str) -> list[_Stage] | None:
    """The chunks of the model in the order in which it runs through them: all ranks' first ones, then the second ones.

    firsts: the buffers of each stage's first tensor-parallel rank
    """
    found: list[_Stage] = []
    used = [0] * len(firsts)
    reached = 0
    while any(count < len(buffers) for count, buffers in zip(used, firsts, strict=True)):
        for rank, buffers in enumerate(firsts):
            if used[rank] == len(buffers):
                continue
            inner: list[Parameter] = []
            for count in range(models.layers - reached + 1):
                layers = range(reached, reached + count)
                if count:
                    inner += models.layer(layers[-1], 0, order, part, range(models.experts))
                last = rank == len(firsts) - 1 and layers.stop == models.layers
                stage = _Stage(rank, layers, not found, last)
                groups = _by_type(_with_ends(inner, stage, models, order, 0, part, range(models.experts)))
                left = buffers[used[rank] : used[rank] + len(groups)]
                fit = zip(groups, left, strict=False)
                if 0 < len(groups) == len(left) and all(_places(group, buckets) is not None for group, buckets in fit):
                    break
            else:
                return None
            found.append(stage)
            used[rank] += len(groups)
            reached = layers.stop
    return found if reached == models.layers and found[-1].last else None


def _parameters(
    stage: _Stage, models: RankModels, order: Order, rank: int, part: str, experts: range
) -> list[Parameter]:
    """Those of a chunk, in the order of the model. `rank`: among the tensor-parallel ones."""
    inner = [p for layer in stage.layers for p in models.layer(layer, rank, order, part, experts)]
    return _with_ends(inner, stage, models, order, rank, part, experts)


def _with_ends(
    inner: Sequence[Parameter], stage: _Stage, models: RankModels, order: Order, rank: int, part: str, experts: range
) -> list[Parameter]:
    """The same, where those of its layers are known."""
    own = part != EXPERTS
    found = models.front(rank) if own and (stage.first or (stage.last and models.further)) else []
    found += inner
    if stage.last:
        found += models.final_norm(rank) if own else []
        for number in range(models.further):
            found += models.layer(-1 - number, rank, order, part, experts)
        found += models.back(rank, copies=not stage.first) if own else []
    return found


def _by_type(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Those of each buffer of a chunk: of one element type, types in the order in which they first occur."""
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _in_buffers(chunks: Sequence[Sequence[Parameter]], buffers: Buffers) -> list[_Placed] | None:
    groups = [group for chunk in chunks for group in _by_type(chunk)]
    if len(groups) != len(buffers):
        return None
    found: list[_Placed] = []
    for group, buckets in zip(groups, buffers, strict=True):
        places = _places(group, buckets)
        if places is None:
            return None
        found += [_Placed(p, buckets[number], start) for p, (number, start) in zip(group, places, strict=True)]
    return found


def _places(parameters: Sequence[Parameter], buckets: Sequence[_Bucket]) -> list[tuple[int, int]] | None:
    """Number of its bucket and first element there of each parameter; None where these do not fill the buckets."""
    return places([parameter.numel for parameter in parameters], [bucket.numel for bucket in buckets])


def places(sizes: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where parameters lie in buckets that they fill: number of the bucket and first element in it.

    sizes:    elements of the parameters, in the model's order
    buckets:  elements of the buckets, without what pads their ends; one may end where a next parameter, which has a
              bucket of its own, would have begun
    """
    found = [(0, 0)] * len(sizes)
    number = reached = 0
    for position in reversed(range(len(sizes))):
        start = _aligned(reached)
        if number == len(buckets) or start + sizes[position] > buckets[number]:
            return None
        found[position] = number, start
        reached = start + sizes[position]
        if buckets[number] in (reached, _aligned(reached)):
            number, reached = number + 1, 0
    return found if number == len(buckets) else None


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


def _first_of_copies(placed: Sequence[_Placed]) -> list[_Placed]:
    """The same without the regions that an earlier one holds too."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    kept = []
    for one in placed:
        new = []
        for region in one.parameter.regions:
            place = region.name, region.chunk.box.offsets
            if place not in seen:
                seen.add(place)
                new.append(region)
        if new:
            kept.append(replace(one, parameter=replace(one.parameter, regions=tuple(new))))
    return kept


def _is_master(placed: _Placed) -> bool:
    """Whether the float32 copy, rounded, is the weight: looked at is the beginning of every run and every region."""
    kind, dtype = placed.bucket.kinds[MASTER].dtype, placed.parameter.dtype
    if kind != "float32":
        return False
    for region, part in placed.parts(MASTER):
        box = beginning(part.box)
        master = TensorEntry(kind, (), (part,)).bits(box)
        if not np.array_equal(ROUNDED[dtype](master), TensorEntry(dtype, (), (region.chunk,)).bits(box)):
            return False
    return True


def _state(placed: Sequence[_Placed], weights: Mapping[str, TensorEntry]) -> State:
    by_name: dict[str, list[_Placed]] = {}
    for one in placed:
        for name in dict.fromkeys(region.name for region in one.parameter.regions):
            by_name.setdefault(name, []).append(one)
    return {
        name: {
            kind: TensorEntry(of_name[0].bucket.kinds[kind].dtype, weights[name].shape, _Deferred(of_name, name, kind))
            for kind in _KINDS
        }
        for name, of_name in by_name.items()
    }


class _Deferred(Sequence[Chunk]):
    """The chunks of one kind of a weight's state, made when first looked at: a merge needs none, and each costs a read
    of its header."""

    __slots__ = ("_chunks", "_kind", "_name", "_placed")

    def __init__(self, placed: Sequence[_Placed], name: str, kind: str) -> None:
        self._placed, self._name, self._kind = placed, name, kind
        self._chunks: tuple[Chunk, ...] | None = None

    def _made(self) -> tuple[Chunk, ...]:
        if self._chunks is None:
            parts = itertools.chain.from_iterable(placed.parts(self._kind) for placed in self._placed)
            self._chunks = tuple(part for region, part in parts if region.name == self._name)
        return self._chunks

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        return self._made()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())
