"""DeepSpeed engines of tiny models for tests, and what DeepSpeed itself says of their state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from milepost.checkpoint.live import LiveSink
from milepost.engines.base import Engine
from milepost.engines.deepspeed.engine import DeepSpeedEngine
from milepost.engines.deepspeed.setup import ZeroSettings, initialize, start
from milepost.engines.optim import OptimizerSettings
from milepost.index import moment_name
from milepost.layouts import open_directory
from milepost.trainer.models import ModelSource, fill_from_directory, policy_on_meta, tied_names
from milepost.transfer import execute, plan

CPU = torch.device("cpu")
LR = 1e-2
FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.bias")
"""Weights that some engines do not train, of 384 and 8 elements: the second is padded on 3 ranks."""


def settings(grad_clip: float = 1.0) -> OptimizerSettings:
    return OptimizerSettings(LR, (0.9, 0.95), 0.01, lambda step: 1 / (1 + step), grad_clip)


def make(directory: Path, zero: ZeroSettings, *, frozen: bool = False, grad_clip: float = 1.0) -> DeepSpeedEngine:
    """A policy under ZeRO; some of its weights are not trained where `frozen`."""
    start(CPU)
    model = policy_on_meta(ModelSource(directory), zero.dtype)
    for name in FROZEN if frozen else ():
        model.get_parameter(name).requires_grad_(requires_grad=False)
    aliases = tied_names(model)
    engine = initialize(model, CPU, zero, [("", settings(grad_clip))], seed=1, companions=directory)
    fill_from_directory(engine, model, directory, aliases, seed=1)
    engine.finish_load()
    return engine


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(33, (rows, 7), generator=torch.Generator().manual_seed(seed))


def train(engine: Any, steps: int, rows: torch.Tensor) -> list[float]:
    """Some optimizer steps of any kind, each in two micro-batches; the gradient norms."""
    norms = []
    for _ in range(steps):
        for part, last in ((rows[: len(rows) // 2], False), (rows[len(rows) // 2 :], True)):
            logits = engine.forward(input_ids=part).logits.float()
            engine.backward(logits.logsumexp(-1).mean() + logits.square().mean(), last=last)
        norms.append(engine.step())
        engine.advance_schedule()
    return norms


def whole(engine: DeepSpeedEngine) -> dict[str, np.ndarray]:
    """Every tensor whole, by DeepSpeed's own means. All ranks call it together."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, np.ndarray] = {}
    for name, weight in engine.model.named_parameters():
        if not weight.requires_grad:
            with deepspeed.zero.GatheredParameters([weight]) if hasattr(weight, "ds_id") else contextlib.nullcontext():
                found[name] = weight.detach().float().clone().numpy()
            continue
        found[name] = safe_get_full_fp32_param(weight).clone().numpy()
        for moment in ("exp_avg", "exp_avg_sq"):
            found[moment_name(name, moment)] = safe_get_full_optimizer_state(weight, moment).clone().numpy()
    return found


def assert_holds(engine: Engine, expected: Mapping[str, np.ndarray], step: int) -> None:
    """Whether the boxes of this rank hold exactly these values, and the weights count `step` updates."""
    live = engine.tensors()
    counts = {name for name in live if name.endswith("/step")}
    assert set(live) - counts == set(expected)
    assert {float(view) for name in counts for _, view in live[name].boxes} == {float(step)}
    for name in set(live) - counts:
        assert live[name].shape == expected[name].shape, name
        for box, view in live[name].boxes:
            assert view.shape == box.sizes
            np.testing.assert_array_equal(view.float().numpy(), expected[name][box.slices()], err_msg=name)


def load(engine: Engine, directory: Path) -> Mapping[str, str]:
    """As a resume loads a role's directory."""
    index = open_directory(directory)
    live = engine.tensors()
    assert set(live) <= set(index)
    sink = LiveSink(live)
    execute(plan(index, sink.wanted(), 1 << 20), sink)
    remarks = engine.load_objects(index.objects)
    engine.finish_load()
    return remarks


class Folder:
    """The plainest RoleFiles; with `broken`, one whose disk refuses."""

    def __init__(self, directory: Path, *, broken: bool = False) -> None:
        self.directory = directory
        self.broken = broken

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        if self.broken:
            raise OSError(28, "No space left on device")
        (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.directory / name).open("xb") as file:
            yield file

    def save(self, name: str, state: Any, *, alone: bool = False) -> None:
        with self.create(name) as file:
            torch.save(state, file)
