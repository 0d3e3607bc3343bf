"""Comparing a checkpoint with a live model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost.checkpoint.restore import fit
from milepost.engines.base import LiveTensor
from milepost.errors import MismatchError
from milepost.index import Box, TensorEntry, TensorIndex


def _live(name: str) -> LiveTensor:
    return LiveTensor(name, (2,), "float32", ((Box.whole((2,)), torch.zeros(2)),))


def test_moments_that_are_there_and_cannot_be_read_are_not_lost_in_silence() -> None:
    entries = {"w": TensorEntry("float32", (2,), ())}
    live: dict[str, Any] = {name: _live(name) for name in ("w", "optim/w/exp_avg")}
    reason = "optimizer moments: one flat run"
    with pytest.raises(MismatchError, match=f"actor: {reason}"):
        fit("actor", TensorIndex(entries, "fsdp", unread=(reason,)), live)
    # A checkpoint without any, and a model that wants none.
    assert not fit("actor", TensorIndex(entries, "fsdp"), live).has_optimizer
    assert not fit("actor", TensorIndex(entries, "megatron", skipped=("16 _extra_state entries",)), live).has_optimizer
    assert list(fit("actor", TensorIndex(entries, "fsdp", unread=(reason,)), {"w": live["w"]}).wanted) == ["w"]
