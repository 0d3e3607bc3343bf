"""Which commands there are, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "running",
        "config": "running",
        "status": "running",
        "report": "running",
        "merge": "merging",
        "test": "comparing",
        "convert": "converting",
        "inspect": "inspecting",
        "verify": "inspecting",
        "diff": "diffing",
        "prune": "pruning",
    }
)
"""Each command, and the module beside this one that has the function of its name. A module is imported when one of its
commands is first asked for: a merge pays for no other command's start."""


def function_of(command: str) -> Callable[..., Any]:
    """The function that is a command; its annotations say what it takes (`milepost.cli.declared`)."""
    function: Callable[..., Any] = getattr(import_module(f"milepost.cli.{COMMANDS[command]}"), command)
    return function
