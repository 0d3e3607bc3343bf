"""The flat buffers in which Megatron's own DistributedOptimizer writes its state in classic form.

    iter_0000123/mp_rank_.../distrib_optim.pt                       Megatron-LM, beside model_optim_rng.pt
    {role}/optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp{dp}.pt          verl before 0.4

    {0: {("bfloat16", "float32"): {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}},
     1: ..., "buckets_coalesced": True}

flat tensors of all data-parallel ranks, a buffer for each chunk of the model and element type of its parameters; where
experts are dealt out to ranks, a list of two, without and with them, in which a rank that holds no such parameters has
None. No name is in them. Their order is the opposite of the model's, and that the model's file beside them has:

    each parameter begins at a multiple of 64 elements of its bucket; what lies between means nothing
    a bucket ends once it has so many elements as the run asked for; usually it never does
    a tied embedding on two stages has a bucket of its own

What of this held is told by the number of elements, and proved by the values (`recovered`). Source:
megatron-core 0.16, `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError
from milepost.layouts.inert import TensorRef
from milepost.layouts.megatron.files import RankFile
from milepost.layouts.megatron.recovered import (
    ALIGNMENT,
    FROZEN,
    MASTER,
    MOMENTS,
    Parameter,
    Recovered,
    States,
    aligned,
    by_type,
    counted,
    cut,
    is_master,
    optimizers_of,
    parameters_of,
)
from milepost.layouts.torchfile import TorchFile

_KINDS = (MASTER, *MOMENTS)
_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
_BUCKET = 40_000_000  # elements; Megatron's own choice, or a million for each data-parallel rank where that is more


def read_buffers(folder: Path, ranks: Sequence[RankFile]) -> Recovered:
    """The flat buffers beside the models of a folder; none where there are no such files.

    Raises DamagedError where a file is none that Megatron writes.
    """
    found: dict[int, tuple[TorchFile, States]] = {}
    for number, rank in enumerate(ranks):
        path = _beside(folder, rank)
        if path is None:
            continue
        file = TorchFile(path)
        states = _states(file, rank)
        if isinstance(states, str):
            return Recovered(unread=f"optimizer state: {path} {states}")
        found[number] = (file, states)
    return counted(found, {count for rank in ranks for count in _counts(rank)}) if found else Recovered()


def _beside(folder: Path, rank: RankFile) -> Path | None:
    """The file with the buffers of a rank. verl names it by its data-parallel rank: expert-parallel ranks are the first
    of those."""
    own = rank.file.path.parent / "distrib_optim.pt"
    verl = folder.parent / "optim" / f"distrib_optim_pp{rank.pp}_tp{rank.tp}_cp0_dp{rank.ep}.pt"
    return next((path for path in (own, verl) if path.is_file()), None)


def _counts(rank: RankFile) -> Iterator[float]:
    """The counts of steps, one for each group, in the file of Megatron-LM that is beside."""
    for _, saved in optimizers_of(rank):
        inner = saved.get("optimizer")
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        for group in groups if isinstance(groups, list) else ():
            count = group.get("step") if isinstance(group, dict) else None
            if isinstance(count, int | float):
                yield float(count)


def _states(file: TorchFile, rank: RankFile) -> States | str:
    """What of a file's buffers is each parameter's, or why that cannot be told."""
    several = isinstance(file.root, list)
    found: dict[Parameter, Mapping[str, TensorRef]] = {}
    for number, root in enumerate(file.root if several else [file.root]):
        if root is None:
            continue
        if not isinstance(root, dict):
            raise DamagedError(f"{file.path}: holds no optimizer state of Megatron's")
        if not root.get("buckets_coalesced"):
            return "is in a form of Megatron before February 2024; load and save it once with a newer Megatron"
        wanted = parameters_of(rank, number if several else None)
        kept = [of_types for key, of_types in root.items() if isinstance(key, int)]
        if not all(isinstance(of_types, dict) for of_types in kept):
            raise DamagedError(f"{file.path}: holds no optimizer state of Megatron's")
        buffers = [buffer for of_types in kept for buffer in of_types.items()]
        groups = _groups(rank, wanted)
        if len(groups) != len(buffers):
            return f"has {len(buffers)} buffers, for a model whose parameters take {len(groups)}"
        for parameters, (types, buffer) in zip(groups, buffers, strict=True):
            placed = _placed(file, rank, parameters, buffer)
            if isinstance(placed, str):
                return f"holds a buffer {types} {placed}"
            found |= placed
    return found


def _groups(rank: RankFile, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Those of each buffer, chunk by chunk of the model."""
    of_chunks = ([p for p in parameters if p[0] == number] for number in range(len(rank.chunks)))
    return [group for own in of_chunks for group in by_type(own, lambda p: rank.chunks[p[0]][p[1]].dtype)]


