"""Saves that do not block: real ranks with an FSDP2 engine, and processes that end while a step is on its way.

(Kills at every change of the disk in the background: tests/faults/test_kill.py.)
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from late_writers import late_writers
from ranks import run_ranks
from tiny import tiny_qwen2
from tiny_engine import Counter, Run, TinyEngine, disk_is_at, names, resumed, trained

from milepost.checkpoint.comm import TorchCommunicator
from milepost.checkpoint.diary.events import EVENTS, EventLog, read_events
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.saving.staging import PAGE
from milepost.checkpoint.steps import TRACKER, scan
from milepost.errors import MilepostError
from milepost.layouts import open_directory

TESTS = Path(__file__).parents[1]


class SlowDisk:
    """No flush of a file of a held step returns before the step is let go."""

    def __init__(self, *held: int) -> None:
        self._held = {step: threading.Event() for step in held}
        self._flush = os.fsync

    def __enter__(self) -> Self:
        os.fsync = self._fsync
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync = self._flush
        for step in self._held:
            self.let_go(step)

    def let_go(self, step: int, seconds: float = 0.0) -> None:
        threading.Timer(seconds, self._held[step].set).start()

    def _fsync(self, fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        for step, gone in self._held.items():
            if f"/.global_step_{step}." in path:
                gone.wait(60)
        self._flush(fd)


def told(act: Callable[[], Any]) -> str:
    try:
        act()
    except MilepostError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(root: Path) -> list[int]:
    return [step.step for step in scan(root)]


def train(engine: Any, seed: int) -> None:
    rows = torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine.forward(input_ids=rows).logits.square().mean(), last=True)
    engine.step()
    engine.advance_schedule()


def snapshot(engine: Any) -> dict[str, list[torch.Tensor]]:
    return {name: [view.clone() for _, view in live.boxes] for name, live in engine.tensors().items()}


def holds(step_dir: Path, engine: Any, state: Mapping[str, list[torch.Tensor]]) -> bool:
    """Whether the disk has these values in the boxes that this rank owns."""
    index = open_directory(step_dir / "actor")
    if set(index) != set(state):
        return False
    return all(
        torch.equal(index[name].read()[box.slices()], value)
        for name, live in engine.tensors().items()
        for (box, _), value in zip(live.boxes, state[name], strict=True)
    )


def scenario(base: Path, model: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.engines.fsdp import MESH_DIM, Sharding
    from milepost.engines.optim import OptimizerSettings
    from milepost.trainer.models import ModelSource, load_policy

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(MESH_DIM,))
    engine = load_policy(
        ModelSource(model),
        mesh,
        torch.device("cpu"),
        dtype=torch.float32,
        sharding=Sharding(),
        optimizer=OptimizerSettings(1e-2, (0.9, 0.95), 0.01, lambda step: 1 / (1 + step), 1.0),
        seed=1,
    )
    root, said = base / "run", {}
    counter = Counter()
    events = EventLog(root / EVENTS)
    manager = CheckpointManager(root, {"actor": engine}, parts={"counter": counter}, keep_last=2, events=events)
    manager.resume()

    # The state at the call, whatever training does: its own collectives go on beside those of the save.
    train(engine, 1)
    counter.value, generators, before = 1, torch.get_rng_state(), snapshot(engine)
    with late_writers():
        folder = manager.save(1, blocking=False)
        counter.value = 99
        torch.rand(3)
        for seed in range(2, 6):
            train(engine, seed)
    manager.wait()
    said["bitwise"] = holds(folder, engine, before) and not holds(folder, engine, snapshot(engine))
    extra = torch.load(folder / f"actor/extra_state_world_size_2_rank_{rank}.pt", weights_only=False)
    said["rng"] = torch.equal(extra["rng"]["cpu"], generators)
    said["counter"] = json.loads((folder / "trainer_state.json").read_text())["parts"]["counter"]
    said["poll"] = [saved.step for saved in manager.poll()], manager.poll()

    # The next save waits for it, and nothing is there before it is durable.
    with SlowDisk(2, 3, 4) as disk:
        train(engine, 7)
        manager.save(2, blocking=False)
        said["early"] = steps(root), manager.poll()
        disk.let_go(2, 0.1)
        manager.save(3, blocking=False)
        said["next"] = steps(root)
        disk.let_go(3, 0.1)
        manager.save(3, blocking=False)
        said["same"] = steps(root), [saved.step for saved in manager.poll()]
        # Retention waits too: of those that are there two stay, and one goes once there is a newer one.
        manager.save(4, blocking=False)
        said["kept_meanwhile"] = steps(root)
    manager.wait()
    said["kept"] = steps(root)

    # A load waits.
    with SlowDisk(5) as disk:
        manager.save(5, blocking=False)
        disk.let_go(5, 0.1)
        said["resumed"] = manager.resume()
    before = snapshot(engine)

    # A disk that fills on one rank, once training goes on: all hear of it at the next call, which is done all the same.
    def refused(step: int, call: Callable[[], Any]) -> tuple[str, list[int], bool]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        dist.barrier()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        manager.save(step, blocking=False)
        manager.linger(30)
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        heard = told(call)
        manager.wait()
        dist.barrier()
        left = steps(root)
        return heard, left, 5 in left and holds(root / "global_step_5", engine, before)

    said["errors"] = [
        refused(6, manager.wait),
        refused(6, lambda: next(filter(None, iter(manager.poll, 0)))),
        refused(6, lambda: manager.save(6)),
        refused(7, lambda: manager.save(8, blocking=False)),
        refused(9, manager.close),
    ]
    said["litter"] = sorted(name for name in names(root) if name.endswith(".tmp"))
    manager = CheckpointManager(root, {"actor": engine}, events=events)
    manager.resume()
    said["disagree"] = told(lambda: manager.save(9, blocking=rank == 0))

    # The end of the run waits.
    with SlowDisk(9) as disk:
        manager.save(9, blocking=False)
        disk.let_go(9, 0.1)
        manager.close()
    said["closed"] = steps(root)
    said["groups"] = manager._saver._channel is None and manager._saver._pool is None
    return said


@pytest.fixture(scope="module")
def base(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def said(base: Path) -> list[dict[str, Any]]:
    return run_ranks(scenario, 2, base, tiny_qwen2(base / "model"))


def test_what_is_written_is_the_state_at_the_call(said: list[dict[str, Any]], base: Path) -> None:
    for of_one in said:
        assert of_one["bitwise"]
        assert of_one["rng"]
        assert of_one["counter"] == {"value": 1}
        assert of_one["poll"] == ([1], ())
    step = base / "run/global_step_9"
    assert check_files(step, read_manifest(step), deep=True) == ()


def test_the_next_save_waits_and_nothing_is_there_before_it_is_durable(said: list[dict[str, Any]]) -> None:
    for of_one in said:
        assert of_one["early"] == ([1], ())
        assert of_one["next"] == [1, 2]
        assert of_one["same"] == ([2, 3], [2, 3])


def test_retention_waits_for_durability(said: list[dict[str, Any]]) -> None:
    for of_one in said:
        assert of_one["kept_meanwhile"] == [2, 3]
        assert of_one["kept"] == [3, 4]


def test_a_load_and_the_end_wait(said: list[dict[str, Any]]) -> None:
    for of_one in said:
        assert of_one["resumed"] == 5
        assert of_one["closed"][-1] == 9
        assert of_one["groups"]


def test_an_error_surfaces_at_the_next_call_on_all_ranks(said: list[dict[str, Any]], base: Path) -> None:
    for of_one in said:
        assert [left for _, left, _ in of_one["errors"]] == [[4, 5], [4, 5], [5, 6], [6, 8], [6, 8]]
        # The third and the fourth call saved what they were asked to.
        kinds = ("WriteError", "WriteError", "EarlierStepError", "EarlierStepError", "WriteError")
        for kind, number, (heard, _, _) in zip(kinds, (6, 6, 6, 7, 9), of_one["errors"], strict=True):
            place = f"{base}/run/global_step_{number}/actor"
            assert heard.startswith(f"{kind}: step {number} was not saved: rank 1: {place}/"), heard
            assert "_world_size_2_rank_1.pt: File too large" in heard
        # What was there stays until there is newer to keep.
        assert [whole for _, left, whole in of_one["errors"] if 5 in left] == [True] * 3
        assert of_one["litter"] == []


def test_ranks_that_do_not_agree_whether_to_wait(said: list[dict[str, Any]]) -> None:
    for of_one in said:
        assert of_one["disagree"] == ("CallError: the ranks disagree about blocking: rank 0 True, rank 1 False")


def test_both_moments_are_in_the_diary_with_their_figures(said: list[dict[str, Any]], base: Path) -> None:
    assert said
    events = [event for event in read_events(base / "run" / EVENTS) if event["event"].startswith("save")]
    assert [(event["event"], event["step"]) for event in events[:4]] == [
        ("save_requested", 1), ("save_durable", 1), ("save_requested", 2), ("save_durable", 2),
    ]  # fmt: skip
    requested, durable = events[:2]
    assert requested["bytes"] < durable["bytes"] < requested["bytes"] + 20_000  # trainer_state.json, the manifest
    for event in (requested, durable):
        assert event["seconds"] > 0
        assert event["rate"] == pytest.approx(event["bytes"] / event["seconds"])
    assert durable["stall"] == requested["seconds"] < durable["seconds"]
    assert [event["step"] for event in events if event["event"] == "save_failed"] == [6, 6, 6, 7, 9]


# Ranks that go away


def lost(base: Path) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    comm = TorchCommunicator(timeout_seconds=5)
    run = Run(base / "lost", rank=rank, world_size=2, comm=comm)
    run.manager.resume()
    run.train(1)
    run.reach(2)
    with SlowDisk(*[2] * rank):
        run.manager.save(2, blocking=False)
        dist.barrier()
        if rank == 1:
            os._exit(0)
    # It ends with a word, and this rank is not kept.
    return run.manager.linger(30), str(run.manager._saver._flight.verdict(0))


def test_a_rank_that_dies_while_a_step_is_on_its_way(base: Path) -> None:
    [(landed, verdict)] = run_ranks(lost, 2, base, lost=1)
    assert landed
    assert verdict.startswith("step 2 was not saved: another rank has ended or does not answer")
    assert steps(base / "lost") == [1]
    assert [name for name in names(base / "lost") if name.endswith(".tmp")] == []
    assert resumed(base / "lost").is_at(1)


# One process


def test_memory_is_flat_over_200_saves(tmp_path: Path) -> None:
    engine = TinyEngine("actor", shapes={"weight": (1500, 1000)}, optimizer=False)
    run = Run(tmp_path, keep_last=1, roles={"actor": engine})
    run.manager.resume()
    seen = []
    for step in range(1, 201):
        run.manager.save(step, blocking=False)
        if step % 20 == 0:
            seen.append(anonymous())
    run.manager.close()
    assert steps(tmp_path) == [200]
    assert max(seen[1:]) - seen[1] < 4 << 20


def anonymous() -> int:
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_the_memory_of_a_save_is_bounded(tmp_path: Path) -> None:
    run = Run(tmp_path, staging_limit=4 * PAGE)
    run.actor.weights = {"weight": torch.randn(6000, 3000)}  # 72 MB through 32
    run.actor.moments = {}
    before = run.actor.weights["weight"].clone()
    run.manager.resume()
    folder = run.manager.save(1, blocking=False)
    pool = run.manager._saver._pool
    assert pool is not None
    assert pool.nbytes == 4 * PAGE
    run.actor.weights["weight"].zero_()
    run.manager.wait()
    assert torch.equal(open_directory(folder / "actor")["weight"].read(), before)


def test_a_step_that_is_on_its_way_too_long_is_an_error(tmp_path: Path) -> None:
    run = trained(tmp_path, 1)
    run.manager._saver._how = replace(run.manager._saver._how, patience=0.2)
    with SlowDisk(2):
        run.manager.save(2, blocking=False)
        with pytest.raises(MilepostError, match=r"^step 2 was not saved: .* within 0.20 s \(save_timeout"):
            run.manager.wait()
    assert steps(tmp_path) == [1]
    run.manager._saver._how = replace(run.manager._saver._how, patience=60.0)
    run.train(3)
    run.manager.close()
    assert steps(tmp_path) == [1, 3]


def test_what_follows_a_durable_step_cannot_undo_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.manager.resume()
    run.manager._saver._how = replace(run.manager._saver._how, after_durable=lambda saved: 1 / 0)  # type: ignore[arg-type,return-value]
    for step, blocking in ((1, True), (2, False)):
        run.manager.save(step, blocking=blocking)
        run.manager.wait()
    assert [record.getMessage() for record in caplog.records] == [
        f"step {step} is durable, but not what was to follow: division by zero" for step in (1, 2)
    ]


# A process that ends


@pytest.fixture(scope="module")
def statuses(base: Path) -> dict[str, int]:
    (base / "exits").mkdir()
    command = [sys.executable, str(TESTS / "async_exits.py"), str(base / "exits")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("way", "status"), [("end", 0), ("close", 0), ("interrupt", -signal.SIGINT), ("terminate", 143)]
)
def test_who_ends_in_order_has_the_step(statuses: dict[str, int], base: Path, way: str, status: int) -> None:
    assert statuses[way] == status
    root = base / "exits" / way
    assert steps(root) == [1, 2]
    assert disk_is_at(root / "global_step_2", 2)
    assert names(root) == {"global_step_1", "global_step_2", TRACKER}


def test_who_is_killed_has_the_step_before(statuses: dict[str, int], base: Path) -> None:
    assert statuses["kill"] == -signal.SIGKILL
    root = base / "exits/kill"
    assert steps(root) == [1]
    run = resumed(root)
    assert run.is_at(1)
    assert names(root) == {"global_step_1", TRACKER}
