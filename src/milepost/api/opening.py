"""open: a checkpoint as an index of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from milepost.api.calls import AnyPath
from milepost.checkpoint.locate import Located, locate
from milepost.index import TensorIndex
from milepost.layouts import open_directory
from milepost.layouts.huggingface import find_companions, read_config


@dataclass(frozen=True)
class Checkpoint:
    """One role of one checkpoint, opened: nothing is read yet but headers."""

    located: Located
    index: TensorIndex

    @property
    def directory(self) -> Path:
        """The role's directory."""
        return self.located.directory

    @property
    def layout(self) -> str:
        """Name of its layout: "fsdp", "huggingface"."""
        return self.index.layout

    @property
    def role(self) -> str:
        """ "actor", "critic"; "" for a model directory that belongs to no step."""
        return self.located.role

    @property
    def step(self) -> int | None:
        """The step's number, or None where the directory belongs to none."""
        return self.located.step

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json; NotFoundError where the checkpoint has none."""
        return read_config(find_companions(self.directory) or self.directory)


def open(path: AnyPath, *, role: str | None = None, backend: str = "auto") -> Checkpoint:
    """Open a checkpoint: a role directory, a step (its actor, or `role`), a run (its newest good step), or a model."""
    located = locate(Path(path), role=role, backend=backend)
    return Checkpoint(located, open_directory(located.directory, located.layout.name))
