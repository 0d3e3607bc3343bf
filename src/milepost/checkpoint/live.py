"""Filling an engine's live tensors from a checkpoint: a sink over memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from milepost.engines.base import LiveTensor
from milepost.index import Bits, Box

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveSink:
    """Takes boxes of bit patterns and puts them into the views that an engine shows, on whatever device they are."""

    def __init__(self, tensors: Mapping[str, LiveTensor]) -> None:
        self._tensors = tensors

    def wanted(self) -> Iterator[tuple[str, Box]]:
        """Every box that this rank owns: what a plan must bring."""
        for name, tensor in self._tensors.items():
            for box, _ in tensor.boxes:
                yield name, box

    def dtype(self, name: str) -> str:
        """The live tensor's element type."""
        return self._tensors[name].dtype

    def file_range(self, name: str, box: Box) -> None:
        """Live tensors lie in no file."""

    def write(self, name: str, box: Box, bits: Bits) -> None:
        """Copy bit patterns into the view whose box holds `box`."""
        # (numpy's contiguous copy of a scalar would have one dimension.)
        values = torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}").reshape(bits.shape))
        for place in self.places(name, box):
            place.copy_(values)

    def places(self, name: str, box: Box) -> Iterator[torch.Tensor]:
        """Where `box` lies, as signed integers of the elements' size: no value can change, and every torch knows these
        types."""
        for owned, view in self._tensors[name].boxes:
            if owned.intersect(box) == box:
                yield view.detach()[box.within(owned).slices()].view(_SIGNED[view.element_size()])
