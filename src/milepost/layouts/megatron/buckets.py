"""The buckets in which Megatron's DistributedOptimizer writes its state into a dist checkpoint as `dp_reshardable`.

    [chained_{c}.]optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{buffer}.dtype_{types}.bucket_idx_{bucket}.{kind}

with kind `param` (the float32 copies), `exp_avg` and `exp_avg_sq`, each one flat tensor whose boxes the data-parallel
ranks wrote; no name is in them. It is Megatron-LM's and verl's own choice where they are asked for no other. A group is
the ranks that hold the same part of the model: tensor-parallel ranks are counted first, then stages (of experts:
tensor-parallel ranks of experts, expert-parallel ranks, stages). A group has a buffer for each chunk of its model and
each element type of its parameters, so none where it has no parameters; `chained_1` are the experts, where these are
dealt out to ranks, and a stage without any has groups of them all the same, of which only objects tell.

What is told by nothing in the files is derived:

    the parameters of a rank        from the boxes of the weights (`rank_models`)
    their order in a buffer         the opposite of the model's, each from a multiple of 64 elements on
    where a bucket ends             by its number of elements, which is that of its parameters, to the last one
    which layers a stage had        as many as fill its buffer, one stage after the other as the model runs through them
    what else the order hangs on    by trying (`rank_models.Order`)

and proved: at each place the float32 copy, rounded, must be the weight, and no second order may pass that too. Copies
that several ranks hold alike are taken from the first of them, as the weights are. Source: megatron-core 0.16,
`optimizer/distrib_optimizer.py` (`sharded_param_state_dp_reshardable`), `distributed/param_and_grad_buffer.py`.

The proof is made when a checkpoint is opened, since without it nobody knows which moments there are. It reads the
beginning of each parameter's copy and weight, of which a merge needs none: of 723 parameters that takes half a second.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from milepost.index import Box, Chunk, TensorEntry
from milepost.layouts.lazy import LazyChunks
from milepost.layouts.megatron.rank_models import (
    ALL,
    DENSE,
    EXPERTS,
    Order,
    RankModels,
    RankParameter,
    Region,
    rank_models,
)
from milepost.layouts.megatron.recovered import (
    FROZEN,
    MASTER,
    MOMENTS,
    ROUNDED,
    aligned,
    beginning,
    by_type,
)

_GROUP = re.compile(r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,7})\.")
_BUCKET = re.compile(_GROUP.pattern + r"gbuf_idx_(\d{1,5})\.dtype_.+?\.bucket_idx_(\d{1,7})\.(\w+)")
_KINDS = (MASTER, *MOMENTS)
_NO_ORDER = f"their numbers are in no order of the model's parameters that Megatron is known to write, {FROZEN}"
_ORDERS = "several orders of the model's parameters fit them, and which is the right one is told by nothing"
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
            # An empty run may begin where another does, and would hide it.
            written = (chunk for chunk in self.kinds[kind].chunks if chunk.box.volume)
            chunks = sorted(written, key=lambda chunk: chunk.box.offsets)
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

    parameter: RankParameter
    bucket: _Bucket
    start: int

    def parts(self, kind: str) -> Iterator[tuple[Region, Chunk]]:
        """What lies there of each of the parameter's regions, as boxes of weights."""
        dtype = self.bucket.kinds[kind].dtype
        for run in self.bucket.runs(kind, self.start, self.parameter.numel):
            yield from self.parameter.parts(run, run.box.offsets[0] - self.start, dtype)


@dataclass(frozen=True, slots=True)
class _ModelChunk:
    """One of the parts of a model that a pipeline rank has: its layers, and whether the model begins and ends there."""

    rank: int
    layers: range
    first: bool
    last: bool


