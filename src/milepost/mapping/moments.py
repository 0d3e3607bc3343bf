"""A weight's name inside the names of its optimizer moments: what is done to a weight is done to them."""

from __future__ import annotations

from collections.abc import Callable

from milepost.index import OPTIMIZER_PREFIX, moment_name


def split(name: str) -> tuple[str, str | None]:
    """A name as (weight, moment); no moment for a weight."""
    if not name.startswith(OPTIMIZER_PREFIX):
        return name, None
    weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
    return weight, moment


def joined(weight: str, moment: str | None) -> str:
    """The inverse of `split`."""
    return weight if moment is None else moment_name(weight, moment)


def renamed(name: str, change: Callable[[str], str]) -> str:
    """A weight's name put through `change`, also inside the name of a moment."""
    weight, moment = split(name)
    return joined(change(weight), moment)
