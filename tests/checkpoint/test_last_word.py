"""A step that is given up while it is being committed is there as a whole, or not at all, now and later."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import TinyEngine

from milepost.checkpoint import commit
from milepost.checkpoint.comm import default_communicator
from milepost.checkpoint.commit import StepRequest, finish_step, take_step
from milepost.checkpoint.deadline import Deadline
from milepost.checkpoint.litter import remove
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.saving.staged_file import Staging
from milepost.checkpoint.steps import judge, scan
from milepost.errors import WriteError
from milepost.layouts.fsdp import CONFIG_FILE


def _save(root: Path, deadline: Deadline, make_way: Callable[[], None] = lambda: None, **options: Any) -> None:
    engine = TinyEngine("actor")
    engine.train(1)
    contents = ("model", "optimizer", "extra")
    request = StepRequest(root, 1, {"actor": engine}, contents, dict, make_way=make_way, **options)
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


def _left(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.endswith(".tmp")]


def test_a_commit_that_goes_on_after_it_was_given_up_builds_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over before the small files of the step are written, and who waited has removed all the others."""
    go_on, seen = threading.Event(), commit.await_seen

    def hang(path: Path, *args: Any, **options: Any) -> None:
        seen(path, *args, **options)
        if path.name == CONFIG_FILE:  # the last that the ranks wrote
            go_on.wait(30)

    monkeypatch.setattr(commit, "await_seen", hang)
    with pytest.raises(WriteError, match=r"step 1 was not saved: .*global_step_1: the file system did not answer"):
        _save(tmp_path, Deadline(1.0))
    _wait(lambda: not _left(tmp_path))
    go_on.set()
    _wait(_ended)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_takes_too_long_is_named_and_no_file_system_blamed(tmp_path: Path) -> None:
    go_on = threading.Event()

    def export(source: Path, target: Path) -> None:
        go_on.wait(30)
        target.mkdir(parents=True)

    with pytest.raises(
        WriteError, match=r"step 1 was not saved: .*global_step_1/actor: .*Hugging Face.*save_timeout"
    ) as told:
        _save(tmp_path, Deadline(1.0), export_hf=export)
    assert "file system" not in str(told.value)
    go_on.set()
    _wait(_ended)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_turns_read_only_at_the_name_is_told_of_by_what_it_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, *_args: Any, **_options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match=r"^step 1 was not saved: [^.]*/global_step_1: ") as told:
        _save(tmp_path, Deadline())
    assert ".tmp" not in str(told.value)
    assert any("latest_checkpointed" in record.message for record in caplog.records)  # what stays is told of


def test_two_may_remove_the_same_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waited, and the thread that was given up: a file system that answers again wakes both."""
    folder, unlink = tmp_path / "folder", os.unlink
    (folder / "actor").mkdir(parents=True)
    for name in ("one", "actor/two", "three"):
        (folder / name).touch()

    def second(*args: Any, **options: Any) -> None:
        unlink(*args, **options)
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", second)
    caplog.set_level(logging.WARNING)
    remove(folder)
    assert not folder.exists()
    assert caplog.records == []


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
    with pytest.raises(WriteError, match=r"step 1 was not saved: .*/global_step_1 is there already: .*given up"):
        _save(tmp_path, Deadline(60.0))
    go_on.set()
    _wait(_ended)
    assert not scan(tmp_path)
    assert _left(tmp_path) == []


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
