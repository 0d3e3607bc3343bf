"""From what a user names (a run, a step, a role's directory, a model's) to the one role directory that is meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.steps import StepDir, judge, newest_good, scan, step_number
from milepost.errors import IncompleteError, NotFoundError
from milepost.layouts import Layout, describe, find_layout

_FOREIGN_STEP = re.compile(r"(?:checkpoint[-_]|step[-_]|epoch_\d+_step_|iter_)(\d{1,15})")
"""Steps of other trainers: `checkpoint-10` (HF Trainer), `checkpoint_10` (accelerate), `step-10` (torchtitan),
`step_10` (NeMo-RL), `epoch_0_step_10` (NeMo Automodel), `iter_0000010` (Megatron-LM, slime)."""
_STEP_FOLDERS = (".", "checkpoint", "checkpoints")


@dataclass(frozen=True)
class Located:
    """A role directory and where it stands.

    directory:  the role directory (or a Hugging Face model directory)
    layout:     its layout
    role:       its name: "actor", "critic"; "" for a model directory that belongs to no step
    step:       number of the step it belongs to, or None
    notes:      what was chosen on the way and why, one line each
    """

    directory: Path
    layout: Layout
    role: str = ""
    step: int | None = None
    notes: tuple[str, ...] = ()


def locate(path: Path, *, role: str | None = None, backend: str = "auto") -> Located:
    """Find the role directory below `path`.

    path:  a role directory, or a step (then its role `role`, by default actor), or a run (then its newest good step)

    Raises NotFoundError where nothing readable lies there, IncompleteError where a run has steps and none is whole.
    """
    if path.name in ("", ".."):
        path = path.absolute().resolve()  # its name and its parent's tell role and step
    if not path.exists():
        raise NotFoundError(f"{path}: no such directory")
    if not path.is_dir():
        raise NotFoundError(f"{path}: is a file; give the directory of a run, a step, a role or a model")
    layout = find_layout(path, backend)
    if layout is not None:
        place = path.resolve()
        step = _step_of(place.parent)
        role_name = place.name if step is not None else ""
        return Located(path, layout, role_name, _step_of(place) if step is None else step, _found(path, layout))
    if scan(path):
        return _in_run(path, role, backend)
    steps = foreign_steps(path, backend)
    if steps:
        return _in_foreign_run(path, steps, role, backend)
    return _in_step(path, role, backend, ())


def foreign_steps(run: Path, backend: str = "auto") -> tuple[StepDir, ...]:
    """The steps of another trainer's run, in numeric order: folders named as one in which a layout is recognised."""
    for folder in _STEP_FOLDERS:
        found = [
            StepDir(int(match[1]), path)
            for path in ((run / folder).iterdir() if (run / folder).is_dir() else ())
            if (match := _FOREIGN_STEP.fullmatch(path.name)) and path.is_dir() and roles_of(path, backend)
        ]
        if found:
            return tuple(sorted(found))
    return ()


def _step_of(path: Path) -> int | None:
    match = _FOREIGN_STEP.fullmatch(path.name)
    return int(match[1]) if match else step_number(path)


def _found(directory: Path, layout: Layout) -> tuple[str, ...]:
    what = describe(directory, layout)
    return (f"{directory} is {what}",) if what else ()


def roles_of(step_dir: Path, backend: str = "auto") -> dict[str, Layout]:
    """The role directories of a step, by name. A step that is one model without roles (verl's supervised trainer) is
    its own, under the name ""."""
    layout = find_layout(step_dir, backend)
    if layout is not None:
        return {"": layout}
    found = {path.name: find_layout(path, backend) for path in sorted(step_dir.iterdir()) if path.is_dir()}
    return {name: layout for name, layout in found.items() if layout is not None}


def _in_run(run: Path, role: str | None, backend: str) -> Located:
    newest = newest_good(run)
    notes = [*newest.notes, *(f"passed over {state.path.name}: {state.why}" for state in newest.skipped)]
    if newest.good is None:
        first = newest.skipped[0]
        raise IncompleteError(f"{run}: no step here is whole ({first.path.name}: {first.why})")
    return _in_step(newest.good.path, role, backend, tuple(notes))


def _in_foreign_run(run: Path, steps: tuple[StepDir, ...], role: str | None, backend: str) -> Located:
    notes: list[str] = []
    for step in reversed(steps):
        state = judge(step.path, named=True)
        if state.good:
            notes.append(f"took {step.path.name}, the newest of {len(steps)} steps that is whole")
            return _in_step(step.path, role, backend, tuple(notes))
        notes.append(f"passed over {step.path.name}: {state.why}")
    raise IncompleteError(f"{run}: no step here is whole ({notes[0].removeprefix('passed over ')})")


def _in_step(step_dir: Path, role: str | None, backend: str, notes: tuple[str, ...]) -> Located:
    roles = roles_of(step_dir, backend)
    if not roles:
        known = "that milepost reads" if backend == "auto" else f"of backend {backend}"
        raise NotFoundError(f"{step_dir}: holds no checkpoint {known}; give the directory of a run, a step or a role")
    name = role or next((name for name in ("actor", "_actor") if name in roles), next(iter(roles)))
    if name not in roles and f"_{name}" in roles:
        name = f"_{name}"  # OpenRLHF's folders
    if name not in roles:
        held = "one model without roles" if "" in roles else ", ".join(roles)
        raise NotFoundError(f"{step_dir}: has no role {name}; it holds {held}")
    if role is None and len(roles) > 1:
        notes = (*notes, f"took {name} of {', '.join(roles)}")
    directory = step_dir / name
    return Located(directory, roles[name], name, _step_of(step_dir), (*notes, *_found(directory, roles[name])))
