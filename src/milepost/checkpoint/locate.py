"""From what a user names (a run, a step, a role's directory, a model's) to the one role directory that is meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.steps import newest_good, scan, step_number
from milepost.errors import IncompleteError, NotFoundError
from milepost.layouts import Layout, find_layout


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
    if not path.exists():
        raise NotFoundError(f"{path}: no such directory")
    if not path.is_dir():
        raise NotFoundError(f"{path}: is a file; give the directory of a run, a step, a role or a model")
    layout = find_layout(path, backend)
    if layout is not None:
        step = step_number(path.parent)
        return Located(path, layout, path.name if step is not None else "", step)
    if scan(path):
        return _in_run(path, role, backend)
    return _in_step(path, role, backend, ())


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
        raise IncompleteError(f"{run}: no step here is whole ({newest.skipped[0].path.name}: {newest.skipped[0].why})")
    return _in_step(newest.good.path, role, backend, tuple(notes))


def _in_step(step_dir: Path, role: str | None, backend: str, notes: tuple[str, ...]) -> Located:
    roles = roles_of(step_dir, backend)
    if not roles:
        known = "that milepost reads" if backend == "auto" else f"of backend {backend}"
        raise NotFoundError(f"{step_dir}: holds no checkpoint {known}; give the directory of a run, a step or a role")
    name = role or ("actor" if "actor" in roles else next(iter(roles)))
    if name not in roles:
        held = "one model without roles" if "" in roles else ", ".join(roles)
        raise NotFoundError(f"{step_dir}: has no role {name}; it holds {held}")
    if role is None and len(roles) > 1:
        notes = (*notes, f"took {name} of {', '.join(roles)}")
    return Located(step_dir / name, roles[name], name, step_number(step_dir), notes)
