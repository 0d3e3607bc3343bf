"""ZeRO stage 3: every weight, master and moment is cut into runs over the ranks.

A trained weight is flattened, padded with zeros and cut into ceil(numel / W) elements a rank. A rank's parts lie one
after the other, in the order of `param_shapes`, in flat float32 tensors (`fp32_flat_groups`), one for each sub-group
of the optimizer; a weight never reaches from one into the next. Moments lie at the same places of tensors of the same
length. The 16-bit weights themselves are in no file: they are the masters, rounded. Weights that are not trained lie in
one fragment each, in the training's element type (`frozen_param_fragments`). Found by experiment with 0.19.8 and in
its `zero_to_fp32.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from milepost.errors import DamagedError, IncompleteError
from milepost.index import TensorEntry
from milepost.layouts.copies import refuse_copies
from milepost.layouts.zero.groups import (
    Group,
    Place,
    Stored,
    cut_evenly,
    flat_refs,
    flat_tensor,
    group_entries,
    optimizer_states,
    pieces,
    states_of,
)
from milepost.layouts.zero.states import ModelState, OptimState

OFFLOADED = "offloaded_tensors"
"""Folder of a tag with what an optimizer on NVMe keeps there instead of in its file."""


def read_stage3(models: Sequence[ModelState], optims: Sequence[OptimState]) -> Stored:
    """Weights and moments of the files of all ranks, in rank order; `optims` is empty where nothing was trained.

    Raises DamagedError or IncompleteError where they contradict each other or do not hold every element.
    """
    weights = dict(_frozen(models))
    moments: dict[str, TensorEntry] = {}
    if optims:
        files = [optim.file for optim in optims]
        groups = _groups(models[0], optims)
        for group in groups:
            of_weights, of_moments = group_entries(files, group, cut_evenly)
            weights |= of_weights
            moments |= of_moments
        refuse_copies(files, [column for group in groups for column in pieces(group)])
    elif any(models[0].groups or ()):
        raise IncompleteError(
            f"{models[0].file.path.parent}: no optim_states files; under ZeRO-3 the trained weights lie in them"
        )
    return Stored(weights, moments)


def _groups(model: ModelState, optims: Sequence[OptimState]) -> list[Group]:
    """The sub-groups of the optimizer, each with the weights that it holds.

    Older files say the shapes for each parameter group, newer ones for each sub-group: in both the weights come in one
    order, and a sub-group ends where its flat tensor does.
    """
    columns = [flat_refs(optim, "fp32_flat_groups") for optim in optims]
    lengths = [ref.shape[0] for ref in columns[0]]
    for optim, column in zip(optims, columns, strict=True):
        if [ref.shape[0] for ref in column] != lengths:
            raise DamagedError(
                f"{optim.file.path}: its flat groups hold other numbers of elements than those of "
                f"{optims[0].file.path.name}; the files are of different saves"
            )
    places: list[list[Place]] = [[] for _ in lengths]
    number = position = 0
    for name, shape in ((name, shape) for group in model.groups or () for name, shape in group.items()):
        part = -(-math.prod(shape) // len(optims))
        while number < len(lengths) and position == lengths[number] and part:
            number, position = number + 1, 0
        if number == len(lengths) or position + part > lengths[number]:
            raise _mismatch(optims[0], f"{name} of shape {list(shape)} finds no place")
        places[number].append(Place(name, shape, position))
        position += part
    if lengths and (number, position) != (len(lengths) - 1, lengths[-1]):
        raise _mismatch(optims[0], f"{sum(lengths[number:]) - position} elements belong to no weight")
    states = [optimizer_states(optim, optim.state.get("optimizer_state_dict") or {}, len(lengths)) for optim in optims]
    return [
        Group(
            of_one,
            [column[number] for column in columns],
            states_of(states, number),
            [(lengths[number],)] * len(optims),
        )
        for number, of_one in enumerate(places)
    ]


def _mismatch(optim: OptimState, what: str) -> Exception:
    folder = optim.file.path.parent
    if (folder / OFFLOADED).is_dir():
        return IncompleteError(
            f"{folder}: the float32 weights were on NVMe and lie in {OFFLOADED}/, whose form milepost does not read"
        )
    return DamagedError(
        f"{optim.file.path}: {what} in its flat groups; it is of another save than the model_states files beside it"
    )


def _frozen(models: Sequence[ModelState]) -> dict[str, TensorEntry]:
    """Weights that are not trained: one fragment a rank."""
    files = [model.file for model in models]
    entries: dict[str, TensorEntry] = {}
    columns = []
    for name, shape in models[0].frozen.items():
        refs = [model.fragments.get(name) for model in models]
        flat = flat_tensor(files, refs, f"the fragment of {name}")
        part = -(-math.prod(shape) // len(models))
        for file, ref in zip(files, refs, strict=True):
            if ref is not None and ref.shape != (part,):
                raise DamagedError(f"{file.path}: the fragment of {name} has {ref.shape[0]} elements, not {part}")
        place = Place(name, shape, 0)
        entries[name] = TensorEntry(flat.dtype, shape, cut_evenly(flat, place))
        columns.append(Group([place], [ref for ref in refs if ref is not None], (), ()))
    refuse_copies(files, [column for group in columns for column in pieces(group)])
    return entries
