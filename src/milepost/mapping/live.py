"""From the names in files to those of a live model: the inverse of `names.to_saved_form`.

transformers 5 holds the experts of a layer as one tensor (`mlp.experts.gate_up_proj`) and reads and writes them one by
one; other engines and older files hold them the other way. Whatever form a checkpoint has, this gives it the one that a
model asks for, moments included.
"""

from __future__ import annotations

from collections.abc import Collection

from milepost.edits import concat, rename, stack
from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorEntry, TensorIndex
from milepost.mapping.architectures import Architecture, Config, expected
from milepost.mapping.dialects import speaks_megatron
from milepost.mapping.equality import require_equal
from milepost.mapping.moments import joined, renamed, split
from milepost.mapping.names import to_saved_form, untie


def to_live_form(index: TensorIndex, config: Config, live: Collection[str]) -> TensorIndex:
    """The index under the names that a live model has, as far as they are another form of the same tensors.

    config:  the parsed config.json of the checkpoint; a family that is not known leaves the index as it is
    live:    names of the model's weights

    Raises IncompleteError where experts of a stack are missing, MismatchError where they are no stack.
    """
    if speaks_megatron(index):
        from milepost.mapping.megatron import from_megatron  # noqa: PLC0415  its tables take long to build

        index, _ = from_megatron(index, config)
    architecture = None if set(index.weights()) == set(live) else expected(config)
    if architecture is None:
        return index
    saved = to_saved_form(index, architecture)
    if not set(architecture.tied) & set(live):
        saved = untie(saved, architecture.tied)
    names = {own: name for name, own in architecture.renamed.items() if name in live and own not in live}
    saved = rename(saved, lambda name: renamed(name, lambda weight: names.get(weight, weight)))
    fused = {name: parts for name, parts in architecture.fused.items() if name in live}
    entries = dict(saved.entries)
    for moment in dict.fromkeys(split(name)[1] for name in saved):
        for name, experts in fused.items():
            parts = [[joined(part, moment) for part in parts] for parts in experts]
            flat = [part for of_expert in parts for part in of_expert]
            missing = [part for part in flat if part not in entries]
            if len(missing) == len(flat):
                continue
            if missing:
                raise IncompleteError(f"{missing[0]} is missing, which is a part of {joined(name, moment)}")
            entries[joined(name, moment)] = _fused(parts, {part: entries.pop(part) for part in flat}, architecture)
    return saved.with_entries(entries)


def _fused(parts: list[list[str]], entries: dict[str, TensorEntry], architecture: Architecture) -> TensorEntry:
    """One tensor of all experts, each the parts of it one below the other."""
    first, entry = next(iter(entries.items()))
    if not entry.shape:  # the step count of an optimizer: one for all experts
        for name, other in entries.items():
            if other is not entry:
                require_equal(name, other, first, entry, "the optimizer counts the steps of a stack of experts once")
        return entry
    for name, part in entries.items():
        shape = architecture.tensors.get(split(name)[0])
        if part.shape != shape or part.dtype != entry.dtype:
            wanted = "of no shape that config.json gives" if shape is None else f"{entry.dtype}{list(shape)}"
            raise MismatchError(f"{name} is {part.dtype}{list(part.shape)}, not {wanted}")
    return stack([concat([entries[part] for part in of_expert], 0) for of_expert in parts])
