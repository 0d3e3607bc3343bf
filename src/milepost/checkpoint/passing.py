"""Weights passed from rank 0, which reads them, to the ranks that hold their boxes, window by window.

All ranks go through the tensors in one order. Of each box rank 0 reads a window once and sends it to every first rank
of a data-parallel group that holds it; that one passes it on to the others of its group. At every tensor a rank waits
only for one that is before it in this chain, so none waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from milepost.checkpoint.comm import Communicator
from milepost.checkpoint.live import LiveSink
from milepost.engines.base import LiveTensor
from milepost.errors import IncompleteError
from milepost.index import Bits, Box, TensorEntry, TensorIndex, itemsize
from milepost.transfer.execute import OpenFiles, read_as
from milepost.transfer.plan import Window, windows

if TYPE_CHECKING:
    import torch

_EXPERTS = ".experts."


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


def pass_on(
    comm: Communicator, live: Mapping[str, LiveTensor], index: TensorIndex | None, window_bytes: int
) -> tuple[int, int]:
    """Fill the boxes of all ranks; returns the bytes that this rank has read from files, and received.

    live:          this rank's boxes; the names are the same on every rank, in the same order
    index:         the weights, on rank 0; else None
    window_bytes:  of a tensor at a time
    """
    groups = _Groups()
    mine = {name: _wanted(tensor) for name, tensor in live.items()}
    leads = {name: boxes for name, boxes in mine.items() if boxes and groups.leads(name)}
    orders = comm.all_gather(leads)
    with OpenFiles() as files:
        rank = _Rank(live, groups, window_bytes, files)
        for name in live:
            if index is not None:
                askers: dict[_Wanted, list[int]] = {}
                for asker, order in enumerate(orders):
                    for wanted in order.get(name, ()):
                        askers.setdefault(wanted, []).append(asker)
                for wanted in sorted(askers):
                    rank.give(name, wanted, index[name], askers[wanted], own=wanted in mine[name])
            else:
                for wanted in mine[name]:
                    rank.take(name, wanted)
    return rank.read, rank.received


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
        return self._first(self._of(name)) == self._rank

    def share(self, name: str, data: torch.Tensor) -> None:
        """Send bytes from the rank that leads to the others of its group."""
        group = self._of(name)
        if group.size() > 1:
            self._dist.broadcast(data, self._first(group), group=group)

    def _of(self, name: str) -> Any:
        return self._expert if _EXPERTS in name else self._dense

    def _first(self, group: Any) -> int:
        return self._dist.get_global_rank(group, 0)


class _Rank:
    """What one rank does with a window."""

    def __init__(self, live: Mapping[str, LiveTensor], groups: _Groups, window_bytes: int, files: OpenFiles) -> None:
        import torch  # noqa: PLC0415  the same
        import torch.distributed as dist  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        self._sink = LiveSink(live)
        self._groups = groups
        self._window_bytes = window_bytes
        self._files = files
        # sent from where parameters lie: NCCL knows no other memory
        held = (view.device for tensor in live.values() for _, view in tensor.boxes)
        self._device = next(held, torch.device("cpu"))
        self.read = self.received = 0

    def give(self, name: str, wanted: _Wanted, entry: TensorEntry, askers: list[int], *, own: bool) -> None:
        """On rank 0: read a box and send it to those who ask for it."""
        for part in wanted.parts(self._window_bytes):
            window = Window(name, entry.dtype, part, tuple(entry.pieces(part)))
            if sum(piece.box.volume for piece in window.pieces) != part.volume:
                raise IncompleteError(f"{name}: a part of box {part} is in no file")
            self.read += window.nbytes
            data = self._tensor(read_as(window, wanted.dtype, None, self._files))
            for asker in askers:
                if asker:
                    self._dist.send(data, asker)
            if own:
                self._keep(name, part, data)

    def take(self, name: str, wanted: _Wanted) -> None:
        """On the others: a box from rank 0, or from the rank that leads here."""
        for part in wanted.parts(self._window_bytes):
            size = part.volume * itemsize(wanted.dtype)
            data = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
            if self._groups.leads(name):
                self._dist.recv(data, 0)
            self._keep(name, part, data)
            self.received += size

    def _keep(self, name: str, part: Box, data: torch.Tensor) -> None:
        self._groups.share(name, data)
        for place in self._sink.places(name, part):
            place.copy_(data.view(place.dtype).reshape(part.sizes))

    def _tensor(self, bits: Bits) -> torch.Tensor:
        """As bytes: gloo sends no integers of 2."""
        flat = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        return self._torch.from_numpy(flat).to(self._device)
