"""A plain engine for tests of the record: a few weights under Adam whose every value follows from the step.

It satisfies `milepost.engines.Engine` and writes the FSDP layout with torch.save. Every rank holds all of every tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from milepost.checkpoint.diary.events import EVENTS, EventLog
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.steps import STATE_FILE
from milepost.engines.base import RNG, LiveTensor, RoleFiles
from milepost.index import Box, moment_name
from milepost.layouts import open_directory
from milepost.layouts.fsdp import CONFIG_FILE, config_text, rank_file

SHAPES = {"layer.weight": (5, 3), "layer.bias": (5,), "head.weight": (2, 5)}


class TinyEngine:
    """`train(step)` sets weights and moments to values that only this role has at this step."""

    layout = "fsdp"

    def __init__(
        self,
        role: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        optimizer: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self.moments: dict[str, torch.Tensor] = {}
        if optimizer:
            for name, shape in shapes.items():
                self.moments[moment_name(name, "exp_avg")] = torch.zeros(shape)
                self.moments[moment_name(name, "exp_avg_sq")] = torch.zeros(shape)
                self.moments[moment_name(name, "step")] = torch.zeros(())
        self.schedule: dict[str, Any] | None = {"last_epoch": 0} if optimizer else None
        self.fail_on_save: BaseException | None = None

    def train(self, step: int) -> None:
        for name, tensor in self.everything().items():
            seed = int.from_bytes(hashlib.sha256(f"{self.role} {name} {step}".encode()).digest()[:4], "big")
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        if self.schedule is not None:
            self.schedule["last_epoch"] = step

    def everything(self) -> dict[str, torch.Tensor]:
        return {**self.weights, **self.moments}

    def is_at(self, step: int) -> bool:
        """Whether every value, bit for bit, is that of `step`."""
        other = TinyEngine(self.role, shapes={n: tuple(t.shape) for n, t in self.weights.items()})
        other.train(step)
        expected = other.everything()
        return all(torch.equal(tensor, expected[name]) for name, tensor in self.everything().items())

    def tensors(self) -> Mapping[str, LiveTensor]:
        return {
            name: LiveTensor(name, tuple(t.shape), str(t.dtype)[6:], ((Box.whole(tuple(t.shape)), t),))
            for name, t in self.everything().items()
        }

    def objects(self) -> Mapping[str, Any]:
        groups = [{"lr": 0.5}] if self.moments else None
        return {"scheduler": self.schedule, "param_groups": groups, "rng": {self.rank: {"cpu": torch.get_rng_state()}}}

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        remarks = {}
        if self.schedule is not None and objects.get("scheduler") is not None:
            self.schedule = dict(objects["scheduler"])
        saved = objects.get("rng") or {}
        if len(saved) != self.world_size:
            remarks[RNG] = f"saved by {len(saved)} ranks, now {self.world_size}; fresh"
        return remarks

    def finish_load(self) -> None:
        pass

    def save(self, files: RoleFiles) -> None:
        contents: dict[str, Any] = {"model": self.weights}
        if self.moments:
            state = {
                number: {
                    moment: self.moments[moment_name(name, moment)] for moment in ("step", "exp_avg", "exp_avg_sq")
                }
                for number, name in enumerate(self.weights)
            }
            numbers = list(range(len(self.weights)))
            group = {"lr": 0.5, "params": numbers, "param_names": list(self.weights)}
            contents["optim"] = {"state": state, "param_groups": [group]}
        contents["extra_state"] = {"lr_scheduler": self.schedule, "rng": {"cpu": torch.get_rng_state()}}
        for kind, state in contents.items():
            with files.create(rank_file(kind, self.world_size, self.rank)) as file:
                torch.save(state, file)
            if self.fail_on_save is not None:
                raise self.fail_on_save
        if self.rank == 0:
            with files.create(CONFIG_FILE) as file:
                file.write(config_text(self.world_size).encode())


class Counter:
    """A part of the training state: one number."""

    def __init__(self, value: int = 0, complaint: str | None = None) -> None:
        self.value = value
        self.complaint = complaint

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> str | None:
        if self.complaint is None:
            self.value = state["value"]
        return self.complaint


class Run:
    """One process's view of a run: two roles, one counter, a manager."""

    def __init__(self, root: Path, *, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.root = root
        self.actor = TinyEngine("actor", rank=rank, world_size=world_size)
        self.critic = TinyEngine("critic", rank=rank, world_size=world_size)
        self.counter = Counter()
        self.manager = CheckpointManager(
            root,
            options.pop("roles", {"actor": self.actor, "critic": self.critic}),
            parts=options.pop("parts", {"counter": self.counter}),
            events=EventLog(root / EVENTS),
            **options,
        )

    def train(self, *steps: int) -> None:
        """Train and save each of the steps."""
        for step in steps:
            self.reach(step)
            self.manager.save(step, {"reward": step / 10})

    def reach(self, step: int) -> None:
        for engine in (self.actor, self.critic):
            engine.train(step)
        self.counter.value = step

    def is_at(self, step: int) -> bool:
        return self.actor.is_at(step) and self.critic.is_at(step) and self.counter.value == step


def trained(root: Path, *steps: int, **options: Any) -> Run:
    """A fresh run that has saved these steps."""
    run = Run(root, **options)
    run.manager.resume()
    run.train(*steps)
    return run


def resumed(root: Path, mode: str = "auto", path: Path | None = None, **options: Any) -> Run:
    """A new process's run, resumed."""
    run = Run(root, **options)
    run.manager.resume(mode, path)
    return run


def disk_is_at(step_dir: Path, step: int) -> bool:
    """Whether both roles on disk hold, bit for bit, the values of `step`."""
    for role in ("actor", "critic"):
        engine = TinyEngine(role)
        engine.train(step)
        index = open_directory(step_dir / role)
        expected = engine.everything()
        if set(index) != set(expected):
            return False
        if not all(torch.equal(index[name].read(), tensor) for name, tensor in expected.items()):
            return False
    return True


def names(root: Path) -> set[str]:
    """What lies in a run's folder, the diary aside."""
    return {path.name for path in root.iterdir()} - {EVENTS}


def make_foreign(step_dir: Path) -> None:
    """What another program would have written: the same role files, a data.pt, and no manifest."""
    (step_dir / MANIFEST).unlink()
    (step_dir / STATE_FILE).unlink()
    (step_dir / "data.pt").write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