def is_bucket(key: str) -> bool:
    """Whether a tensor of a dist checkpoint is of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def read_buckets(
    tensors: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry], objects: Iterable[str]
) -> State | str:
    """The state that lies in buckets, or why it cannot be told which weights it is of.

    tensors:  all whose keys are of buckets
    weights:  of the model, by Megatron's names
    objects:  keys of what is no tensor

    Raises DamagedError or IncompleteError where what it must look at cannot be read.
    """
    optimizers = _optimizers(tensors, objects)
    if isinstance(optimizers, str):
        return optimizers
    models = rank_models(weights)
    if isinstance(models, str):
        return models
    unproved = sorted(set(models.dtypes.values()) - set(ROUNDED))
    if unproved:
        return f"the weights are of {unproved[0]}, to which milepost cannot round"
    proved = [placed for placed in _ways(optimizers, models) if all(map(_is_master, placed))]
    if len(proved) > 1:
        return _ORDERS
    return _state(proved[0], weights) if proved else _NO_ORDER


def _optimizers(tensors: Mapping[str, TensorEntry], objects: Iterable[str]) -> list[list[Buffers]] | str:
    """The groups of each optimizer: of all parameters, or of those that are no experts and of the experts."""
    found: dict[tuple[int, ...], dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        match = _BUCKET.fullmatch(key)
        assert match is not None
        found.setdefault(tuple(int(number or 0) for number in match.groups()[:-1]), {})[match[5]] = entry
    groups = [tuple(int(number or 0) for number in match.groups()) for match in map(_GROUP.match, objects) if match]
    numbers: dict[tuple[int, ...], set[int]] = {}
    for place in (*found, *groups):
        for depth, number in enumerate(place):
            numbers.setdefault(place[:depth], set()).add(number)
    if any(inside != set(range(len(inside))) for inside in numbers.values()):
        return _MISSING
    if len(numbers[()]) > 2:
        return "there are more than two optimizers"
    for kinds in found.values():
        if set(_KINDS) - set(kinds):
            return f"a bucket holds no {min(set(_KINDS) - set(kinds))}"
        if len({entry.shape for entry in kinds.values()}) > 1 or len(kinds[MASTER].shape) != 1:
            return "a bucket holds tensors of several lengths"

    def below(*place: int) -> list[tuple[int, ...]]:
        return [(*place, number) for number in sorted(numbers.get(place, ()))]

    return [
        [[[_Bucket(found[bucket]) for bucket in below(*buffer)] for buffer in below(*group)] for group in below(*one)]
        for one in below()
    ]


def _ways(optimizers: Sequence[Sequence[Buffers]], models: RankModels) -> Iterator[list[_Placed]]:
    """What each order makes of the buckets, without copies. Orders that make the same of them are one way."""
    seen = set()
    for order in models.orders():
        placed = _laid_out(optimizers, models, order)
        if placed is None:
            continue
        kept = _first_of_copies(placed)
        way = frozenset(
            (id(one.bucket), one.start, one.parameter.shape, region.name, region.chunk.box, region.box, region.turned)
            for one in kept
            for region in one.parameter.regions
        )
        if way not in seen:
            seen.add(way)
            yield kept


def _laid_out(optimizers: Sequence[Sequence[Buffers]], models: RankModels, order: Order) -> list[_Placed] | None:
    """Where all parameters of all ranks lie; None where the buckets are not as long as that makes them."""
    dense, *apart = optimizers
    pp, rest = divmod(len(dense), models.tp)
    if rest or not pp:
        return None
    part, whole = DENSE if apart else ALL, range(models.experts)
    firsts = [dense[rank * models.tp] for rank in range(pp)]
    chunks = _model_chunks(firsts, models, order, part)
    if chunks is None:
        return None
    placed: list[_Placed] = []
    for group, buffers in enumerate(dense):
        own = [chunk for chunk in chunks if chunk.rank == group // models.tp]
        of_group = _in_buffers(_by_buffer(own, models, order, group, part, whole), buffers)
        if of_group is None:
            return None
        placed += of_group
    for groups in apart:
        ep, rest = divmod(len(groups), models.etp * pp)
        if rest or not ep or models.experts % ep:
            return None
        for group, buffers in enumerate(groups):
            held, count = group // models.etp % ep, models.experts // ep
            experts, rank = range(held * count, held * count + count), group // (models.etp * ep)
            own = [chunk for chunk in chunks if chunk.rank == rank]
            of_group = _in_buffers(_by_buffer(own, models, order, group, EXPERTS, experts), buffers)
            if of_group is None:
                return None
            placed += of_group
    return placed


def _model_chunks(firsts: Sequence[Buffers], models: RankModels, order: Order, part: str) -> list[_ModelChunk] | None:
    """The chunks of the model in the order in which it runs through them: all ranks' first ones, then the second ones.

    firsts: the buffers of each pipeline rank's first tensor-parallel one
    """
    found: list[_ModelChunk] = []
    used = [0] * len(firsts)
    reached = 0
    while any(count < len(buffers) for count, buffers in zip(used, firsts, strict=True)):
        for rank, buffers in enumerate(firsts):
            if used[rank] == len(buffers):
                continue
            inner: list[RankParameter] = []
            for count in range(models.layers - reached + 1):
                layers = range(reached, reached + count)
                if count:
                    inner += models.layer(layers[-1], 0, order, part, range(models.experts))
                last = rank == len(firsts) - 1 and layers.stop == models.layers
                chunk = _ModelChunk(rank, layers, not found, last)
                groups = _by_type(_with_ends(inner, chunk, models, order, 0, part, range(models.experts)))
                left = buffers[used[rank] : used[rank] + len(groups)]
                if groups and _in_buffers(groups, left) is not None:
                    break
            else:
                return None
            found.append(chunk)
            used[rank] += len(groups)
            reached = layers.stop
    return found if reached == models.layers and found and found[-1].last else None


def _by_buffer(
    chunks: Sequence[_ModelChunk], models: RankModels, order: Order, rank: int, part: str, experts: range
) -> list[list[RankParameter]]:
    """The parameters in these chunks by their buffers, in the model's order. `rank`: among the tensor-parallel ones."""
    found = []
    for chunk in chunks:
        inner = [p for layer in chunk.layers for p in models.layer(layer, rank, order, part, experts)]
        found += _by_type(_with_ends(inner, chunk, models, order, rank, part, experts))
    return found


