"""Are two tensors the same, bit for bit? Both are streamed, and not read at all where they are the same bytes."""

from __future__ import annotations

import numpy as np

from milepost.errors import MismatchError
from milepost.index import TensorEntry
from milepost.transfer import windows

_WINDOW_BYTES = 4 << 20


def require_equal(
    name: str, entry: TensorEntry, other_name: str, other: TensorEntry, claim: str, advice: str = ""
) -> None:
    """Raise MismatchError unless both hold the same bits. `claim` says why they must, `advice` what to do."""
    if entry.dtype == other.dtype and entry.shape == other.shape:
        if (entry.alias_of or name) == (other.alias_of or other_name):
            return
        boxes = windows(entry, _WINDOW_BYTES)
        if all(np.array_equal(entry.bits(box), other.bits(box)) for box in boxes):
            return
    raise MismatchError(f"{name} and {other_name} differ, but {claim}.{advice}")
