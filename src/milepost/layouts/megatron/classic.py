"""Classic Megatron files, drawn as one index: a name for every tensor of the whole model, and its parts.

What the files say is settled here: which layer and which expert a number means (`numbers`), that ranks which
hold the same part hold the same bytes, and how the old grouped experts lie in one tensor. How a tensor was cut between
tensor-parallel ranks the files do not say, so each rank's piece is an entry of its own (`parts`).

Expert-parallel ranks repeat everything that is no expert, and a stage that predicts further tokens repeats the
embedding: one copy is taken, and another one that differs is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milepost.errors import DamagedError, RefusedError
from milepost.index import Box, TensorEntry, TensorIndex, moment_name
from milepost.layouts.inert import TensorRef
from milepost.layouts.megatron.buffers import read_buffers
from milepost.layouts.megatron.files import RankFile, read_ranks
from milepost.layouts.megatron.numbered import read_numbered
from milepost.layouts.megatron.numbers import offsets
from milepost.layouts.megatron.optimizer import ClassicObjects, read_optimizer, state_files
from milepost.layouts.megatron.parts import part_name
from milepost.layouts.megatron.recovered import Recovered, count_entry
from milepost.layouts.torchfile import TorchFile

EXTRA_STATE = "_extra_state"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)", re.DOTALL)
_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)((?:\..+)?)", re.DOTALL
)
_GROUPED = re.compile(r"(.+\.mlp\.experts\.)weight([12])", re.DOTALL)
_WINDOW = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class _Piece:
    file: TorchFile
    ref: TensorRef


def open_classic(folder: Path, layout: str) -> TensorIndex:
    """The index of a folder of rank folders.

    Raises IncompleteError where a rank's file is missing, DamagedError where files contradict each other.
    """
    ranks = read_ranks(folder)
    size = max(rank.tp for rank in ranks) + 1
    _check_alike(ranks)
    layers = _layer_offsets(ranks)
    experts = _expert_offsets(ranks)
    pieces: dict[str, dict[int, _Piece]] = {}
    counts: dict[str, dict[int, TensorEntry]] = {}
    extra = 0
    optimizer = read_optimizer(folder)
    recovered = Recovered() if optimizer.files else _recovered(folder, ranks)
    for number, rank in enumerate(ranks):
        for stage, chunk in enumerate(rank.chunks):
            for name, value in chunk.items():
                if name.endswith(EXTRA_STATE):
                    extra += 1
                    continue
                ref = _tensor(rank.file, name, value)
                whole = _numbered(_LAYER, name, layers[stage, rank.pp])
                for expert, part in _apart(rank, whole, ref, ranks, experts):
                    _keep(pieces.setdefault(expert, {}), rank.tp, _Piece(rank.file, part), expert)
                for kind, file, flat in recovered.of(number, (stage, name)):
                    for expert, part in _apart(rank, whole, flat, ranks, experts):
                        key = moment_name(expert, kind)
                        _keep(pieces.setdefault(key, {}), rank.tp, _Piece(file, part), key)
                        count = count_entry(file.path, recovered.steps)
                        counts.setdefault(moment_name(expert, "step"), {})[rank.tp] = count
    for moment in optimizer.moments:
        _keep(pieces.setdefault(moment.name, {}), moment.tp, _Piece(moment.file, moment.ref), moment.name)
    entries = {
        name if size == 1 else part_name(name, tp): piece.file.entry(piece.ref)
        for name, of_ranks in pieces.items()
        for tp, piece in of_ranks.items()
    }
    made = {**optimizer.shared, **{(name, tp): e for name, of_ranks in counts.items() for tp, e in of_ranks.items()}}
    entries |= {name if size == 1 else part_name(name, tp): entry for (name, tp), entry in made.items()}
    return TensorIndex(
        entries,
        layout,
        (*(rank.file.path for rank in ranks), *optimizer.files, *recovered.files, *state_files(folder)),
        len(state_files(folder)) or len(ranks),
        ClassicObjects(folder, optimizer, dict(ranks[0].file.plain(ranks[0].args))),
        _unread(ranks, recovered, named=bool(optimizer.files or recovered.files)),
        extra_state_lines(extra),
    )


def _recovered(folder: Path, ranks: Sequence[RankFile]) -> Recovered:
    """Optimizer state of others, who do not name its parameters."""
    flat = read_buffers(folder, ranks)
    return flat if flat.states or flat.unread else read_numbered(ranks)


def _unread(ranks: Sequence[RankFile], recovered: Recovered, *, named: bool) -> tuple[str, ...]:
    if recovered.unread:
        return (recovered.unread,)
    if any(rank.moments for rank in ranks) and not named:
        return ("optimizer state: classic Megatron files number its parameters and do not name them",)
    return ()


def extra_state_lines(count: int) -> tuple[str, ...]:
    """How so many entries that are no weights are worded."""
    line = f"{count} {EXTRA_STATE} entries: settings of Transformer Engine's modules, which are no weights"
    return (line,) if count else ()


def _check_alike(ranks: Sequence[RankFile]) -> None:
    """Raise where ranks of one stage, which differ in what part they hold, do not hold the same tensors."""
    first: dict[tuple[int, int], tuple[RankFile, set[str]]] = {}
    for rank in ranks:
        for stage, chunk in enumerate(rank.chunks):
            names = {_EXPERT.sub(r"\1N\3", name) for name in chunk if not name.endswith(EXTRA_STATE)}
            other, theirs = first.setdefault((stage, rank.pp), (rank, names))
            if names != theirs:
                name = min(names ^ theirs)
                has, lacks = (rank, other) if name in names else (other, rank)
                raise DamagedError(
                    f"{name}: in {has.file.path}, but not in {lacks.file.path}, a rank of the same stage"
                )


def _layer_offsets(ranks: Sequence[RankFile]) -> dict[tuple[int, int], int]:
    """(virtual stage, pipeline rank) -> what is added to its layers' numbers."""
    numbers: dict[tuple[int, int], set[int]] = {}
    for rank in ranks:
        for stage, chunk in enumerate(rank.chunks):
            held = numbers.setdefault((stage, rank.pp), set())
            held |= {int(match[2]) for match in map(_LAYER.fullmatch, chunk) if match}
    names = {place: f"virtual stage {place[0]} of pipeline rank {place[1]}" for place in sorted(numbers)}
    try:
        found = offsets({names[place]: held for place, held in numbers.items()}, list(names.values()), "layer")
    except DamagedError as error:
        raise DamagedError(f"{ranks[0].file.path.parent.parent}: {error}") from None
    total = sum(len(held) for held in numbers.values())
    noted = ranks[0].args.get("num_layers")
    if isinstance(noted, int) and noted != total:
        raise DamagedError(
            f"{ranks[0].file.path}: its arguments speak of {noted} layers, the files of all ranks hold {total}"
        )
    return {place: found[name] for place, name in names.items()}


