"""Reading a call that is right, without typer: nothing is decided here that typer would decide otherwise.

Whatever is not plainly right (an unknown option, a value that does not fit, `--help`) is left to typer by returning
None, so that there is one voice for help and errors. Tests hold both readings against each other.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from milepost.cli.declared import Argument, Declared, Option, fold

_NUMBERS = {int: re.compile(r"-?[0-9]{1,15}"), float: re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?")}


class _NotPlainError(Exception):
    """Typer is to read this call."""


@dataclass
class _Parameter:
    name: str
    kind: Any  # bool, str, int, float, Path
    several: bool
    declared: Declared
    default: Any
    given: list[Any] = field(default_factory=list)

    def take(self, text: str) -> None:
        """Note a value that was given."""
        self.given.append(self._value(text))

    def _value(self, text: str) -> Any:
        if self.kind in (str, Path):
            return self.kind(text)
        if self.kind not in _NUMBERS or not _NUMBERS[self.kind].fullmatch(text):
            raise _NotPlainError
        number = self.kind(text)
        if number < self.declared.settings.get("min", number):
            raise _NotPlainError
        return number

    def value(self) -> Any:
        """What the command is called with; of a value that was given twice the last one."""
        if self.given:
            return self.given if self.several else self.given[-1]
        if self.default is inspect.Parameter.empty:
            raise _NotPlainError
        return self.default


def read(command: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any] | None:
    """The values that a command is to be called with, or None where typer is to read them.

    arguments:  what follows the command's name
    """
    try:
        parameters = list(_parameters(command))
        _fill(parameters, list(arguments))
        return {parameter.name: parameter.value() for parameter in parameters}
    except _NotPlainError:
        return None


def _parameters(command: Callable[..., Any]) -> Iterator[_Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        annotation = hints[name]
        declared = annotation.__metadata__[0] if get_origin(annotation) is Annotated else None
        if not isinstance(declared, Declared):
            raise _NotPlainError
        kind, several = get_args(annotation)[0], False
        if NoneType in get_args(kind):
            (kind,) = (one for one in get_args(kind) if one is not NoneType)
        if get_origin(kind) is list:
            (kind,), several = get_args(kind), True
        if several and isinstance(declared, Argument):
            raise _NotPlainError
        yield _Parameter(name, kind, several, declared, parameter.default)


def _fill(parameters: list[_Parameter], arguments: list[str]) -> None:
    options = {
        fold(spelling) if spelling.startswith("--") else spelling: parameter
        for parameter in parameters
        if isinstance(parameter.declared, Option)
        for spelling in parameter.declared.names
    }
    places = iter([parameter for parameter in parameters if isinstance(parameter.declared, Argument)])
    words = iter(arguments)
    for word in words:
        if word == "--" or not word:
            raise _NotPlainError
        if not word.startswith("-"):
            _next(places).take(word)
            continue
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        option = options.get(fold(name) if name.startswith("--") else name)
        if option is None:
            raise _NotPlainError
        if option.kind is bool:
            if equals:
                raise _NotPlainError
            option.given.append(True)
            continue
        value = text if equals else _next(words)
        if value.startswith("-") and not equals:
            raise _NotPlainError
        option.take(value)


def _next(stream: Iterator[Any]) -> Any:
    for item in stream:
        return item
    raise _NotPlainError
