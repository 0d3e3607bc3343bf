"""Runs made by hand for tests of what is told about a run: events at chosen seconds, and steps that hold no tensors.

Nothing here comes from the code under test but the names of files and the manifest's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, digest_file
from milepost.checkpoint.steps import TRACKER

BEGIN = 1_800_000_000.0
"""2027-01-15 08:00:00 UTC; times below are seconds after it."""


def event(seconds: float, name: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": BEGIN + seconds, "event": name, **fields}


def start(seconds: float, **fields: Any) -> dict[str, Any]:
    usual = {"run_id": "r1", "attempt": 0, "pid": 1, "host": "elsewhere", "world_size": 2, "engine": "fsdp2"}
    return event(seconds, "start", **{**usual, **fields})


def resume(seconds: float, from_step: int | None, **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "mode": "auto",
        "from_step": from_step,
        "folder": None if from_step is None else f"runs/r/global_step_{from_step}",
        "next_step": (from_step or 0) + 1,
        "parts": [{"name": "actor/weights", "state": "fresh" if from_step is None else "restored", "why": ""}],
        "world_size": 2,
        "saved_world_size": None if from_step is None else 2,
        "skipped": [],
        "notes": [],
    }
    return event(seconds, "resume", **{**usual, **fields})


def step(
    seconds: float, number: int, reward: float | None = None, took: float = 10.0, **metrics: Any
) -> dict[str, Any]:
    reward = number / 10 if reward is None else reward
    return event(seconds, "step", step=number, reward=reward, seconds=took, metrics=metrics)


def save(seconds: float, number: int) -> list[dict[str, Any]]:
    """A save that takes one second."""
    durable = {"bytes": 2_000_000, "seconds": 1.0, "folder": f"global_step_{number}"}
    return [
        event(seconds, "save_requested", step=number),
        event(seconds + 1, "save_durable", step=number, **durable),
    ]


def killed_run() -> list[dict[str, Any]]:
    """Steps 1 to 8 in three sessions: killed after step 5 (saved: 4), gone on from 4, and from 6 on one rank.

    session  0 to 60 s    steps 1-5, of 10 s each; saved 2 and 4; step 5, with reward 0.9, is lost
             80 to 120 s  steps 5 and 6, saved 6
             140 to 180 s steps 7 and 8, saved 8, on one rank
    """
    return [
        start(0),
        resume(10, None),
        step(20, 1), step(30, 2), *save(31, 2), step(40, 3), step(50, 4), *save(51, 4),
        event(53, "validation", step=4, metrics={"val/exact_match": 0.25}),
        step(60, 5, reward=0.9),
        start(80, attempt=1),
        event(85, "kill_seen", last_step=5, committed_step=4, lost_steps=1, attempt=0),
        resume(86, 4),
        step(100, 5), step(110, 6), *save(111, 6),
        event(120, "stop", step=6, reason="done"),
        start(140, run_id="r2", world_size=1),
        resume(150, 6, world_size=1, parts=[
            {"name": "actor/weights", "state": "restored", "why": ""},
            {"name": "actor/RNG", "state": "fresh", "why": "saved by 2 ranks, now 1"},
        ]),
        step(160, 7), step(170, 8), *save(171, 8),
        event(175, "validation", step=8, metrics={"val/exact_match": 0.75}),
        event(180, "stop", step=8, reason="done"),
    ]  # fmt: skip


def survived_run() -> list[dict[str, Any]]:
    """Steps 1 to 11 in four sessions that met with all that a run can meet with, 273 s in all.

    session  0 to 139 s    2 ranks; step 4 takes 60 s, since 50 of them its rollout hung; 4 is saved in the background,
                           for which training waits 0.4 s; the save of 6 fails; stopped on SIGTERM after 7
             160 to 195 s  1 rank, steps 8 and 9, then killed
             210 to 248 s  2 ranks, steps 8 to 10; stopped for others to join
             255 to 273 s  4 ranks, step 11
    """
    stall = {"step": 4, "phase": "gen", "limit": 30.0}
    return [
        start(0), resume(10, None), step(20, 1), step(30, 2), *save(31, 2), step(43, 3),
        *(event(75, "stall", **stall, rank=rank, seconds=30.0, stacks=f"stalls/{rank}.txt") for rank in (1, 0)),
        event(95, "stall_over", step=4, phase="gen", rank=0, seconds=50.0),
        event(95, "stall_over", step=4, phase="gen", rank=1, seconds=49.5),
        step(104, 4, took=60.0), event(104.5, "save_requested", step=4, bytes=2_000_000, seconds=0.4, rate=5e6),
        step(115, 5),
        event(118, "save_durable", step=4, bytes=2_000_000, seconds=13.9, stall=0.4, folder="global_step_4"),
        step(125, 6), event(125.1, "save_requested", step=6),
        event(126, "save_failed", step=6, error="the disk is full"),
        step(136, 7), *save(137, 7), event(139, "stop", reason="signal", signal="SIGTERM", step=7, saved=True),
        start(160, world_size=1), resume(165, 7, world_size=1), step(180, 8), step(195, 9),
        start(210, attempt=1), event(214, "kill_seen", last_step=9, committed_step=7, lost_steps=2, attempt=0),
        resume(215, 7), step(225, 8), step(235, 9), step(245, 10), *save(246, 10),
        event(248, "stop", reason="resize", signal=None, step=10, saved=True),
        start(255, world_size=4), resume(260, 10, world_size=4), step(270, 11), *save(271, 11),
        event(273, "stop", step=11, reason="done"),
    ]  # fmt: skip


def write_events(run_dir: Path, events: list[dict[str, Any]]) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in events))
    return run_dir


def commit_step(run_dir: Path, number: int, *, world_size: int = 2, **changes: Any) -> Path:
    """A whole step of two files with 1,000 and 500 bytes, and the tracker naming it."""
    directory = run_dir / f"global_step_{number}"
    sizes: Mapping[str, int] = {"actor/model.pt": 1_000, "critic/model.pt": 500}
    for name, size in sizes.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * size)
    records = tuple(FileRecord(name, size, digest_file(directory / name)) for name, size in sizes.items())
    usual: dict[str, Any] = {"step": number, "world_size": world_size, "roles": {"actor": "fsdp", "critic": "fsdp"}}
    usual |= {"contents": ("model",), "files": records, "created": BEGIN, "version": "0", "run_id": "r1"}
    (directory / MANIFEST).write_text(Manifest(**{**usual, **changes}).to_json())
    (run_dir / TRACKER).write_text(str(number))
    return directory


def made_run(run_dir: Path) -> Path:
    """`killed_run` with its steps on disk."""
    write_events(run_dir, killed_run())
    for number, world_size in ((2, 2), (4, 2), (6, 2), (8, 1)):
        commit_step(run_dir, number, world_size=world_size)
    return run_dir
