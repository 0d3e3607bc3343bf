"""A file system that answers no more, for longer than a save may take: all ranks are told in time, and the step is
there as a whole or not at all."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from faults import shim, state, sweeps
from faults.jobs import Job
from faults.savers import Savers
from faults.shim import Rule
from faults.state import Promise

OPTIONS = {"keep_last": 2, "save_timeout": 1.5}
COMMIT = ("fsyncdir", "rename", "rmdir")
"""Of rank 0's commit: the folders' flushes (3), the name (4) and its flush, the tracker and its flush (7), and then
what goes by retention: its name (8), that one's flush, and its folders (12)."""


@pytest.mark.parametrize("blocking", [True, False])
def test_a_commit_that_hangs_is_given_up_by_all_ranks_or_done(savers: Savers, base: Path, blocking: bool) -> None:
    """Each save has one hanging call, and then the same ranks go on; what was to follow a committed step fails none."""
    every = 3 if blocking else 5
    findings = list(sweeps.commit_hangs(savers, base, ops=COMMIT, blocking=blocking, every=every))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    *points, last = findings
    assert [found.newest for found in points if found.reached] == ([0] * 5 + [1] * 7)[::every]
    assert last.outcome is not None
    [told] = last.outcome.errors
    assert re.fullmatch(
        r"WriteError: step 3 was not saved: rank 0: .*/global_step_3: the file system did not answer within 1\.5\d* s "
        r"\(save_timeout\); look after it, or choose another place",
        told,
    )


def test_so_is_a_manifest_that_cannot_be_written(savers: Savers, base: Path) -> None:
    found, *_, last = sweeps.commit_hangs(savers, base, ops=("write",), part="/manifest.json", every=99)
    assert (found.reached, found.newest, found.faults, last.faults) == (True, 0, (), ())


def test_who_is_killed_while_the_name_of_a_step_is_not_flushed_finds_it_whole_or_not_at_all(
    savers: Savers, base: Path
) -> None:
    root, scratch = base / "run", base / "scratch"
    assert savers.run(Job(root, base / "making", 2, steps=2)).saved == 2
    rule = Rule("hang", 5, ops=COMMIT)
    launcher = savers.start(Job(root, scratch, 2, rules=(rule,), at_rank=0, again=True, options=OPTIONS))
    while len(list(scratch.glob("told*"))) < 2:
        time.sleep(0.01)
    os.killpg(launcher, signal.SIGKILL)
    outcome = savers.outcome()
    assert len(outcome.errors) == 1
    assert state.faults_of(root, Promise(2, 2)) == []
    assert state.newest(root) == 3
    assert state.faults_of_next_start(root) == []


def test_a_rank_that_is_lost_right_after_the_commit_does_not_make_the_diary_lie(savers: Savers, base: Path) -> None:
    """Rank 1 dies while rank 0 moves the tracker: it never hears that the step is saved."""
    root, scratch = base / "run", base / "scratch"
    assert savers.run(Job(root, base / "making", 2, steps=2)).saved == 2
    launcher = savers.start(Job(root, scratch, 2, rules=(Rule("hang", 2, ops=("rename",)),), at_rank=0))
    calls = scratch / "calls"
    while shim.counted(calls) < 2:
        time.sleep(0.01)
    _, other = sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))
    os.kill(other, signal.SIGKILL)
    shim.release(calls)
    outcome = savers.outcome()
    [told] = outcome.errors
    assert told.startswith("LostRankError: step 3 is saved, but another rank has ended or does not answer")
    faults, newest = sweeps.looked_at(root, outcome)
    assert (faults, newest) == ([], 3)
    assert sweeps.noted(root)[3] == "save_durable"
