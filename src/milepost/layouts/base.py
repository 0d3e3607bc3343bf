"""What a layout is: a way in which one role's state lies in a directory.

A layout knows how files look and nothing of what is done with them. To add one, write a module with a reader that
satisfies `Layout`, and list it in `milepost.layouts.LAYOUTS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from milepost.index import TensorIndex


class Layout(Protocol):
    """A reader of one on-disk layout."""

    @property
    def name(self) -> str:
        """What `--backend` calls it: "fsdp", "huggingface", ..."""

    def recognises(self, directory: Path) -> bool:
        """Whether this directory holds this layout, whole or not. Looks at names only; cheap."""

    def open(self, directory: Path) -> TensorIndex:
        """Draw the picture of `directory`.

        Reads headers only, runs no code found in a file. Raises IncompleteError where files are missing,
        DamagedError where one contradicts itself or another, RefusedError where one asks for code to be run.
        """
