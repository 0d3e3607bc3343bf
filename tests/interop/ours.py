"""A run that milepost saved, for peers to read: actor and critic on two ranks, three steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from interop import sides
from interop.sides import SAVED_STEP, Facts
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict

from milepost.checkpoint.manager import CheckpointManager


@dataclass(frozen=True)
class OurRun:
    """What was saved, and what the run that saved it was and did.

    base:     the Hugging Face model directory that it began with
    root:     the run's folder; `step_dir` is its one step
    dcp:      the same state of the same moment, a folder a role, saved by torch.distributed.checkpoint
    saved:    actor and critic when they were saved
    logits:   role -> what the live model said of `sides.tokens(0)` then, without dropout
    went_on:  actor and critic one more step later
    draws:    rank -> its random numbers after that
    """

    base: Path
    root: Path
    dcp: Path
    saved: dict[str, Facts]
    logits: dict[str, torch.Tensor]
    went_on: dict[str, Facts]
    draws: list[list[float]]

    @property
    def step_dir(self) -> Path:
        """The step."""
        return self.root / f"global_step_{SAVED_STEP}"


def make_run(root: Path) -> OurRun:
    """Train, save, and train on."""
    base = sides.base_model(root / "base", tied=False)
    said = run_ranks(_train_and_save, 2, base, root / "run", root / "dcp")
    first = said[0]
    return OurRun(base, root / "run", root / "dcp", first[0], first[1], first[2], [rank[3] for rank in said])


def _train_and_save(base: Path, root: Path, beside: Path) -> Any:
    roles = sides.engines(base, sides.mesh_of(2), sides.settings())
    sides.seed_rank()
    with CheckpointManager(root, roles) as manager:
        manager.resume()
        sides.train(roles, *range(1, SAVED_STEP + 1))
        manager.save(SAVED_STEP)
    saved = sides.facts(roles)
    logits = {}
    for name, engine in roles.items():
        model, optimizer = get_state_dict(engine.model, engine.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=beside / name)
        with torch.no_grad():
            logits[name] = engine.model.eval()(input_ids=sides.tokens(0)).logits
        engine.model.train()
    sides.train(roles, SAVED_STEP + 1)
    return saved, logits, sides.facts(roles), sides.draws()
