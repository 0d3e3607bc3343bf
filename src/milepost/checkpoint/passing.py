"""Weights passed from rank 0, which reads them, to the ranks that hold their boxes, window by window.

All ranks go through the tensors in one order. Of each box rank 0 reads a window once and sends it to every first rank
of a data-parallel group that holds it; that one passes it on to the others of its group. At every tensor a rank waits
only for one that is before it in this chain, so none waits for ever.

Nor does one wait for a rank that has failed. Each has its room for a window before the first goes. A message is a
window and one byte behind it that says whether the window is good. When rank 0 cannot read, it goes on through the
tensors, and to each rank that still waits for something it sends its next window marked as no good, the last one that
it sends there. Who gets such a one does the same to those that wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from milepost.checkpoint.comm import Communicator, together
from milepost.checkpoint.live import LiveSink
from milepost.engines.base import LiveTensor
from milepost.errors import IncompleteError
from milepost.index import Box, TensorEntry, TensorIndex, itemsize
from milepost.transfer.execute import OpenFiles, read_as
from milepost.transfer.plan import Window, windows

if TYPE_CHECKING:
    import torch

_EXPERTS = ".experts."  # in the names of Hugging Face; of its families not all have `.mlp` before it, as Megatron's do


@dataclass(frozen=True, order=True, slots=True)
class _Wanted:
    """A box that a rank holds, and the element type that it has there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str

    def parts(self, window_bytes: int) -> Iterator[Box]:
        """The box in pieces of at most so many bytes; all ranks cut alike."""
        for part in windows(TensorEntry(self.dtype, self.sizes, ()), window_bytes):
            yield Box(tuple(a + b for a, b in zip(self.offsets, part.offsets, strict=True)), part.sizes)

    def largest_part(self, window_bytes: int) -> int:
        """Bytes that hold any of the pieces; at least one element goes at a time."""
        size = itemsize(self.dtype)
        return min(math.prod(self.sizes) * size, max(window_bytes, size))


def pass_on(
    comm: Communicator, live: Mapping[str, LiveTensor], index: TensorIndex | None, window_bytes: int
) -> tuple[int, int]:
    """Fill the boxes of all ranks; returns the bytes that this rank has read from files, and received.

    live:          this rank's boxes; the names are the same on every rank, in the same order
    index:         the weights, on rank 0; else None
    window_bytes:  of a tensor at a time

    If it fails on any rank, every rank raises that rank's error.
    """
    groups = _Groups()
    mine = {name: _wanted(tensor) for name, tensor in live.items()}
    leads = {name: boxes for name, boxes in mine.items() if boxes and groups.leads(name)}
    orders = comm.all_gather(leads)
    rank = _Rank(live, groups, window_bytes)
    passed = [
        wanted for order in (mine, *(orders if index is not None else ())) for of in order.values() for wanted in of
    ]
    # Before the first window: a rank without memory for one could not pass on to others that it has failed.
    together(comm, lambda: rank.make_room(max((wanted.largest_part(window_bytes) for wanted in passed), default=0)))

    def walk() -> None:
        with OpenFiles() as files:
            for name in live:
                if index is None:
                    for wanted in mine[name]:
                        rank.take(name, wanted)
                else:
                    for wanted, askers in _askers(orders, name):
                        rank.give(name, wanted, index[name], askers, files, own=wanted in mine[name])
        if rank.error is not None:
            raise rank.error

    together(comm, walk)
    return rank.read, rank.received


def _askers(orders: Sequence[Mapping[str, list[_Wanted]]], name: str) -> list[tuple[_Wanted, list[int]]]:
    """The boxes of a tensor that ranks ask for, in one order, and which ranks."""
    askers: dict[_Wanted, list[int]] = {}
    for asker, order in enumerate(orders):
        for wanted in order.get(name, ()):
            askers.setdefault(wanted, []).append(asker)
    return sorted(askers.items())


def _wanted(tensor: LiveTensor) -> list[_Wanted]:
    return sorted({_Wanted(box.offsets, box.sizes, tensor.dtype) for box, _ in tensor.boxes})