def _placed(
    file: TorchFile, rank: RankFile, parameters: Sequence[Parameter], buffer: Any
) -> Mapping[Parameter, Mapping[str, TensorRef]] | str:
    """Each parameter's part of a buffer, where the right size and the right values tell it; else what of the buffer
    does not."""
    total = buffer.get("numel_unpadded") if isinstance(buffer, dict) else None
    if total is None or not all(_is_flat(buffer.get(kind), total) for kind in _KINDS):
        raise DamagedError(f"{file.path}: a buffer without {', '.join(_KINDS)} of numel_unpadded={total} elements")
    refs = [rank.chunks[stage][name] for stage, name in parameters]
    fitting: dict[tuple[int, ...], None] = {}
    for alignment, bucket, tied in itertools.product((ALIGNMENT, 1), _buckets(rank), (False, True)):
        alone = [tied and name in _TIED for _, name in parameters]
        starts, end = layout([math.prod(ref.shape) for ref in refs], alone, alignment, bucket)
        if end == total:
            fitting[tuple(starts)] = None
    proved = [
        starts
        for starts in fitting
        if all(
            is_master(file, cut(buffer[MASTER], start, ref), rank.file, ref)
            for start, ref in zip(starts, refs, strict=True)
        )
    ]
    if not proved:
        said = f"whose numbers are in no order of the parameters of {rank.file.path.name}"
        return f"{said} that Megatron is known to write, {FROZEN}"
    if len(proved) > 1:
        said = f"that several orders of the parameters of {rank.file.path.name} fit"
        return f"{said}, and which is the right one is told by nothing"
    return {
        parameter: {kind: cut(buffer[kind], start, ref) for kind in _KINDS}
        for parameter, start, ref in zip(parameters, proved[0], refs, strict=True)
    }


def _is_flat(value: Any, total: Any) -> bool:
    return (
        isinstance(value, TensorRef) and value.dtype == "float32" and value.shape == (total,) and value.strides == (1,)
    )


def _buckets(rank: RankFile) -> list[int | None]:
    """How many elements a bucket may take, by what Megatron's arguments say and by its own rules."""
    ranks, asked = (rank.args.get(key) for key in ("data_parallel_size", "ddp_bucket_size"))
    grown = max(_BUCKET, 1_000_000 * ranks) if isinstance(ranks, int) else _BUCKET
    return list(dict.fromkeys([None, *([asked] if isinstance(asked, int) else []), grown, _BUCKET]))


def layout(sizes: Sequence[int], alone: Sequence[bool], alignment: int, bucket: int | None) -> tuple[list[int], int]:
    """Where Megatron puts parameters in a buffer, and how many elements that takes, without what pads its buckets.

    sizes:  elements of the parameters, in the model's order
    alone:  of each whether it takes a bucket of its own
    """
    starts = [0] * len(sizes)
    base = reached = 0  # where the bucket begins, and what is in it
    filled = False
    for number in reversed(range(len(sizes))):
        reached = aligned(reached, alignment)
        if alone[number] and filled:
            base, reached, filled = base + reached, 0, False
        starts[number] = base + reached
        reached += sizes[number]
        filled = True
        if alone[number] or (bucket is not None and reached >= bucket):
            base, reached, filled = base + reached, 0, False
    return starts, base + reached