def _with_ends(
    inner: Sequence[RankParameter],
    chunk: _ModelChunk,
    models: RankModels,
    order: Order,
    rank: int,
    part: str,
    experts: range,
) -> list[RankParameter]:
    """The parameters in a chunk, where those of its layers are known."""
    own = part != EXPERTS
    found = models.front(rank) if own and (chunk.first or (chunk.last and models.further)) else []
    found += inner
    if chunk.last:
        found += models.final_norm(rank) if own else []
        for number in range(models.further):
            found += models.layer(-1 - number, rank, order, part, experts)
        found += models.back(rank, copies=not chunk.first) if own else []
    return found


def _by_type(parameters: Iterable[RankParameter]) -> list[list[RankParameter]]:
    return by_type(parameters, lambda parameter: parameter.dtype)


def _in_buffers(groups: Sequence[Sequence[RankParameter]], buffers: Buffers) -> list[_Placed] | None:
    """Where parameters lie in the buffers that they fill, `groups` being those of each; None where they do not."""
    if len(groups) != len(buffers):
        return None
    found: list[_Placed] = []
    for group, buckets in zip(groups, buffers, strict=True):
        filled = places([parameter.numel for parameter in group], [bucket.numel for bucket in buckets])
        if filled is None:
            return None
        found += [_Placed(p, buckets[number], start) for p, (number, start) in zip(group, filled, strict=True)]
    return found


def places(sizes: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where parameters lie in buckets that they fill: number of the bucket and first element in it.

    sizes:    elements of the parameters, in the model's order
    buckets:  elements of the buckets, without what pads their ends; one may end where a next parameter, which has a
              bucket of its own, would have begun
    """
    found = [(0, 0)] * len(sizes)
    number = reached = 0
    for position in reversed(range(len(sizes))):
        start = aligned(reached)
        if number == len(buckets) or start + sizes[position] > buckets[number]:
            return None
        found[position] = number, start
        reached = start + sizes[position]
        if buckets[number] in (reached, aligned(reached)):
            number, reached = number + 1, 0
    return found if number == len(buckets) else None


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
    """Whether the float32 copy, rounded, is the weight: the runs must cover every region, and the beginning of each of
    them there is looked at."""
    kind, dtype = placed.bucket.kinds[MASTER].dtype, placed.parameter.dtype
    if kind != "float32":
        return False
    left = sum(region.box.volume for region in placed.parameter.regions)
    for region, part in placed.parts(MASTER):
        left -= part.box.volume
        box = beginning(part.box)
        master = TensorEntry(kind, (), (part,)).bits(box)
        if not np.array_equal(ROUNDED[dtype](master), TensorEntry(dtype, (), (region.chunk,)).bits(box)):
            return False
    return not left


def _state(placed: Sequence[_Placed], weights: Mapping[str, TensorEntry]) -> State:
    by_name: dict[str, list[_Placed]] = {}
    for one in placed:
        for name in dict.fromkeys(region.name for region in one.parameter.regions):
            by_name.setdefault(name, []).append(one)
    return {
        name: {
            kind: TensorEntry(
                of_name[0].bucket.kinds[kind].dtype,
                weights[name].shape,
                LazyChunks(partial(_chunks, of_name, name, kind)),
            )
            for kind in _KINDS
        }
        for name, of_name in by_name.items()
    }


def _chunks(placed: Sequence[_Placed], name: str, kind: str) -> Iterator[Chunk]:
    """What lies in buckets of one kind of a weight's state. Each costs a read of its header."""
    for one in placed:
        yield from (part for region, part in one.parts(kind) if region.name == name)