class _Groups:
    """The data-parallel groups of this rank. Experts have one of their own: the other ranks that hold the same."""

    def __init__(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415  the room is read where no rank is
        from megatron.core import parallel_state  # noqa: PLC0415

        self._dist = dist
        self._rank = dist.get_rank()
        self._dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._expert = parallel_state.get_expert_data_parallel_group()

    def leads(self, name: str) -> bool:
        """Whether this rank passes a tensor on to the others that hold the same boxes."""
        return self._first(self.of(name)) == self._rank

    def share(self, name: str, message: torch.Tensor) -> None:
        """Send bytes from the rank that leads to the others of its group."""
        group = self.of(name)
        if group.size() > 1:
            self._dist.broadcast(message, self._first(group), group=group)

    def of(self, name: str) -> Any:
        """The ranks that hold the same boxes of a tensor."""
        return self._expert if _EXPERTS in name else self._dense

    def _first(self, group: Any) -> int:
        return self._dist.get_global_rank(group, 0)


class _Rank:
    """What one rank does with a window.

    error:           why this rank could not do its part
    read, received:  bytes
    """

    def __init__(self, live: Mapping[str, LiveTensor], groups: _Groups, window_bytes: int) -> None:
        import torch  # noqa: PLC0415  the same
        import torch.distributed as dist  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        self._sink = LiveSink(live)
        self._groups = groups
        self._window_bytes = window_bytes
        # sent from where parameters lie: NCCL knows no other memory
        held = (view.device for tensor in live.values() for _, view in tensor.boxes)
        self._device = next(held, torch.device("cpu"))
        self._room = torch.empty(0, dtype=torch.uint8)
        self._good = True
        self._ended: set[Any] = set()  # ranks and groups between which and this rank the last message has passed
        self.error: Exception | None = None
        self.read = self.received = 0

    def make_room(self, nbytes: int) -> None:
        """Take the memory through which all windows of this rank go, none larger than so many bytes, and the mark."""
        self._room = self._torch.empty(nbytes + 1, dtype=self._torch.uint8, device=self._device)

    def give(
        self, name: str, wanted: _Wanted, entry: TensorEntry, askers: list[int], files: OpenFiles, *, own: bool
    ) -> None:
        """On rank 0: read a box and send it to those who ask for it."""
        for part in wanted.parts(self._window_bytes):
            message = self._message(part, wanted)
            if self._good:
                try:
                    self._fill(message, name, part, wanted, entry, files)
                except Exception as error:  # noqa: BLE001  whatever it is, the others wait for this window
                    self._good, self.error = False, error
            self._mark(message)
            for asker in askers:
                if asker and self._open(asker):
                    self._dist.send(message, asker)
                    self._heed(message, asker)
            if own:
                self._share(name, part, message)

    def take(self, name: str, wanted: _Wanted) -> None:
        """On the others: a box from rank 0, or from the rank that leads here."""
        for part in wanted.parts(self._window_bytes):
            message = self._message(part, wanted)
            if self._groups.leads(name):
                if self._open(0):
                    self._dist.recv(message, 0)
                    self._heed(message, 0)
                self._mark(message)
            self._share(name, part, message)
            self.received += message.numel() - 1

    def _share(self, name: str, part: Box, message: torch.Tensor) -> None:
        """Pass a window on to the group, or get it from there; and keep it."""
        group = self._groups.of(name)
        if self._open(group):
            self._groups.share(name, message)
            self._heed(message, group)
        if self._good and self.error is None:
            try:
                for place in self._sink.places(name, part):
                    place.copy_(message[:-1].view(place.dtype).reshape(part.sizes))
            except Exception as error:  # noqa: BLE001  this rank still passes on what others wait for
                self.error = error

    def _message(self, part: Box, wanted: _Wanted) -> torch.Tensor:
        """The room, as large as a window, in bytes (gloo sends no integers of 2), and the mark."""
        return self._room[: part.volume * itemsize(wanted.dtype) + 1]

    def _fill(
        self, message: torch.Tensor, name: str, part: Box, wanted: _Wanted, entry: TensorEntry, files: OpenFiles
    ) -> None:
        window = Window(name, entry.dtype, part, tuple(entry.pieces(part)))
        if sum(piece.box.volume for piece in window.pieces) != part.volume:
            raise IncompleteError(f"{name}: a part of box {part} is in no file")
        bits = read_as(window, wanted.dtype, None, files)
        message[:-1].copy_(self._torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view(np.uint8)))
        self.read += window.nbytes

    def _mark(self, message: torch.Tensor) -> None:
        message[-1] = int(self._good)

    def _heed(self, message: torch.Tensor, other: Any) -> None:
        """After a message between this rank and another one, or a group."""
        if not message[-1]:
            self._good = False
            self._ended.add(other)

    def _open(self, other: Any) -> bool:
        return other not in self._ended
