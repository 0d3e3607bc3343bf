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
    torch.set_rng_state(as_tensor(state["cpu"]))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(as_tensor(state["cuda"]))


def take_over(saved: Mapping[int, Mapping[str, Any]], rank: int, world_size: int, *, seed: int, step: int) -> str:
    """Put this rank's generators into the state that it had when it saved, or, at another number of ranks, into fresh
    ones of its own; why, where it is the latter.

    saved:       rank -> its captured state
    seed, step:  what fresh streams are derived from
    """
    if len(saved) == world_size and rank in saved:
        restore(saved[rank])
        if torch.cuda.is_available() and "cuda" not in saved[rank]:
            return "the checkpoint has none of the device; that one is fresh"
        return ""
    seed_all(seed, step, world_size, rank)
    came = f"saved by {len(saved)} ranks, now {world_size}" if saved else "the checkpoint has none"
    return f"{came}; each rank has a fresh stream of its own, derived from seed {seed} and step {step}"


@contextmanager
def isolated() -> Iterator[None]:
    """Leave every generator, at the end of the block, as it was at its start."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def as_tensor(state: Any) -> torch.Tensor:
    """A generator's state as torch takes it, whatever a reader made of it."""
    return state if isinstance(state, torch.Tensor) else torch.from_numpy(np.array(state, np.uint8))
