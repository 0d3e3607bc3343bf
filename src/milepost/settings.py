"""Settings of a call, declared once: a field of a dataclass with its help, of which the command line makes an option
and Python a keyword.

Dataclasses of settings are mixed by inheritance, so what one command takes is one object, and the job that needs a part
of it is given the whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from milepost.units import parse_bytes

BACKEND = "Layout of the checkpoint: auto, fsdp, deepspeed, dcp, megatron, huggingface."
ROLE = "Which role of a step: actor (default), critic. Or policy, value: of a state dict with both."
"""The help of what several commands take."""

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
HELP, FLAG, METAVAR, SIZE, LEAST = "help", "flag", "metavar", "size", "least"


def setting(
    default: Any, text: str, *, flag: str = "", metavar: str = "", size: bool = False, least: int | None = None
) -> Any:
    """A field that is an option and a keyword.

    text:     its help
    flag:     its name on the command line where that is not `--` and the field's name; there dashes and underscores are
              one
    metavar:  what its help calls its value
    size:     whether it is a number of bytes, which may be written "512MB"; `default` is then such a text
    least:    the smallest number allowed
    """
    facts = {HELP: text, FLAG: flag, METAVAR: metavar, SIZE: default if size else None, LEAST: least}
    return field(default=parse_bytes(default) if size else default, metadata=facts)


def declared(kind: type) -> dict[str, tuple[Any, Any, Mapping[str, Any]]]:
    """The settings of a dataclass: name -> type, default, and the facts of `setting`."""
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default, f.metadata) for f in fields(kind) if HELP in f.metadata}


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of settings from what was written: sizes as numbers or texts, paths and several patterns in any form.

    Raises TypeError for a name that is no setting, as a call with an unknown keyword does.
    """
    known = declared(kind)
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise TypeError(f"{unknown!r} is no setting; known are {', '.join(known)}")
    return kind(**{name: _read(value, *known[name]) for name, value in values.items()})


def _read(value: Any, kind: Any, _default: Any, facts: Mapping[str, Any]) -> Any:
    if facts[SIZE]:
        return parse_bytes(str(value))
    if kind == Path | None:
        return None if value is None else Path(value)
    if kind == tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(value or ())
    return value


def keywords(kind: type) -> Callable[[Function], Function]:
    """Show the settings of a dataclass as the keywords of a function that takes them as `**settings`."""

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=facts[SIZE] or default, annotation=hint)
            for name, (hint, default, facts) in declared(kind).items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return show