def _expert_offsets(ranks: Sequence[RankFile]) -> dict[int, int]:
    """Expert-parallel rank -> what is added to its experts' numbers."""
    numbers: dict[str, set[int]] = {}
    for rank in ranks:
        held = numbers.setdefault(f"expert-parallel rank {rank.ep}", set())
        held |= {int(m[2]) for chunk in rank.chunks for m in map(_EXPERT.fullmatch, chunk) if m}
    count = max(rank.ep for rank in ranks) + 1
    order = [f"expert-parallel rank {ep}" for ep in range(count)]
    try:
        found = offsets(numbers, order, "expert")
    except DamagedError as error:
        raise DamagedError(f"{ranks[0].file.path.parent.parent}: {error}") from None
    return {ep: found[name] for ep, name in enumerate(order)}


def _numbered(pattern: re.Pattern[str], name: str, offset: int) -> str:
    match = pattern.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + offset}{match[3]}"


def _apart(
    rank: RankFile, name: str, ref: TensorRef, ranks: Sequence[RankFile], experts: Mapping[int, int]
) -> Iterator[tuple[str, TensorRef]]:
    """A tensor under its name in the whole model; grouped experts one by one.

    GroupedMLP holds the experts of a rank in `weight1`, which it reads as [experts, hidden, width], and `weight2`, as
    [experts, width, hidden]; each matrix lies turned against that of a linear layer. Source: megatron-core 0.16,
    `transformer/moe/experts.py`.
    """
    match = _GROUPED.fullmatch(name)
    if match is None:
        yield _numbered(_EXPERT, name, experts[rank.ep]), ref
        return
    total = rank.args.get("num_experts")
    count, rest = divmod(total, max(other.ep for other in ranks) + 1) if isinstance(total, int) else (0, 1)
    across = match[2] == "1"
    columns, other = (ref.shape if across else ref.shape[::-1]) if len(ref.shape) == 2 else (0, 0)
    width = other // count if count else 0
    if rest or not count or width * count != other or ref.strides != (ref.shape[1], 1):
        raise RefusedError(
            f"{rank.file.path}: {name} holds grouped experts, and no arguments beside it say how many; save them with "
            "Transformer Engine's grouped experts or as dist checkpoint"
        )
    sizes, strides = ((width, columns), (1, width)) if across else ((columns, width), (1, columns))
    for local in range(count):
        offset = ref.offset + local * width * columns
        expert = rank.ep * count + local
        yield (
            f"{match[1]}local_experts.{expert}.linear_fc{match[2]}.weight",
            TensorRef(ref.dtype, sizes, strides, ref.storage, offset),
        )


def _tensor(file: TorchFile, name: str, value: Any) -> TensorRef:
    if not isinstance(value, TensorRef):
        kind = getattr(value, "kind", type(value).__name__)
        raise DamagedError(f"{file.path}: {name} is a {kind}, not a tensor")
    return value


def _keep(of_ranks: dict[int, _Piece], tp: int, piece: _Piece, name: str) -> None:
    """Take the first of the copies that ranks hold of one part."""
    first = of_ranks.setdefault(tp, piece)
    if first is piece:
        return
    if (first.ref.dtype, first.ref.shape) != (piece.ref.dtype, piece.ref.shape) or not _equal(first, piece):
        raise DamagedError(
            f"{name}: {first.file.path} and {piece.file.path} hold the same part of it, and they differ; one of them "
            "is of another save"
        )


def _equal(one: _Piece, other: _Piece) -> bool:
    """Whether two pieces of one shape hold the same bits; not read where the archives note it of their storages."""
    view, other_view = ((p.ref.strides, p.ref.offset, p.file.checksum(p.ref)) for p in (one, other))
    if view == other_view and view[2] is not None and view[2][0]:
        return True
    entries: list[TensorEntry] = [p.file.entry(p.ref) for p in (one, other)]
    return all(np.array_equal(entries[0].bits(box), entries[1].bits(box)) for box in _windows(one.ref.shape))


def _windows(shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of whole rows that together are a tensor."""
    if not shape or not shape[0]:
        yield Box.whole(shape)
        return
    row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    step = max(1, _WINDOW // row)
    for start in range(0, shape[0], step):
        yield Box((start,) + (0,) * (len(shape) - 1), (min(step, shape[0] - start), *shape[1:]))
