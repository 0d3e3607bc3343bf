"""Two real ranks save together: whatever befalls one, both raise, and the step before stays as it was."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny_engine import Run, TinyEngine, disk_is_at, names, resumed

from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.steps import TRACKER, read_tracker
from milepost.errors import MilepostError


@dataclass(frozen=True)
class Told:
    """What one rank saw of a call: the error's class and text, and how long it took."""

    kind: str
    text: str
    seconds: float


def tell(act: Callable[[], Any]) -> Told:
    begun = time.monotonic()
    try:
        act()
    except MilepostError as error:
        return Told(type(error).__name__, str(error), time.monotonic() - begun)
    return Told("", "", time.monotonic() - begun)


class LosesItsFiles(TinyEngine):
    """As on a disk of its own: what this rank writes, the others do not see."""

    def save(self, files: Any) -> None:
        super().save(files)
        for path in files.directory.glob(f"*_rank_{self.rank}.pt"):
            path.unlink()


def scenarios(base: Path) -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = {"rank": rank, "world_size": 2}
    told: dict[str, Any] = {}

    other = Run(base / f"root{rank}", **ranks)
    told["roots"] = tell(other.manager.resume)
    told["roots_save"] = tell(lambda: other.manager.save(1))

    run = Run(base / "run", **ranks)
    run.manager.resume()
    run.train(1)
    told["saved"] = disk_is_at(base / "run/global_step_1", 1)
    told["steps"] = tell(lambda: run.manager.save(2 + rank))

    run.reach(2)
    run.actor.fail_on_save = OSError(errno.EIO, os.strerror(errno.EIO)) if rank == 1 else None
    told["actor"] = tell(lambda: run.manager.save(2))
    run.actor.fail_on_save = None
    run.critic.fail_on_save = ValueError("no such luck") if rank == 0 else None
    told["critic"] = tell(lambda: run.manager.save(2))
    run.critic.fail_on_save = ValueError("no such luck")
    told["both"] = tell(lambda: run.manager.save(2))
    run.critic.fail_on_save = None

    told["full"] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (base / "run/global_step_1").rglob("*rank_1.pt"))
    for limit in range(0, largest, largest // 12):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        told["full"].append(tell(lambda: run.manager.save(2)))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    # The file is looked for as long as the save may take, and it is told before that time is over.
    lost = Run(base / "run", roles={"actor": LosesItsFiles("actor", **ranks), "critic": run.critic}, save_timeout=4.0)
    lost.manager.resume()
    told["lost"] = tell(lambda: lost.manager.save(2))

    dist.barrier()
    told["left"] = names(base / "run")
    told["before"] = disk_is_at(base / "run/global_step_1", 1)
    told["tracker"] = read_tracker(base / "run")
    dist.barrier()

    run.train(2)
    again = Run(base / "run", **ranks)
    told["step"] = again.manager.resume()
    told["resumed"] = again.is_at(2)
    broken = Run(base / "run", **ranks)
    if rank == 1:
        broken.critic.load_objects = lambda objects: 1 / 0  # type: ignore[method-assign,return-value,assignment]
    told["load"] = tell(broken.manager.resume)
    again.manager.close()
    return told


@pytest.fixture(scope="module")
def base(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def told(base: Path) -> list[dict[str, Any]]:
    return run_ranks(scenarios, 2, base)


def test_different_folders_are_an_error_before_the_first_write(told: list[dict[str, Any]], base: Path) -> None:
    for outcome in told:
        for call in (outcome["roots"], outcome["roots_save"]):
            assert call.kind == "CallError"
            assert f"different folders: rank 0 {base}/root0, rank 1 {base}/root1" in call.text
    assert not (base / "root0").exists()
    assert not (base / "root1").exists()


def test_both_ranks_save_and_resume(told: list[dict[str, Any]], base: Path) -> None:
    assert [(o["saved"], o["step"], o["resumed"]) for o in told] == [(True, 2, True)] * 2
    manifest = read_manifest(base / "run/global_step_2")
    assert manifest.world_size == 2
    assert {"actor/model_world_size_2_rank_1.pt", "critic/optim_world_size_2_rank_0.pt"} <= {
        record.path for record in manifest.files
    }
    assert check_files(base / "run/global_step_2", manifest, deep=True) == ()
    assert read_tracker(base / "run") == 2


def test_ranks_at_different_steps_are_an_error(told: list[dict[str, Any]]) -> None:
    assert {o["steps"].kind for o in told} == {"CallError"}
    assert "disagree about step: rank 0 2, rank 1 3" in told[1]["steps"].text


def test_a_failure_on_one_rank_is_raised_on_both_within_seconds(told: list[dict[str, Any]], base: Path) -> None:
    place = f"{base}/run/global_step_2"
    for outcome in told:
        assert outcome["actor"].kind == "WriteError"
        assert outcome["actor"].text == f"step 2 was not saved: rank 1: {place}/actor: Input/output error"
        assert outcome["critic"].text == f"step 2 was not saved: rank 0: {place}/critic: ValueError: no such luck"
        assert outcome["both"].text.startswith(f"step 2 was not saved: rank 0: {place}/critic: ValueError")
        assert outcome["both"].text.endswith("(1 more rank failed too)")
        assert max(outcome[call].seconds for call in ("actor", "critic", "both")) < 5


def test_a_disk_that_fills_on_one_rank_at_any_byte_is_one_sentence_on_both(
    told: list[dict[str, Any]], base: Path
) -> None:
    assert len(told[0]["full"]) >= 12
    assert [call.text for call in told[0]["full"]] == [call.text for call in told[1]["full"]]
    for call in told[0]["full"]:
        assert call.kind == "WriteError"
        assert call.text.startswith(f"step 2 was not saved: rank 1: {base}/run/global_step_2/actor/")
        assert "_world_size_2_rank_1.pt: File too large" in call.text
        assert "unexpected pos" not in call.text


def test_files_that_rank_0_cannot_see_are_no_checkpoint(told: list[dict[str, Any]]) -> None:
    for outcome in told:
        assert outcome["lost"].kind == "IncompleteError"
        assert "rank 0 does not see" in outcome["lost"].text
        assert "not on a file system that all nodes share" in outcome["lost"].text


def test_after_all_these_failures_the_step_before_stands_alone(told: list[dict[str, Any]]) -> None:
    for outcome in told:
        assert outcome["left"] == {"global_step_1", TRACKER}
        assert outcome["before"]
        assert outcome["tracker"] == 1


def test_a_rank_that_cannot_load_stops_both(told: list[dict[str, Any]]) -> None:
    assert {o["load"].text for o in told} == {"rank 1: ZeroDivisionError: division by zero"}


def test_another_world_size_is_said(told: list[dict[str, Any]], base: Path) -> None:
    run = resumed(base / "run")
    assert run.is_at(2)
    lines = run.manager.report.lines()
    assert lines[0] == f"resumed from {base}/run/global_step_2: step 2, on 1 rank (saved by 2)"
    assert "             fresh: RNG (saved by 2 ranks, now 1; fresh)" in lines
