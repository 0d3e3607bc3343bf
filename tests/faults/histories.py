"""Histories of a run, drawn at random: saves, kills, damage, starts, going back; and what must hold after each.

The real manager, real files, and real processes that are killed; what is modelled is only which steps must be there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_engine import Run, TinyEngine, halve

from milepost.checkpoint.steps import judge, newest_good, read_tracker, scan
from milepost.errors import IncompleteError

SHAPES = {"w": (3,)}
MEMORY = Path("/dev/shm")


def before_change(change: int, act: Callable[[], None]) -> None:
    """Call `act` right before the given change (counted from 1) that this process makes to a file or a name."""
    seen = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if (writes or changes) and next(seen) == change:
            act()

    sys.addaudithook(hook)


class History(RuleBasedStateMachine):
    """One run. `expected`: steps that are whole and that retention must have kept; `damaged`: those that were cut."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="milepost-history-", dir=MEMORY if MEMORY.is_dir() else None))
        self.root = self.folder / "run"
        self.keep = keep
        self.expected: set[int] = set()
        self.damaged: set[int] = set()
        self.open()
        assert self.run.manager.resume() is None
        self.at = 0

    def open(self) -> None:
        self.engine = TinyEngine("actor", shapes=SHAPES, optimizer=False)
        self.run = Run(self.root, roles={"actor": self.engine}, keep_last=self.keep)

    @rule()
    def save(self) -> None:
        self.at += 1
        self.reach(self.at)
        self.run.manager.save(self.at)
        self.saved(self.at)
        whole = [step.step for step in scan(self.root) if step.step not in self.damaged]
        assert whole == sorted(self.expected)
        assert read_tracker(self.root) == self.at

    @rule(change=st.integers(1, 45))
    def killed(self, change: int) -> None:
        """A process goes on from here, saves one step, and is killed on the way or comes to its end."""
        pid = os.fork()
        if pid == 0:
            try:
                before_change(change, lambda: os.kill(os.getpid(), signal.SIGKILL))
                self.reach(self.at + 1)
                self.run.manager.save(self.at + 1)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        found = newest_good(self.root).good
        assert found is None or found.step <= self.at + 1
        if found is not None and found.step == self.at + 1:
            self.saved(found.step)
        assert os.WIFSIGNALED(status) or self.at + 1 in self.expected
        self.start()

    @rule()
    def start(self) -> None:
        """A new process goes on from what is there."""
        self.open()
        if not self.expected and scan(self.root):
            try:
                self.run.manager.resume()
            except IncompleteError:
                self.run.manager.resume("disable")
                self.at = 0
                return
            raise AssertionError("a run whose steps are all damaged began anew without being told to")
        step = self.run.manager.resume()
        assert step == max(self.expected, default=None)
        self.at = step or 0
        assert self.engine.is_at(self.at) or not step
        assert not [path for path in self.root.iterdir() if path.name.startswith(".")]
        assert step is None or read_tracker(self.root) >= step

    @precondition(lambda self: self.expected)
    @rule(which=st.integers(0, 5), file=st.integers(0, 9))
    def damaged_file(self, which: int, file: int) -> None:
        step = sorted(self.expected)[which % len(self.expected)]
        files = sorted(path for path in (self.root / f"global_step_{step}").rglob("*") if path.is_file())
        halve(files[file % len(files)])
        self.expected.remove(step)
        self.damaged.add(step)
        self.start()

    @precondition(lambda self: self.expected)
    @rule(which=st.integers(0, 5))
    def back(self, which: int) -> None:
        """A new process goes on from a step that the user names; at its first save newer ones are set aside."""
        self.at = sorted(self.expected)[which % len(self.expected)]
        self.open()
        assert self.run.manager.resume("resume_path", self.root / f"global_step_{self.at}") == self.at
        assert self.engine.is_at(self.at)
        self.save()

    @invariant()
    def every_step_is_whole_or_was_damaged(self) -> None:
        for step in scan(self.root):
            assert judge(step.path).good is (step.step not in self.damaged)
        assert self.expected <= {step.step for step in scan(self.root)}

    def reach(self, step: int) -> None:
        self.engine.train(step)
        self.run.counter.value = step

    def saved(self, step: int) -> None:
        """A step was committed: newer ones were set aside, and of the older ones the newest whole ones stay."""
        self.damaged = {other for other in self.damaged if other < step}
        self.expected = set(sorted({*(other for other in self.expected if other < step), step})[-self.keep :])

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
