"""SIGKILL at any call of a save: a step is whole or absent, whoever dies."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from faults import shim, state, sweeps
from faults.jobs import Job
from faults.mutants import FAULTS, MUTANTS
from faults.savers import Savers
from faults.shim import Rule
from faults.state import Promise


def test_a_saver_killed_at_any_call_leaves_whole_steps(savers: Savers, base: Path) -> None:
    findings = list(sweeps.kills(savers, base, every=5))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    *killed, last = findings
    assert len(killed) > 15
    newest = [found.newest for found in killed]
    # The commit is one call: before it the newest is 2; after it (tracker, retention, diary) it is 3.
    assert newest == sorted(newest)
    assert newest.count(2) > 6
    assert newest.count(3) > 3
    assert last.newest == 3


def test_a_saver_killed_while_it_writes_behind_training_s_back_leaves_whole_steps(savers: Savers, base: Path) -> None:
    findings = list(sweeps.kills(savers, base, every=9, blocking=False))
    findings += sweeps.kills(savers, base / "two", ranks=2, at_rank=1, every=17, blocking=False)
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    assert {found.newest for found in findings} == {2, 3}


@pytest.mark.parametrize(
    ("who", "at_rank", "every"),
    [("one rank", 0, 17), ("one rank", 1, 7), ("all ranks", 0, 23), ("all ranks", 1, 9), ("the launcher", 0, 29)],
)
def test_two_ranks_of_whom_some_are_killed_leave_whole_steps(
    savers: Savers, base: Path, who: str, at_rank: int, every: int
) -> None:
    findings = list(sweeps.kills(savers, base, ranks=2, who=who, at_rank=at_rank, every=every))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    *killed, last = findings
    assert len(killed) >= 3
    assert last.newest == 3
    for found in killed:
        assert found.outcome is not None
        if who == "one rank" and not found.outcome.of("saved", 1 - at_rank):
            # The other one is told so, in words.
            [said] = found.outcome.of("error", 1 - at_rank)
            unknown = "whether step 3 was saved the next start will tell: "
            lost = f"LostRankError: (step 3 was not saved: |step 3 is saved, but |{unknown})?another rank has ended"
            assert re.match(rf"{lost}|CallError: save: rank {at_rank} of 2 did not come", said["why"])
            assert "\n" not in said["why"]
            assert said["seconds"] < 60  # it is not what is measured: it waited for no timeout of minutes


def test_a_rank_that_answers_no_more_is_told_of(savers: Savers, base: Path) -> None:
    first = next(iter(sweeps.stops(savers, base)))
    assert first.faults == ()
    assert first.outcome is not None
    [told] = first.outcome.errors
    assert told.startswith("LostRankError: step 3 was not saved: another rank has ended or does not answer (Timed out)")


def test_ranks_whose_store_is_gone_are_told_in_words(savers: Savers, base: Path) -> None:
    """It lives with the launcher, under torchrun with one of the agents. Here the ranks outlive it."""
    rule = Rule("parent", 1, ops=("write",))  # of the diary, at the end of the resume
    outcome = savers.run(Job(base / "run", base / "scratch", 2, rules=(rule,), at_rank=0, orphans=True))
    assert len(outcome.of("resumed")) == len(outcome.of("error")) == 2
    for said in outcome.of("error"):
        assert not said["raw"]
        assert re.match(r"LostRankError: another rank has ended or does not answer \([\w ]+\): ", said["why"])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_saver_without_a_safeguard_is_found_out(savers: Savers, base: Path, mutant: str) -> None:
    ops = ("create", "rename", "rmdir")
    assert any(found.shows(FAULTS[mutant]) for found in sweeps.kills(savers, base, ops=ops, mutant=mutant))


def test_kills_at_random_moments_lose_no_step_that_was_saved(savers: Savers, base: Path) -> None:
    chance = random.Random(6)
    root, before = base / "run", 0
    for turn in range(6):
        ranks = chance.choice((1, 2))
        launcher = savers.start(Job(root, base / f"scratch{turn}", ranks, steps=None))
        time.sleep(chance.uniform(0.3, 0.8))
        os.killpg(launcher, signal.SIGKILL)
        saved = max(before, savers.outcome().saved)
        assert state.faults_of(root, Promise(saved, saved)) == []
        before = state.newest(root)
        assert state.faults_of_next_start(root) == []
    assert before >= 3


def test_the_shim_sees_every_call_that_strace_sees(savers: Savers, base: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace to compare with")
    job = Job(base / "run", base / "scratch", ranks=2, steps=3, trace=base / "trace")
    log = base / "log"
    calls = "write,pwrite64,fsync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
    command = ["strace", "-f", "-y", "-e", f"trace={calls}", "-o", str(log), "-p", str(savers.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        if "attached" not in tracer.stderr.readline():
            pytest.skip("strace may not attach to another process here")
        outcome = savers.run(job)
        tracer.send_signal(signal.SIGINT)
    assert outcome.saved == 3
    seen = Counter(change.op for change in shim.read_trace(base / "trace"))
    expected: Counter[str] = Counter()
    directories = {change.path for change in shim.read_trace(base / "trace") if change.op == "fsyncdir"}
    for line in log.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call is None or str(job.root) not in call[2] or "resumed>" in line:
            continue
        name = {"pwrite64": "write", "mkdirat": "mkdir"}.get(call[1], call[1]).removesuffix("at2").removesuffix("at")
        if name == "fsync" and call[2].partition("<")[2].partition(">")[0] in directories:
            name = "fsyncdir"
        if "AT_REMOVEDIR" in line:
            name = "rmdir"
        expected[name] += 1
    assert expected["write"] > 40
    assert {name: seen[name] for name in expected} == expected
