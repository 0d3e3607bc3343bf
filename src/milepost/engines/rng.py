"""The random number generators of a process (Python's, numpy's, torch's, the device's): seed, capture, restore.

A captured state has the keys that verl's checkpoints use: "cpu" (torch), "numpy", "random" (Python), "cuda".
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(*entropy: int) -> None:
    """Seed every generator of this process from numbers such as (seed, step, rank).

    Other numbers give statistically independent streams (numpy's SeedSequence), the same numbers the same streams.
    """
    words = np.random.SeedSequence(entropy).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def capture() -> dict[str, Any]:
    """The state of every generator, as `restore` takes it."""
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put the generators into a captured state. A generator that it does not name is left as it is."""
    torch.set_rng_state(_as_tensor(state["cpu"]))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_tensor(state["cuda"]))


@contextmanager
def isolated() -> Iterator[None]:
    """Leave every generator, at the end of the block, as it was at its start."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def _as_tensor(state: Any) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else torch.from_numpy(np.array(state, np.uint8))
