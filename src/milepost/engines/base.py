"""What milepost asks of a training engine: its live state as named boxes, and nothing else.

The same words as for files (`milepost.index`), over memory: a save writes the boxes, a resume fills them. An engine
that satisfies `Engine` can resume from any layout, written by any engine on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from milepost.index import Box, Shape

if TYPE_CHECKING:
    import torch


OPTIMIZER, SCHEDULE, RNG = "optimizer", "learning-rate schedule", "RNG"
"""The parts of an engine's state besides its weights, as a resume names them to the user."""


@dataclass(frozen=True)
class LiveTensor:
    """One tensor of the training state, as this rank holds it.

    name:   canonical name: Hugging Face's for a weight, `optim/<weight>/<moment>` for a moment
    shape:  global shape
    dtype:  torch's name of the element type
    boxes:  the boxes of the global tensor that this rank owns, each with a writable view of them, in box order;
            empty where the rank owns nothing. A replicated tensor is owned whole by every rank.
    """

    name: str
    shape: Shape
    dtype: str
    boxes: tuple[tuple[Box, torch.Tensor], ...]


class RoleFiles(Protocol):
    """Where an engine puts the files of its role while a step is being saved."""

    @property
    def directory(self) -> Path:
        """The role's directory inside the step that is being written."""

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file of that relative name for writing. Its bytes are counted and hashed as they pass, and it is
        flushed to disk before the context ends."""


class Engine(Protocol):
    """A live model with its optimizer, sharded over ranks."""

    @property
    def layout(self) -> str:
        """Name of the on-disk layout that `save` writes."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks that share the state."""

    def tensors(self) -> Mapping[str, LiveTensor]:
        """Every weight, persistent buffer and optimizer moment of this rank; moments not yet made are made here."""

    def objects(self) -> Mapping[str, Any]:
        """The small state that is not tensors: learning-rate scheduler, optimizer hyperparameters, RNG."""

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        """Take over `TensorIndex.objects` of a checkpoint of any world size.

        Returns what was not restored as it was saved: OPTIMIZER (its hyperparameters), SCHEDULE or RNG -> why.
        """

    def finish_load(self) -> None:
        """Rebuild what is derived from the tensors just written: 16-bit copies, flat buffers."""

    def save(self, files: RoleFiles) -> None:
        """Write this rank's files of the engine's own layout. All ranks call it together."""
