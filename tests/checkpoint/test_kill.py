"""SIGKILL at any moment: what was saved stays saved, and the next start finds a whole step."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import disk_is_at, names, resumed, trained

from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.steps import TRACKER, newest_good, scan

ROLES = ("actor", "critic")
TESTS = Path(__file__).parents[1]


class Savers:
    """The program `save_loop`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, *command: object) -> int:
        """Start a saver; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, command)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Wait for the saver's end; the signal that ended it, or 0."""
        return os.WTERMSIG(self._answer())

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    with subprocess.Popen(
        [sys.executable, str(TESTS / "save_loop.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Savers(process)
        assert process.stdin is not None
        process.stdin.close()


def newest_whole(root: Path) -> int:
    """Number of the newest good step, every byte of it checked; 0 where there is none."""
    newest = newest_good(root, ROLES)
    assert newest.skipped == ()
    if newest.good is None:
        return 0
    path = newest.good.path
    assert check_files(path, read_manifest(path), deep=True) == ()
    assert disk_is_at(path, newest.good.step)
    return newest.good.step


def acknowledged(ack: Path) -> int:
    return int(ack.read_text().split()[-1]) if ack.exists() and ack.stat().st_size else 0


def wait_for_step(ack: Path, step: int) -> float:
    """Wait until that step is acknowledged; about how long a step takes, in seconds."""
    begun = time.monotonic()
    first = acknowledged(ack)
    while acknowledged(ack) < step:
        assert time.monotonic() < begun + 60
        time.sleep(0.002)
    return (time.monotonic() - begun) / (step - first) if step > first else 0.1


def test_a_kill_at_any_random_moment_loses_no_step_that_was_saved(savers: Savers, tmp_path: Path) -> None:
    root, ack = tmp_path / "run", tmp_path / "ack"
    moments = random.Random(9)
    before = 0
    for _ in range(20):
        pid = savers.start("loop", root, ack)
        pace = wait_for_step(ack, acknowledged(ack) + moments.randint(0, 2))
        time.sleep(moments.uniform(0.0, 1.5 * pace))
        os.kill(pid, signal.SIGKILL)
        assert savers.wait() == signal.SIGKILL
        newest = newest_whole(root)
        assert newest >= max(before, acknowledged(ack))
        before = newest
    assert before >= 10
    run = resumed(root, keep_last=2)
    assert run.is_at(before)
    run.train(before + 1)
    assert names(root) == {f"global_step_{before}", f"global_step_{before + 1}", TRACKER}


def test_a_kill_before_every_single_change_on_disk_leaves_a_whole_step(savers: Savers, tmp_path: Path) -> None:
    """A resume and a save of step 3 with two older steps, killed before its 1st, 2nd, 3rd, ... change of a file."""
    template, root, ack = tmp_path / "template", tmp_path / "run", tmp_path / "ack"
    trained(template, 1, 2)
    found = []
    for change in range(1, 200):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        ack.unlink(missing_ok=True)
        savers.start("once", root, ack, change)
        ended = savers.wait()
        newest = newest_whole(root)
        assert newest >= max(2, acknowledged(ack))
        if ended == 0:
            break
        assert ended == signal.SIGKILL
        found.append(newest)
        if change % 10 == 0:
            run = resumed(root, keep_last=2)
            assert run.is_at(newest)
            run.train(newest + 1)
            assert names(root) == {f"global_step_{newest}", f"global_step_{newest + 1}", TRACKER}
    assert ended == 0
    assert [step.step for step in scan(root)] == [2, 3]
    # The commit is one change: before it the newest is 2, after it (tracker, retention, diary) it is 3.
    assert found == sorted(found)
    assert found.count(2) > 15
    assert found.count(3) > 15
