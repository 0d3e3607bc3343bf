"""Means over ranks, and times."""

from __future__ import annotations

import time

import pytest
import torch

from milepost.trainer.metrics import Stopwatch, Tally


def test_means_are_over_what_all_ranks_counted() -> None:
    mine, other = Tally(), Tally()
    mine.add("a", 6.0, 2)
    mine.add("a", torch.tensor(3.0), torch.tensor(1))
    mine.add("b", 0.0, 0)
    other.add("a", 1.0, 7)
    other.add("b", 0.0, 0)
    seen: list[torch.Tensor] = []
    other.means(lambda tensor: (seen.append(tensor.clone()), tensor)[1])
    assert mine.means(lambda tensor: tensor + seen[0]) == {"a": 1.0, "b": 0.0}
    assert Tally().means(lambda tensor: tensor) == {}


def test_sums_keep_what_float32_would_lose() -> None:
    tally = Tally()
    tally.add("a", torch.tensor(16777216.0), 1)
    tally.add("a", torch.tensor(1.0), 0)
    assert tally.means(lambda tensor: tensor)["a"] == 16777217.0


def test_a_stopwatch_adds_up_also_when_the_block_fails() -> None:
    watch = Stopwatch()
    with watch.time("gen"):
        time.sleep(0.02)
    with pytest.raises(KeyError), watch.time("gen"):
        time.sleep(0.02)
        raise KeyError
    assert watch.metrics().keys() == {"timing_s/gen"}
    assert 0.04 <= watch.metrics()["timing_s/gen"] < 1
