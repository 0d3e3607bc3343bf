"""A step that is given up while it is being committed is there as a whole, or not at all, now and later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import TinyEngine

from milepost.checkpoint import commit
from milepost.checkpoint.comm import default_communicator
from milepost.checkpoint.commit import StepRequest, finish_step, take_step
from milepost.checkpoint.deadline import Deadline
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.saving.staged_file import Staging
from milepost.checkpoint.steps import judge, scan
from milepost.errors import WriteError


def _save(root: Path, deadline: Deadline, make_way: Callable[[], None] = lambda: None) -> None:
    engine = TinyEngine("actor")
    engine.train(1)
    request = StepRequest(root, 1, {"actor": engine}, ("model", "optimizer", "extra"), dict, make_way=make_way)
    comm = default_communicator()
    taken = take_step(request, comm, Staging.make())
    finish_step(replace(taken, staging=replace(taken.staging, deadline=deadline)), comm)


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _ended() -> bool:
    return not any(thread.name == "milepost-in-time" for thread in threading.enumerate())


def test_a_step_given_up_while_others_are_moved_out_of_its_way_never_appears(tmp_path: Path) -> None:
    go_on = threading.Event()
    with pytest.raises(WriteError, match=r"step 1 was not saved: .*save_timeout"):
        _save(tmp_path, Deadline(1.0), lambda: go_on.wait(30) and None)
    go_on.set()
    _wait(_ended)
    assert not scan(tmp_path)
    _save(tmp_path, Deadline(60.0))  # and its number is free
    assert [step.step for step in scan(tmp_path)] == [1]


def test_a_step_whose_naming_hangs_loses_the_name_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, held = threading.Event(), commit._hold

    def hang(tmp: Path, final: Path) -> None:
        go_on.wait(30)
        held(tmp, final)

    monkeypatch.setattr(commit, "_hold", hang)
    with pytest.raises(WriteError, match="step 1 was not saved"):
        _save(tmp_path, Deadline(1.0))
    # What has its name is not deleted from under it.
    assert (tmp_path / "global_step_1" / MANIFEST).exists()
    go_on.set()
    _wait(_ended)
    assert not scan(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_who_is_interrupted_while_a_step_gets_its_name_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, held = threading.Event(), commit._hold

    def hang(tmp: Path, final: Path) -> None:
        go_on.wait(30)
        held(tmp, final)

    class Interrupted(Deadline):
        """Ctrl-C comes to who waits, once the step has its name."""

        def left(self) -> float | None:
            return 0.05 if threading.current_thread() is threading.main_thread() else 60.0

        def miss(self, what: object) -> WriteError:
            _wait((tmp_path / "global_step_1").exists)
            raise KeyboardInterrupt

    monkeypatch.setattr(commit, "_hold", hang)
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, Interrupted(60.0))
    go_on.set()
    _wait(_ended)
    (step,) = scan(tmp_path)
    assert judge(step.path).good
