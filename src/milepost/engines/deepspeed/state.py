"""Where ZeRO keeps what: the flat float32 tensors of a rank, and which run of which weight lies at which place in them.

Stage 3 cuts every weight into one run a rank. Stages 1 and 2 lay all weights of a parameter group end to end and cut
that, so a weight lies on one rank, on some, or not on this one at all. In both, a run is a few boxes
(`layouts.flat_runs`), and the float32 copy, not the 16-bit one that forward and backward use, is the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from milepost.engines.base import LiveTensor
from milepost.errors import CallError
from milepost.index import Box, Shape
from milepost.layouts.flat_runs import boxes_of_run, rank_run


@dataclass(frozen=True)
class Run:
    """A rank's run of one tensor: elements [start, start + length) of it, at `offset` in the rank's flat tensor number
    `flat`. Elements count, not bytes; a length of 0 means that the rank holds none of it."""

    shape: Shape
    start: int
    length: int
    flat: int
    offset: int


class ZeroState(Protocol):
    """The optimizer state of one stage of ZeRO, as one rank holds it."""

    def flats(self) -> list[torch.Tensor]:
        """The flat float32 tensors that the optimizer updates."""

    def runs(self) -> Mapping[str, Run]:
        """Each trained weight's run in them, by the weight's name, in the order of the flat tensors."""

    def frozen(self, name: str, weight: nn.Parameter) -> LiveTensor:
        """A weight that is not trained."""

    def refresh(self) -> None:
        """Derive the 16-bit weights from the flat tensors. All ranks call it together."""


def zero_state(engine: Any) -> ZeroState:
    """The state of a `deepspeed.DeepSpeedEngine`.

    Raises CallError for a stage or an optimizer whose state is not known here.
    """
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        if (
            any(flat is None for flat in engine.optimizer.fp16_partitioned_groups_flat)
            or engine.optimizer.swap_optimizer
        ):
            raise CallError("DeepSpeed keeps weights or moments on NVMe here, where milepost cannot save them")
        return _StageThree(engine)
    if kind == "DeepSpeedZeroOptimizer":
        return _StageOneOrTwo(engine)
    raise CallError(
        f"DeepSpeed's {kind} (ZeRO stage {engine.zero_optimization_stage()}): milepost knows stages 1, 2, 3"
    )


def live_run(name: str, run: Run, flat: torch.Tensor) -> LiveTensor:
    """A run as boxes, each with a view of its place in the flat tensor."""
    boxes, offset = [], run.offset
    for box in boxes_of_run(run.shape, run.start, run.length):
        boxes.append((box, flat.detach().narrow(0, offset, box.volume).view(box.sizes)))
        offset += box.volume
    return LiveTensor(name, run.shape, _dtype(flat), tuple(boxes))


def live_whole(name: str, tensor: torch.Tensor) -> LiveTensor:
    """A tensor that every rank holds whole."""
    shape = tuple(tensor.shape)
    boxes = ((Box.whole(shape), tensor.detach()),) if tensor.numel() else ()
    return LiveTensor(name, shape, _dtype(tensor), boxes)


def gaps(runs: Mapping[str, Run], flats: list[torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """The places of a rank's flat tensors that belong to no weight: (number of the flat tensor, offset, length)."""
    ends = [0] * len(flats)
    for run in runs.values():
        if run.length:
            if run.offset > ends[run.flat]:
                yield run.flat, ends[run.flat], run.offset - ends[run.flat]
            ends[run.flat] = run.offset + run.length
    for number, flat in enumerate(flats):
        if flat.numel() > ends[number]:
            yield number, ends[number], flat.numel() - ends[number]


class _StageThree:
    """`fp32_partitioned_groups_flat`: one flat tensor a sub-group, each weight's run padded to equal length."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._names = engine.param_names

    def flats(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def runs(self) -> Mapping[str, Run]:
        runs = {}
        for number, group in enumerate(self._optimizer.fp16_groups):
            offset = 0
            for weight in group:
                runs[self._names[weight]] = _cut(weight, number, offset)
                offset += weight.partition_numel()
        return runs

    def frozen(self, name: str, weight: Any) -> LiveTensor:
        part: torch.Tensor = weight.ds_tensor
        return live_run(name, _cut(weight, 0, 0), part.view(-1))

    def refresh(self) -> None:
        optimizer = self._optimizer
        for copy, master in zip(optimizer.fp16_partitioned_groups_flat, self.flats(), strict=True):
            if copy.data_ptr() != master.data_ptr():  # float32 training has no copies
                copy.data.copy_(master.data)
        # Small weights stay gathered between steps: dropped, they are gathered anew from what was written.
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)


def _cut(weight: Any, flat: int, offset: int) -> Run:
    start, length = rank_run(weight.ds_numel, weight.ds_zero_partition_world_size, weight.ds_zero_partition_rank)
    return Run(tuple(weight.ds_shape), start, length, flat, offset)


class _StageOneOrTwo:
    """`single_partition_of_fp32_groups`: each rank's part of all weights of a parameter group, laid end to end."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._names = engine.param_names

    def flats(self) -> list[torch.Tensor]:
        return list(self._optimizer.single_partition_of_fp32_groups)

    def runs(self) -> Mapping[str, Run]:
        optimizer, runs = self._optimizer, {}
        groups = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        for number, (weights, offsets) in enumerate(groups):
            size = self.flats()[number].numel()
            begin = size * torch.distributed.get_rank(optimizer.real_dp_process_group[number])
            for weight, offset in zip(weights, offsets, strict=True):
                low, high = max(offset, begin), min(offset + weight.numel(), begin + size)
                length = max(high - low, 0)
                place = low - begin if length else 0
                runs[self._names[weight]] = Run(
                    tuple(weight.shape), low - offset if length else 0, length, number, place
                )
        return runs

    def frozen(self, name: str, weight: nn.Parameter) -> LiveTensor:
        return live_whole(name, weight)

    def refresh(self) -> None:
        self._optimizer.update_lp_params()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
