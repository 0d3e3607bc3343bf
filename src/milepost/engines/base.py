"""What milepost asks of a training engine: its live state as named boxes, and nothing else.

The same words as for files (`milepost.index`), over memory: a save writes the boxes, a resume fills them. An engine
that satisfies `Engine` can resume from any layout, written by any engine on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

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
        """Open a new file of that relative name for writing. Its bytes are copied, counted and hashed as they pass; it
        is on the disk when the save is."""

    def save(self, name: str, state: Any, *, alone: bool = False) -> None:
        """Write an object into a new file as torch.save does, by one copy of its tensors, after which it may change.
        For whatever is large: a save that does not block makes nothing but this copy while training waits.

        alone: every tensor without what else lies in its memory, and as one of the CPU
        """

    def save_row(self, name: str, values: Iterable[torch.Tensor | memoryview]) -> list[tuple[int, int]]:
        """Write values one behind the other into a new file, by one copy as `save` does: a tensor as torch.save writes
        it alone, bytes as they are. Returns the first byte and the number of bytes of each."""


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
        """Rebuild what is derived from the tensors just written: 16-bit copies, flat buffers. All ranks call it
        together, once every one of them has written its own."""

    def save(self, files: RoleFiles) -> None:
        """Write this rank's files of the engine's own layout. All ranks call it together."""


class TrainingEngine(Engine, Protocol):
    """What a trainer needs of an engine besides its record. It is an `EagerEngine` or a `PipelineEngine`.

    Gradients are averaged over the data-parallel ranks: those that train on other sequences. A gradient whose norm is
    not finite leaves weights and moments as they are.
    """

    @property
    def data_rank(self) -> int:
        """This process's place among the data-parallel ranks; ranks that share a model's parts have the same."""

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""

    @property
    def model(self) -> Any:
        """The model: to generate, for forwards without gradients, and to switch between training and evaluation."""

    def step(self) -> float:
        """Clip, update, clear the gradient. Returns the global norm before clipping. All ranks call it together."""

    def advance_schedule(self) -> None:
        """Count one finished training step."""

    def release(self) -> None:
        """Drop gathered copies of weights after forwards that no backward follows."""

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of the next update of each parameter group; none for a frozen model."""


@runtime_checkable
class EagerEngine(TrainingEngine, Protocol):
    """An engine whose every rank runs the whole model: a forward, then its backward, whenever the trainer likes."""

    @property
    def forward(self) -> Callable[..., Any]:
        """What is called in place of `model` for a forward that a `backward` follows."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; with `last` they are averaged over the ranks."""


@dataclass(frozen=True)
class Inputs:
    """One micro-batch for a pipeline. B = sequences, S = tokens.

    input_ids:       [B, S]
    attention_mask:  [B, S], 1 for real tokens, which stand side by side in each row
    keep:            of how many of the last positions the outputs are needed
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    keep: int


@dataclass(frozen=True)
class Outputs:
    """What a model of transformers returns, as far as it is looked at: logits, or the values of a token classifier.
    [B, keep, vocab_size or 1]"""

    logits: torch.Tensor


@runtime_checkable
class PipelinedModel(Protocol):
    """A model on several ranks one after the other. All of them call its methods together, with the same sequences."""

    @property
    def lockstep(self) -> bool:
        """Whether ranks with other sequences must go through as many forwards: experts lie on them."""

    def forward_only(self, batches: Sequence[Inputs], function: Callable[[int, Outputs], Any]) -> list[Any]:
        """`function` of the number and the outputs of every micro-batch, without gradients, on every rank. It is called
        where the last part of the model is."""

    def remembering(self, rows: int, width: int, more: int) -> AbstractContextManager[Any]:
        """Room for what a model keeps of `rows` sequences: prompts of `width` tokens and `more` tokens behind them."""

    def forward_next(
        self, memory: Any, ids: torch.Tensor, mask: torch.Tensor, function: Callable[[int, Outputs], Any]
    ) -> Any:
        """`function` of what comes behind the last of all tokens so far, [B, 1, vocab_size], on every rank; see
        `forward_only`.

        memory:  of `remembering`
        ids:     [B, n], at first the prompts, padded on the left; then the token that came behind each
        mask:    [B, S] of all tokens so far, 1 for real ones
        """

    def one_of_peers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Inside of such a function: of the values that the ranks have on which it is called, those of one of them."""


@runtime_checkable
class PipelineEngine(TrainingEngine, Protocol):
    """An engine whose model lies on several ranks one after the other, so that only the engine can say in which order
    forwards and backwards go."""

    def forward_backward(
        self, batches: Sequence[Inputs], loss: Callable[[int, Outputs], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """Add the gradients of all micro-batches of an update, averaged over the data-parallel ranks.

        loss: of the number of a micro-batch and its outputs the loss and a result. It is called where the last part of
              the model is.

        Returns the results, on every rank. All ranks call it together.
        """
