"""Filling a live engine from a step: first everything is compared, then bytes move.

What a checkpoint and a model do not have in common is an error that names it, save for two things that have a sensible
meaning: a checkpoint without optimizer (the moments stay fresh), and a model without one (the moments are not read).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.checkpoint.resume import Part
from milepost.checkpoint.steps import STATE_FILE
from milepost.engines.base import OPTIMIZER, RNG, SCHEDULE, Engine, LiveTensor
from milepost.errors import DamagedError, MismatchError
from milepost.index import DTYPES, OPTIMIZER_PREFIX, TensorIndex
from milepost.layouts import open_directory
from milepost.layouts.huggingface import find_companions, read_config
from milepost.mapping import to_live_form
from milepost.mapping.masters import with_masters
from milepost.transfer import execute, plan

WINDOW_BYTES = 8 << 20
_NAMED = 3
_OBJECT_OF = {SCHEDULE: "scheduler", RNG: "rng"}
NOT_SAVED = "the checkpoint has none"
NO_PLACE = "this run has none"


@dataclass(frozen=True)
class Fit:
    """How one role's checkpoint fits its engine.

    wanted:         the live tensors to fill, by name
    has_optimizer:  whether the checkpoint holds moments
    casts:          what changes its element type on the way, in words
    """

    role: str
    index: TensorIndex
    wanted: Mapping[str, LiveTensor]
    has_optimizer: bool
    wants_optimizer: bool
    casts: str


def open_for(directory: Path, live: Mapping[str, LiveTensor]) -> TensorIndex:
    """The index of a role's directory under the names of the live model: experts stacked or each by itself, as that
    has them, and masters in the place of weights of 16 bits."""
    index = with_masters(open_directory(directory))
    companions = find_companions(directory)
    weights = [name for name in live if not name.startswith(OPTIMIZER_PREFIX)]
    try:
        return index if companions is None else to_live_form(index, read_config(companions), weights)
    except OSError as error:
        raise DamagedError(f"{error.filename or companions} cannot be read: {error.strerror or error}") from error


def fit(role: str, index: TensorIndex, live: Mapping[str, LiveTensor]) -> Fit:
    """Compare names, shapes and element types of a checkpoint and an engine; nothing is read or written.

    Raises MismatchError naming role and tensors.
    """
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in index)
    wants_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in live)
    if wants_optimizer and not has_optimizer and index.unread:
        # The moments are there: to go on with fresh ones would lose them in silence.
        raise MismatchError(f"{role}: {'; '.join(index.unread)}")
    both = has_optimizer and wants_optimizer
    wanted = {name: tensor for name, tensor in live.items() if both or not name.startswith(OPTIMIZER_PREFIX)}
    offered = index if both else index.weights()
    missing = [name for name in wanted if name not in offered]
    shared = {id_: name for name in wanted if name in offered for id_ in _memory(wanted[name])}
    missing = [name for name in missing if not any(id_ in shared for id_ in _memory(wanted[name]))]
    if missing:
        raise MismatchError(f"{role}: the checkpoint lacks {_some(missing)} of this model; is it of another model?")
    aliases = {entry.alias_of for name, entry in offered.entries.items() if name in wanted}
    unknown = [
        name
        for name, entry in offered.entries.items()
        if name not in wanted and entry.alias_of not in wanted and name not in aliases
    ]
    if unknown:
        raise MismatchError(f"{role}: the checkpoint holds {_some(unknown)}, for which this model has no place")
    wanted = {name: tensor for name, tensor in wanted.items() if name in offered}
    casts = []
    for name, tensor in wanted.items():
        entry = offered[name]
        if entry.shape != tensor.shape:
            raise MismatchError(
                f"{role}: {name} has shape {list(entry.shape)} in the checkpoint and {list(tensor.shape)} in this model"
            )
        if entry.dtype != tensor.dtype:
            if not (DTYPES[entry.dtype].floating and DTYPES[tensor.dtype].floating):
                raise MismatchError(
                    f"{role}: {name} is {entry.dtype} in the checkpoint and {tensor.dtype} in this model"
                )
            casts.append((entry.dtype, tensor.dtype))
    said = ", ".join(f"{casts.count(c)} cast from {c[0]} to {c[1]}" for c in dict.fromkeys(casts))
    return Fit(role, index, wanted, has_optimizer, wants_optimizer, said)


def _memory(tensor: LiveTensor) -> Collection[tuple[int, tuple[int, ...]]]:
    """Where this rank's part of a tensor lies: the same for two names of one tied weight."""
    return [(view.data_ptr(), box.sizes) for box, view in tensor.boxes if box.volume]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def fill(fitted: Fit, engine: Engine) -> Mapping[str, str]:
    """Move the bytes into the engine, then its objects; returns the engine's remarks: part -> why it is fresh.

    `engine.finish_load` is left to the caller, who knows when all ranks are here."""
    from milepost.checkpoint.live import LiveSink  # noqa: PLC0415  it needs torch, which reading steps does not

    sink = LiveSink(fitted.wanted)
    execute(plan(fitted.index, sink.wanted(), WINDOW_BYTES), sink)
    return engine.load_objects(fitted.index.objects)


def role_parts(fitted: Fit, engine: Engine, remarks: Mapping[str, str]) -> list[Part]:
    """The role's parts, restored and not. `remarks`: part -> why it was not restored as it was saved."""
    parts = [Part(f"{fitted.role}/weights", "restored", fitted.casts)]
    own = engine.objects()
    optimizer = f"{fitted.role}/{OPTIMIZER}"
    if fitted.wants_optimizer and fitted.has_optimizer:
        parts.append(Part(optimizer, "restored", remarks.get(OPTIMIZER, "")))
    elif fitted.wants_optimizer:
        parts.append(Part(optimizer, "fresh", NOT_SAVED))
    elif fitted.has_optimizer:
        parts.append(Part(optimizer, "skipped", NO_PLACE))
    for part, key in _OBJECT_OF.items():
        name, saved = f"{fitted.role}/{part}", fitted.index.objects.get(key)
        if part in remarks:
            parts.append(Part(name, "fresh", remarks[part]))
        elif saved and own.get(key):
            parts.append(Part(name, "restored"))
        elif own.get(key):
            parts.append(Part(name, "fresh", NOT_SAVED))
        elif saved:
            parts.append(Part(name, "skipped", NO_PLACE))
    return parts


def fresh_parts(role: str, engine: Engine) -> list[Part]:
    """The same parts at a fresh start."""
    own = engine.objects()
    names = ["weights", *([OPTIMIZER] if own.get("param_groups") else [])]
    names += [part for part, key in _OBJECT_OF.items() if own.get(key)]
    return [Part(f"{role}/{name}", "fresh") for name in names]


def read_state(step_dir: Path) -> dict[str, Any]:
    """`trainer_state.json` of a step; empty for a step of another program, which has none.

    Raises DamagedError where it cannot be read.
    """
    path = step_dir / STATE_FILE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise DamagedError(f"{path} is no trainer state")
    return state


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which keys of a fingerprint differ, in words; empty where none does."""
    differing = [key for key in dict.fromkeys((*saved, *now)) if saved.get(key) != now.get(key)]
    shown = [f"{key} ({_value(saved.get(key))} -> {_value(now.get(key))})" for key in differing[: 2 * _NAMED]]
    more = f" and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
    return ", ".join(shown) + more


def _value(value: str | None) -> str:
    if value is None:
        return "unset"
    return value if len(value) <= 40 else value[:37] + "..."
