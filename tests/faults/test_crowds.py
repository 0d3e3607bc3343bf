"""Two jobs in one folder, and a folder with ten thousand steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_engine import resumed, trained

from faults import state
from faults.jobs import Job
from faults.savers import Savers
from faults.state import Promise
from milepost.checkpoint.manifest import MANIFEST, Manifest
from milepost.checkpoint.steps import newest_good, step_name
from milepost.errors import MilepostError

MANY = 10_000


def test_two_jobs_in_one_folder_get_in_each_other_s_way_but_leave_whole_steps(savers: Savers, base: Path) -> None:
    """`milepost train` keeps the second one out by a lock; whoever uses the manager alone has none. Each start of the
    one sweeps what the other is writing, and its first save sets the other's newest steps aside."""
    root = base / "run"
    launcher = savers.start(Job(root, base / "scratch", steps=30, options={"keep_last": None}))
    told = []
    for _ in range(10):
        try:
            run = resumed(root)
            run.train(run.manager.report.next_step)
        except MilepostError as error:
            told.append(str(error))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher, signal.SIGKILL)
    outcome = savers.outcome()
    told += outcome.errors
    assert not any(said["raw"] for said in outcome.of("error")), told
    assert all("\n" not in text for text in told)
    assert state.faults_of(root, Promise(1, 0, goes_back=True)) == []
    assert state.lost(root, range(1, outcome.saved + 1)) == []
    assert state.faults_of_next_start(root) == []


@contextmanager
def noticed(below: Path) -> Iterator[set[tuple[str, str]]]:
    """What this process opens, lists or renames below a folder in the body: (event, path), random names left out.
    (How often a file is opened depends on how threads share out its reads.)"""
    events: set[tuple[str, str]] = set()
    active = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not active or event not in ("open", "os.listdir", "os.scandir", "os.rename"):
            return
        if isinstance(args[0], str | bytes | os.PathLike) and Path(os.fsdecode(args[0])).is_relative_to(below):
            path = str(Path(os.fsdecode(args[0])).relative_to(below))
            events.add((event, re.sub(r"\.[0-9a-f]{8}\.", ".", path)))

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        active = False


def test_ten_thousand_old_steps_make_a_start_and_a_save_no_longer(base: Path) -> None:
    found = {}
    for count in (10, MANY):
        root = base / f"run{count}"
        trained(root, MANY + 1)
        for step in range(MANY - count + 1, MANY + 1):
            folder = root / step_name(step)
            folder.mkdir()
            manifest = Manifest(step, 1, {"actor": "fsdp", "critic": "fsdp"}, ("model",), (), 0.0, "0.1.0")
            (folder / MANIFEST).write_text(manifest.to_json())
        with noticed(root) as events:
            run = resumed(root)
            run.train(MANY + 2)
            assert newest_good(root).good is not None
        assert run.manager.report.step == MANY + 1
        found[count] = events
    assert found[10] == found[MANY]
    assert len(found[MANY]) > 40
