"""ZeRO stages 1 and 2, and DeepSpeed without ZeRO: the weights are whole in one file, masters and moments are cut.

`module` of the model file has every weight in the training's element type. The float32 masters of each parameter group
are one long flat tensor, the weights one after the other in the order of `param_shapes`, padded at its end and cut into
equal partitions, one a rank (`single_partition_of_fp32_groups`); the padding is left out of the file, and its length
noted in `group_paddings`. Moments (`base_optimizer_state`) lie at the same places, with the padding. Newer DeepSpeed
can also align each weight (`param_alignment_paddings`). Found by experiment with 0.19.8 and in its source.

Trained weights are taken from the masters. Rounded to 16 bits they are the weights of `module`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.errors import DamagedError
from milepost.index import Shape, TensorEntry
from milepost.layouts.copies import refuse_copies
from milepost.layouts.inert import TensorRef
from milepost.layouts.zero.groups import (
    Group,
    Place,
    Stored,
    cut_partition,
    flat_refs,
    group_entries,
    optimizer_states,
    pieces,
    states_of,
)
from milepost.layouts.zero.states import ModelState, OptimState

_ALIGNMENT = 2


def read_stage12(model: ModelState, optims: Sequence[OptimState]) -> Stored:
    """The masters and moments of the trained weights, from the optimizer files of all ranks in rank order.

    Raises DamagedError where the files contradict each other or the model's.
    """
    shapes = model.groups
    if shapes is None:
        raise DamagedError(f"{model.file.path}: no param_shapes in it, which name the weights of the optimizer files")
    columns = [_partitions(optim, len(shapes)) for optim in optims]
    states = [_states(optim, len(shapes)) for optim in optims]
    files = [optim.file for optim in optims]
    weights: dict[str, TensorEntry] = {}
    moments: dict[str, TensorEntry] = {}
    flat = []
    for number, of_one in enumerate(shapes):
        masters = [column[number] for column in columns]
        partition = _partition(optims, number, masters)
        places = _places(optims, number, of_one, masters, partition)
        lengths = [(ref.shape[0], partition) for ref in masters]
        group = Group(places, masters, states_of(states, number), lengths)
        of_weights, of_moments = group_entries(files, group, cut_partition(partition))
        weights |= of_weights
        moments |= of_moments
        flat += pieces(group)
    refuse_copies(files, flat)
    return Stored(weights, moments)


def _partitions(optim: OptimState, count: int) -> list[TensorRef]:
    groups = flat_refs(optim, "single_partition_of_fp32_groups")
    if len(groups) != count:
        raise DamagedError(
            f"{optim.file.path}: {len(groups)} parameter groups, the model_states file has {count}; "
            "the files are of different saves"
        )
    return groups


def _partition(optims: Sequence[OptimState], number: int, masters: Sequence[TensorRef]) -> int:
    """Elements of a rank's partition of a group, padding included: the same for all ranks."""
    full = []
    for optim, ref in zip(optims, masters, strict=True):
        paddings = optim.state.get("group_paddings")
        # BF16_Optimizer, which notes no stage, saves the padding too.
        padding: Any = 0
        if optim.stage is not None and isinstance(paddings, list) and len(paddings) > number:
            padding = paddings[number]
        if not isinstance(padding, int) or padding < 0:
            raise DamagedError(f"{optim.file.path}: a padding of group {number} that is no number")
        full.append(ref.shape[0] + padding)
    other = next((optim for optim, length in zip(optims, full, strict=True) if length > full[0]), None)
    if other is not None:
        raise DamagedError(
            f"{other.file.path}: its partition of group {number} is longer than rank 0's; "
            "the files are of different saves"
        )
    if not full[0]:
        raise DamagedError(f"{optims[0].file.path}: its partition of group {number} is empty")
    return full[0]


def _places(
    optims: Sequence[OptimState],
    number: int,
    shapes: Mapping[str, Shape],
    masters: Sequence[TensorRef],
    partition: int,
) -> list[Place]:
    """Where the weights of a group begin in its flat tensor. DamagedError where the partitions do not hold them."""
    paddings = _alignment(optims[0].state.get("param_alignment_paddings"), number, len(shapes))
    if len(paddings) != len(shapes):
        raise DamagedError(f"{optims[0].file.path}: paddings of other weights than the model_states file names")
    places = []
    position = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        places.append(Place(name, shape, position))
        position += math.prod(shape) + padding
    for rank, (optim, ref) in enumerate(zip(optims, masters, strict=True)):
        needed = min(max(position - rank * partition, 0), partition)
        if ref.shape[0] < needed:
            raise DamagedError(
                f"{optim.file.path}: {ref.shape[0]} elements of group {number}, of {needed}; it is of another save "
                "than the model_states file"
            )
    # Groups are aligned to twice the number of ranks, so no more than that can be left.
    if partition * len(optims) - position >= _ALIGNMENT * len(optims):
        raise DamagedError(
            f"{optims[0].file.path}: group {number} holds more than the {position} elements of the weights that the "
            "model_states file names; they are of different saves"
        )
    return places


def _alignment(noted: Any, number: int, count: int) -> Sequence[int]:
    """Elements that are left free behind each weight of a group: none, in files that do not note them."""
    if noted is None:
        return [0] * count
    of_group = noted[number] if isinstance(noted, list) and number < len(noted) else None
    if not isinstance(of_group, list) or not all(isinstance(padding, int) and padding >= 0 for padding in of_group):
        return ()
    return of_group


def _states(optim: OptimState, count: int) -> dict[int, dict[str, Any]]:
    """The optimizer's state of each parameter group: in torch's form, or as a list (an elastic checkpoint)."""
    base = optim.state.get("base_optimizer_state")
    if isinstance(base, list):
        step = optim.state.get("base_optimizer_state_step")
        noted = {} if step is None else {"step": step}
        if len(base) != count or not all(isinstance(state, dict) for state in base):
            raise DamagedError(f"{optim.file.path}: optimizer states of {len(base)} groups, of {count}")
        return {number: {**noted, **state} for number, state in enumerate(base)}
    return {} if base is None else optimizer_states(optim, base, count)
