"""What `--role` means: a directory of a step (actor, critic), or one of two models in a state dict (policy, value)."""

from __future__ import annotations

from pathlib import Path

from milepost.checkpoint.locate import Located, locate
from milepost.errors import NotFoundError
from milepost.mapping.wrappers import PARTS


def locate_part(path: Path, *, role: str | None = None, backend: str = "auto") -> tuple[Located, str | None]:
    """Find the role directory below `path`, and which model of its state dict is meant (None: the one that it holds).

    "policy" and "value" are models of one state dict, unless the step has a directory of that name.

    Raises what `locate` does.
    """
    if role not in PARTS:
        return locate(path, role=role, backend=backend), None
    try:
        located = locate(path, role=role, backend=backend)
    except NotFoundError:
        located = locate(path, backend=backend)
    return located, None if located.role == role else role
