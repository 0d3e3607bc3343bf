"""What a command takes, said once, in the annotations of its function, for both of its readers.

`quick` reads a call that is right. `full` gives the rest to typer: help, and what is wrong with a call. Typer, and the
pydantic that it imports to convert each value, take longer to start than a small merge takes to run.
"""

from __future__ import annotations

from typing import Any


class Declared:
    """One parameter of a command.

    names:     spellings of an option; none for an argument
    settings:  what `typer.Option` or `typer.Argument` takes: help, metavar, min, hidden, show_default
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


class Option(Declared):
    """Given by name, in any order: `--name VALUE`, or `--name` alone where it is a bool."""


class Argument(Declared):
    """Given by its place."""


def fold(name: str) -> str:
    """A name of an option as it is compared: dashes and underscores are interchangeable."""
    return name.replace("_", "-")
