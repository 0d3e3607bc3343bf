"""Steps at a URL, over fsspec's folder in memory and on a disk; a real server is in test_remote_s3.py."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import disk_is_at, halve, names, resumed, trained

from milepost.checkpoint.comm import on_rank_0_at_length
from milepost.checkpoint.diary.events import EVENTS, EventLog, read_events
from milepost.checkpoint.diary.status import require_run
from milepost.checkpoint.inventory import PIN, DiskStep, inventory
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.remote.fetching import place_of, step_at
from milepost.checkpoint.remote.folder import Remote, side_by_side, url_of
from milepost.checkpoint.remote.mirror import Mirror, try_at_start
from milepost.checkpoint.remote.steps import UPLOADING, RemoteStep, plan_remote, remote_steps, remove_step
from milepost.checkpoint.retention import Retention
from milepost.checkpoint.steps import TRACKER
from milepost.cli.app import run as milepost
from milepost.errors import CallError, DamagedError, NotFoundError, OutageError, UploadError, WriteError

pytest.importorskip("fsspec")
pytest.importorskip("tenacity")
MODEL = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path}/there" if request.param == "memory" else f"file://{tmp_path}/there"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Remote.__init__

    def quick(self: Remote, url: str, **options: Any) -> None:
        made(self, url, **{"attempts": 2, "wait": 0.001, **options})

    monkeypatch.setattr(Remote, "__init__", quick)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "here"


def numbers(url: str) -> list[int]:
    return [step.step for step in remote_steps(Remote(url)) if step.whole]


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(root / EVENTS) if event["event"] == kind]


class Failing:
    """Makes writing to a URL fail for the names that `when` says, as a network does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: Callable[[str], bool]) -> None:
        self.broken = True
        real = Remote._at

        def at(remote: Remote, name: str) -> str:
            if self.broken and when(name):
                raise ConnectionResetError("the connection was cut")
            return real(remote, name)

        monkeypatch.setattr(Remote, "_at", at)


# What a URL is


@pytest.mark.parametrize(
    ("path", "url"),
    [
        (Path("s3://bucket/run"), "s3://bucket/run"),
        (Path("file:///tmp/x"), "file:///tmp/x"),
        (Path("memory://run/"), "memory://run"),
        (Path("/tmp/s3:/x"), None),
        (Path("run/global_step_1"), None),
        (Path("C:/x"), None),
    ],
)
def test_urls_survive_being_a_path(path: Path, url: str | None) -> None:
    assert url_of(path) == url


def test_an_unknown_kind_of_url_is_one_sentence() -> None:
    with pytest.raises(CallError, match="nosuch"):
        Remote("nosuch://bucket/run")
    with pytest.raises(NotFoundError, match="only steps lie at a URL"):
        require_run(Path("s3://bucket/run"))


# Uploading


def test_every_step_is_there_once_the_run_is_closed(url: str, root: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    assert numbers(url) == [1, 2]
    remote = Remote(url)
    assert remote.read(TRACKER) == b"2"
    for step in remote_steps(remote):
        here = root / step.folder
        files = {path.relative_to(here).as_posix(): path for path in here.rglob("*") if path.is_file()}
        assert set(step.sizes) == set(files)
        assert all(remote.read(f"{step.folder}/{name}") == path.read_bytes() for name, path in files.items())
    (root / "global_step_2" / PIN).touch()
    remote.put_bytes(b"", f"global_step_2/{PIN}")
    assert tuple(step.facts() for step in remote_steps(remote)) == inventory(root)
    damaged = root / "global_step_2" / MANIFEST
    halve(damaged)
    remote.put_bytes(damaged.read_bytes(), f"global_step_2/{MANIFEST}")
    here, there = inventory(root)[1], remote_steps(remote)[1].facts()
    assert (there.state, there.files, there.bytes, there.pinned) == (here.state, here.files, here.bytes, True)
    done = events(root, "upload_durable")
    assert {event["step"] for event in done} == {1, 2} and all(event["bytes"] > 0 for event in done)


def test_the_manifest_is_written_last(root: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for verb in ("put", "put_bytes"):
        real = getattr(Remote, verb)

        def watched(remote: Remote, what: Any, name: str, real: Any = real) -> None:
            seen.append(name)
            real(remote, what, name)

        monkeypatch.setattr(Remote, verb, watched)
    trained(root, 1, remote=url).manager.close()
    assert seen[-2:] == [f"global_step_1/{MANIFEST}", TRACKER]
    assert MODEL in {name.partition("/")[2] for name in seen[:-2]}


@pytest.mark.parametrize("broken", [MODEL, "trainer_state.json", MANIFEST])
def test_a_cut_connection_counts_no_step_and_the_next_call_says_so(
    root: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{root}/there"
    failing = Failing(monkeypatch, lambda name: name.endswith(broken))
    run = trained(root, 1, remote=url)
    assert run.manager._mirror is not None
    while not events(root, "upload_failed"):
        threading.Event().wait(0.01)
    assert numbers(url) == []
    with pytest.raises(UploadError, match=r"step 1 is durable in .*connection was cut") as caught:
        run.train(2)
    assert "after 2 tries" in str(caught.value)
    assert disk_is_at(root / "global_step_2", 2)  # what failed there harms nothing here
    failing.broken = False
    with contextlib.suppress(UploadError):  # where step 2 was tried before it was mended
        run.manager.close()
    resumed(root, remote=url).manager.close()
    assert numbers(url) == [1, 2]


def test_a_restart_uploads_what_a_kill_kept_back(url: str, root: Path) -> None:
    trained(root, 1, 2, 3).manager.close()
    resumed(root, remote=url).manager.close()
    assert numbers(url) == [1, 2, 3]


def test_what_a_killed_upload_left_goes_once_its_step_did(url: str, root: Path) -> None:
    trained(root, 1, remote=url).manager.close()
    remote = Remote(url)
    for folder, mark in (("global_step_1", True), ("global_step_0", True), ("global_steps_0", False)):
        if folder != "global_step_1":
            remote.put_bytes(b"half", f"{folder}/{MODEL}")
        if mark:
            remote.put_bytes(b"", f"{folder}/{UPLOADING}")
    remote.put_bytes(b"half", f"global_step_9/{MODEL}")
    remote.put_bytes(b"", f"global_step_9/{UPLOADING}")
    newest = step_at(place_of(url))
    assert newest is not None and newest.step == 1
    remote.remove_folder("global_step_9")
    run = resumed(root, remote=url)
    run.train(2)
    run.manager.close()
    assert numbers(url) == [1, 2]
    assert remote.folders() == ["global_step_1", "global_step_2", "global_steps_0"]  # the last is somebody else's


def test_a_step_is_uploaded_once(url: str, root: Path) -> None:
    trained(root, 1, remote=url).manager.close()
    resumed(root, remote=url).manager.close()
    assert len(events(root, "upload_durable")) == 1


def test_another_history_s_step_of_the_same_number_is_not_taken_for_ours(url: str, root: Path, tmp_path: Path) -> None:
    trained(tmp_path / "other", 1, remote=url).manager.close()
    trained(root, 1).manager.close()
    resumed(root, remote=url).manager.close()
    remote = Remote(url)
    assert remote.read(f"global_step_1/{MANIFEST}") == (root / "global_step_1" / MANIFEST).read_bytes()
    (aside,) = [name for name in remote.folders() if name.startswith("set_aside_")]
    theirs = (tmp_path / "other/global_step_1" / MANIFEST).read_bytes()
    assert remote.read(f"{aside}/global_step_1/{MANIFEST}") == theirs


def test_both_places_keep_the_same(url: str, root: Path) -> None:
    kept = Retention(keep_last=1, keep_every=2)
    run = trained(root, 1, remote=url, retention=kept)
    for step in (2, 3, 4, 5):
        run.train(step)
        mirror = run.manager._mirror
        assert mirror is not None
        while step not in mirror._there:
            threading.Event().wait(0.01)
    run.manager.close()
    assert numbers(url) == [2, 4, 5]
    assert names(root) == {"global_step_2", "global_step_4", "global_step_5", TRACKER}


def test_what_cannot_be_deleted_there_is_no_failed_upload_and_goes_at_the_next_start(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{root}/there"
    run = trained(root, 1, remote=url, keep_last=1)
    assert run.manager._mirror is not None
    while 1 not in run.manager._mirror._there:
        threading.Event().wait(0.01)
    failing = Failing(monkeypatch, lambda name: name == f"global_step_1/{UPLOADING}")
    run.train(2)
    run.manager.close()
    assert (numbers(url), events(root, "upload_failed")) == ([1, 2], [])
    assert "keeps more steps than it is to" in caplog.text
    failing.broken = False
    resumed(root, remote=url, keep_last=1).manager.close()
    assert numbers(url) == [2]


def test_a_step_that_is_being_uploaded_stays_here_until_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep_last=1, and an upload slower than the saves: 1 is held while it is read, 2 is left out and told of."""
    url = f"memory://{root}/there"
    going, begun = threading.Event(), threading.Event()
    put = Remote.put

    def slow(remote: Remote, source: Path, name: str) -> None:
        begun.set()
        assert going.wait(30)
        put(remote, source, name)

    monkeypatch.setattr(Remote, "put", slow)
    run = trained(root, 1, remote=url, keep_last=1)
    assert begun.wait(30)
    run.train(2, 3)
    assert names(root) == {"global_step_1", "global_step_3", TRACKER}
    going.set()
    run.manager.close()
    assert numbers(url) == [3]
    assert names(root) == {"global_step_3", TRACKER}
    assert [event["step"] for event in events(root, "upload_skipped")] == [2]


def test_a_step_that_becomes_durable_while_the_url_is_looked_at_is_not_told_of_as_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{root}/there"
    trained(root, 1, remote=url).manager.close()
    looking, going = threading.Event(), threading.Event()
    real = Remote.read

    def slow(remote: Remote, name: str, start: int | None = None, end: int | None = None) -> bytes:
        if threading.current_thread().name == "milepost-upload" and not looking.is_set():
            looking.set()
            assert going.wait(30)
        return real(remote, name, start, end)

    monkeypatch.setattr(Remote, "read", slow)
    run = resumed(root, remote=url)
    assert looking.wait(30)
    run.train(2)
    going.set()
    run.manager.close()
    assert (numbers(url), events(root, "upload_skipped")) == ([1, 2], [])


def test_an_export_has_its_budget_there_too(url: str, root: Path) -> None:
    run = trained(root, 1, remote=url)
    run.manager.close()
    remote = Remote(url)
    (step,) = remote_steps(remote)
    remote.put_bytes(b"weights", "global_step_1/actor/huggingface/model.safetensors")
    plan_remote(remote_steps(remote), Retention(keep_exports=0)).carry_out()
    (left,) = remote_steps(remote)
    assert left.whole and not left.has_export and step.whole


# Resuming


def test_a_new_machine_goes_on_from_the_url(url: str, root: Path, tmp_path: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    run = resumed(tmp_path / "new", remote=url)
    assert run.is_at(2)
    assert any("step 2 was fetched from" in line for line in run.manager.report.lines())
    run.train(3)
    run.manager.close()
    assert numbers(url) == [1, 2, 3]
    assert names(tmp_path / "new") == {"global_step_2", "global_step_3", TRACKER}


def test_the_newer_of_both_places_is_taken(url: str, root: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    resumed(root).train(3)
    run = resumed(root, remote=url)
    assert run.is_at(3)
    run.manager.close()
    halve(root / "global_step_3" / MODEL)
    run = resumed(root, remote=url)
    assert run.is_at(3)  # from there, and the damaged one here is moved aside, not deleted
    assert disk_is_at(root / "global_step_3", 3)
    assert any(path.name.startswith("set_aside_") for path in root.iterdir())


def test_a_damaged_step_there_is_passed_over(url: str, root: Path, tmp_path: Path) -> None:
    trained(root, 1, 2, 3, remote=url).manager.close()
    remote = Remote(url)
    data = bytearray(remote.read(f"global_step_3/{MODEL}"))
    data[len(data) // 2] ^= 1
    remote.put_bytes(bytes(data), f"global_step_3/{MODEL}")
    remote.put_bytes(b"cut off", f"global_step_2/{MODEL}")
    run = resumed(tmp_path / "new", remote=url)
    assert run.is_at(1)
    text = "\n".join(run.manager.report.lines())
    assert "passed over step 3" in text and "checksum" in text and "has 7 bytes instead of" in text
    run.train(2)
    run.manager.close()
    assert numbers(url) == [1, 2]  # the other history's 2 and 3 were moved aside
    assert any(name.startswith("set_aside_") for name in remote.folders())
    assert not [path for path in (tmp_path / "new").iterdir() if path.name.endswith(".tmp")]


def test_a_fresh_start_moves_the_older_history_aside(url: str, root: Path, tmp_path: Path) -> None:
    trained(root, 5, 6, remote=url).manager.close()
    run = resumed(tmp_path / "new", "disable", remote=url)
    run.train(1)
    run.manager.close()
    assert numbers(url) == [1]
    assert resumed(tmp_path / "newer", remote=url).is_at(1)


def test_a_killed_removal_is_no_step_of_another_program_and_goes_at_the_next_start(
    url: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    removed, calls = Remote.remove, []

    def killed(remote: Remote, names: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(list(names))
        removed(remote, calls[0])

    with monkeypatch.context() as cut:
        cut.setattr(Remote, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_step(Remote(url), "global_step_1")
    assert calls == [[f"global_step_1/{MANIFEST}"]]
    left, whole = remote_steps(Remote(url))
    assert left.unfinished and MODEL in left.sizes and whole.whole
    with pytest.raises(DamagedError, match="no step here is whole"):
        step_at(place_of(f"{url}/global_step_1"))
    shutil.rmtree(root / "global_step_1")
    resumed(root, remote=url).manager.close()
    assert Remote(url).folders() == ["global_step_2"]


def test_a_full_disk_is_said_and_no_older_step_is_taken(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, real = f"memory://{root}/there", os.pwrite
    trained(root, 1, 2, remote=url).manager.close()
    room = [1000]

    def full(fd: int, data: Any, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: room[0]], offset)
        room[0] -= written
        return written

    with monkeypatch.context() as small:
        small.setattr(os, "pwrite", full)
        with pytest.raises(WriteError, match=r"step 2 was not fetched from .*No space left|step 2 .* full"):
            resumed(tmp_path / "new", remote=url)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:100], offset))  # short, as it may be
    assert resumed(tmp_path / "new", remote=url).is_at(2)


def test_of_two_steps_of_one_number_the_one_here_is_gone_on_with_and_the_other_kept(
    url: str, root: Path, tmp_path: Path
) -> None:
    trained(tmp_path / "other", 1, 2, remote=url).manager.close()
    trained(root, 1, 2).manager.close()
    ours = (root / "global_step_2" / MANIFEST).read_bytes()
    run = resumed(root, remote=url)
    assert any("global_step_2 is another step than" in line for line in run.manager.report.lines())
    run.manager.close()
    assert (root / "global_step_2" / MANIFEST).read_bytes() == ours == Remote(url).read(f"global_step_2/{MANIFEST}")
    aside = [name for name in Remote(url).folders() if name.startswith("set_aside_")]
    theirs = {(tmp_path / f"other/global_step_{n}" / MANIFEST).read_bytes() for n in (1, 2)}
    kept = {
        Remote(url).read(f"{into}/{step}/{MANIFEST}") for into in aside for step in Remote(url).below(into).folders()
    }
    assert kept == theirs


@pytest.mark.parametrize("damaged", [MODEL, "trainer_state.json"])
def test_a_damaged_step_here_is_replaced_by_the_whole_one_there(url: str, root: Path, damaged: str) -> None:
    """Of the model the size differs; of the small file only the content does."""
    trained(root, 1, 2, remote=url).manager.close()
    path = root / "global_step_2" / damaged
    path.write_bytes(path.read_bytes().replace(b'"reward": 0.2', b'"reward": 0.9')[: -1 if damaged == MODEL else None])
    run = resumed(root, remote=url)
    assert run.is_at(2) and disk_is_at(root / "global_step_2", 2)
    assert any("step 2 here was moved aside: " in line and damaged in line for line in run.manager.report.lines())
    run.manager.close()
    (aside,) = root.glob("set_aside_*")
    assert (aside / "global_step_2" / damaged).exists()


def test_a_newer_step_here_that_is_damaged_gives_way_to_an_older_whole_one_there(url: str, root: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    run = resumed(root)
    run.train(3)
    halve(root / "global_step_3" / MODEL)
    shutil.rmtree(root / "global_step_2")
    run = resumed(root, remote=url)
    assert run.is_at(2)
    run.train(3)
    run.manager.close()
    assert numbers(url) == [1, 2, 3] and disk_is_at(root / "global_step_3", 3)


@pytest.mark.parametrize("lacks", [MODEL, MANIFEST])
def test_a_newer_step_there_that_is_incomplete_is_passed_over_and_told_of(url: str, root: Path, lacks: str) -> None:
    trained(root, 1, 2, 3, remote=url).manager.close()
    shutil.rmtree(root / "global_step_3")
    Remote(url).remove([f"global_step_3/{lacks}"])
    run = resumed(root, remote=url)
    assert run.is_at(2)
    assert any("passed over" in line and "global_step_3" in line for line in run.manager.report.lines())


# An outage costs time only


def test_no_save_waits_for_the_network_and_the_older_history_goes_aside_before_the_first_upload(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{root}/there"
    trained(root, 5, 6, remote=url).manager.close()
    failing = Failing(monkeypatch, lambda name: True)
    run = resumed(tmp_path / "new", "disable", remote=url)
    with contextlib.suppress(UploadError):  # told of then or at the end
        run.train(1)
    assert disk_is_at(tmp_path / "new/global_step_1", 1)
    with pytest.raises(UploadError, match="connection was cut"):
        run.manager.close()
    (stop,) = events(tmp_path / "new", "stop")
    assert "connection was cut" in stop["not_uploaded"]
    failing.broken = False
    run = resumed(tmp_path / "new", remote=url)  # a new process: the URL's step 6 is newer, and of the older history
    assert run.is_at(1)
    run.train(2)
    run.manager.close()
    assert numbers(url) == [1, 2]
    (aside,) = [name for name in Remote(url).folders() if name.startswith("set_aside_")]
    assert Remote(url).below(aside).folders() == ["global_step_5", "global_step_6"]
    assert names(tmp_path / "new") == {"global_step_1", "global_step_2", TRACKER}


def test_a_start_without_the_network_goes_on_from_what_is_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{root}/there"
    trained(root, 1, 2, remote=url).manager.close()
    Failing(monkeypatch, lambda name: True)
    run = resumed(root, remote=url)
    assert run.is_at(2)
    assert any("connection was cut" in line and "step 2 is the newest" in line for line in run.manager.report.lines())
    try_at_start(url, root, EventLog(root / EVENTS))
    assert [event["step"] for event in events(root, "remote_unreachable")] == [2, 2]
    with pytest.raises(OutageError, match="connection was cut"):
        try_at_start(url, root / "nothing", EventLog(root / EVENTS))


def test_an_end_in_a_hurry_waits_no_longer_than_it_may(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, going = f"memory://{root}/there", threading.Event()
    put = Remote.put

    def slow(remote: Remote, source: Path, name: str) -> None:
        assert going.wait(30)
        put(remote, source, name)

    monkeypatch.setattr(Remote, "put", slow)
    run = trained(root, 1, remote=url)
    with pytest.raises(UploadError, match=r"step 1 is durable in .* not uploaded to .* in the time that was left"):
        run.manager.close("signal", patience=0.2, step=1)
    (stop,) = events(root, "stop")
    assert stop["reason"] == "signal" and stop["step"] == 1 and "step 1 is durable" in stop["not_uploaded"]
    going.set()
    thread = run.manager._mirror and run.manager._mirror._thread
    assert thread is not None
    thread.join(30)


def test_a_step_that_a_hanging_deletion_holds_is_missed_at_the_end(root: Path) -> None:
    url = f"memory://{root}/there"
    run = trained(root, remote=url)
    mirror = run.manager._mirrored()
    with mirror.unread(1) as free:  # as retention has a step whose export it deletes
        assert free
        run.train(1)
        with pytest.raises(UploadError, match=r"step 1 is durable in .*, but was not uploaded to .*: .*deletion"):
            run.manager.close()
    assert numbers(url) == []
    assert [event["step"] for event in events(root, "upload_failed")][-1] == 1
    (stop,) = events(root, "stop")
    assert "step 1 is durable" in stop["not_uploaded"]


def test_a_step_that_has_arrived_is_not_told_of_as_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, look = f"memory://{root}/there", Mirror._next

    def fail_after(mirror: Mirror) -> DiskStep | None:
        if mirror._there:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(mirror)

    monkeypatch.setattr(Mirror, "_next", fail_after)
    run = trained(root, 1, remote=url)
    with pytest.raises(UploadError, match=r"^steps were not uploaded to"):
        run.manager.close()
    assert numbers(url) == [1]
    assert {event.get("step") for event in events(root, "upload_failed")} == {None}


@pytest.mark.parametrize("upload", ["works", "fails", "breaks"])
def test_retention_that_fails_at_the_end_is_no_error_and_hides_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, upload: str
) -> None:
    url = f"memory://{root}/there"
    run = trained(root, 1, 2, remote=url, keep_last=1)

    def refuse(*_args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))

    monkeypatch.setattr(run.manager._pruning, "prune", refuse)
    kinds = {"works": None, "fails": UploadError("step 2 is not there"), "breaks": OSError(errno.EIO, "odd")}
    error = kinds[upload]
    if error is not None:
        monkeypatch.setattr(Mirror, "close", lambda *_args: (_ for _ in ()).throw(error))
    if upload == "works":
        run.manager.close()
    else:
        with pytest.raises(WriteError, match="step 2 is not there" if upload == "fails" else "odd"):
            run.manager.close()
    (stop,) = events(root, "stop")
    assert stop["reason"] == ("error" if upload == "breaks" else "done")
    assert any("Read-only file system" in record.message for record in caplog.records)
    run.manager.close()
    assert events(root, "stop") == [stop]


def test_a_failure_that_was_made_up_for_is_none_at_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{root}/there"
    failing = Failing(monkeypatch, lambda name: name.endswith(MODEL))
    run = trained(root, 1, remote=url)
    while not events(root, "upload_failed"):
        threading.Event().wait(0.01)
    failing.broken = False
    run.manager.close()
    assert numbers(url) == [1]


def test_what_all_stay_for_takes_no_look_into_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{root}/there"
    run = trained(root, 1, 2, 3, remote=url)
    mirror = run.manager._mirror
    assert mirror is not None
    while 3 not in mirror._there:
        threading.Event().wait(0.01)
    for step in (1, 2):
        shutil.rmtree(root / f"global_step_{step}")
    seen: list[str] = []
    sizes = Remote.sizes
    monkeypatch.setattr(Remote, "sizes", lambda remote, folder: seen.append(folder) or sizes(remote, folder))
    run.train(4)
    run.manager.close()
    assert set(seen) == {"global_step_4"} and numbers(url) == [1, 2, 3, 4]


def test_a_restart_fetches_a_named_step_once(url: str, root: Path, tmp_path: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    named = Path(f"{url}/global_step_1")
    new = tmp_path / "new"
    resumed(new, "resume_path", named, run_id="r")
    Remote(url).remove_folder("global_step_1")
    assert resumed(new, "resume_path", named, run_id="r", attempt=1).is_at(1)
    halve(new / "fetched/global_step_1" / MODEL)
    with pytest.raises(NotFoundError, match="holds no step 1"):
        resumed(new, "resume_path", named, run_id="r", attempt=1)


def test_a_url_that_does_not_answer_is_no_fresh_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, lambda name: True)
    with pytest.raises(CallError, match="after 2 tries: the connection was cut"):
        resumed(root, remote=f"memory://{root}/there")


def test_a_step_named_by_its_url(url: str, root: Path, tmp_path: Path) -> None:
    trained(root, 1, 2, remote=url).manager.close()
    run = resumed(tmp_path / "new", "resume_path", Path(f"{url}/global_step_1"))
    assert run.is_at(1)
    with pytest.raises(NotFoundError, match="holds no step 7"):
        resumed(tmp_path / "other", "resume_path", Path(f"{url}/global_step_7"))


def test_a_merge_by_url_is_the_merge(zoo: Path, tmp_path: Path) -> None:
    step = tmp_path / "run/global_step_7"
    shutil.copytree(zoo / "tied" / "actor", step / "actor")
    (step / "critic").mkdir()
    (step / "critic" / "unread").write_bytes(b"1")
    assert milepost(["merge", str(step), str(tmp_path / "here"), "-q"]) == 0
    assert milepost(["merge", f"file://{step}", str(tmp_path / "there"), "-q"]) == 0
    assert milepost(["merge", f"file://{step}/actor", str(tmp_path / "role"), "-q"]) == 0
    for path in (tmp_path / "here").iterdir():
        for other in ("there", "role"):
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes()
    assert milepost(["merge", f"file://{tmp_path}/nothing", str(tmp_path / "no"), "-q"]) == 2


# Small parts


class _Two:
    """Two ranks in two threads, as a Communicator."""

    world_size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self._barrier, self._values = rank, barrier, values
        self.meetings = 0

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(10)
        seen = list(self._values)
        self._barrier.wait(10)
        self.meetings += 1
        return seen


@pytest.mark.parametrize("fails", [False, True])
def test_what_takes_rank_0_long_keeps_no_other_rank_waiting(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milepost.checkpoint.comm._BEAT", 0.01)
    barrier, values, said = threading.Barrier(2), [None, None], {}

    def long() -> str:
        threading.Event().wait(0.2)
        if fails:
            raise CallError("the network is gone")
        return "fetched"

    def work(comm: Any) -> None:
        try:
            said[comm.rank] = on_rank_0_at_length(comm, long)
        except CallError as error:
            said[comm.rank] = str(error)

    comms = [_Two(rank, barrier, values) for rank in range(2)]
    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == dict.fromkeys((0, 1), "rank 0: the network is gone" if fails else "fetched")
    assert comms[1].meetings > 3


def test_the_first_error_stops_the_others() -> None:
    done: list[int] = []

    def act(number: int) -> None:
        if number == 3:
            raise ValueError("three")
        done.append(number)

    with pytest.raises(ValueError, match="three"):
        side_by_side(range(1000), act, workers=1)
    assert done == [0, 1, 2]


def test_pins_at_a_url_obey_the_dry_run_and_are_all_looked_at_first(
    url: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(root, 1, 2, 3, remote=url).manager.close()

    def pinned() -> list[int]:
        return [step.step for step in remote_steps(Remote(url)) if step.pinned]

    assert milepost(["prune", url, "--pin", "1", "--unpin", "77"]) == 2
    assert milepost(["prune", url, "--pin", "1", "--dry-run"]) == 0
    assert milepost(["prune", url, "--pin", "1", "--keep_last", "1"]) == 2  # there is no terminal to say yes on
    assert pinned() == []
    capfd.readouterr()
    assert milepost(["prune", url, "--pin", "1", "--keep_last", "1", "--dry-run", "--json", "-q"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert ([one["step"] for one in found["deleted"]], found["pinned"], pinned()) == ([2], [1], [])
    assert milepost(["prune", url, "--pin", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["pinned"] == [1]
    assert milepost(["prune", url, "--unpin", "1", "--pin", "2", "--keep_last", "1", "--yes", "-q"]) == 0
    assert (pinned(), numbers(url)) == ([2], [2, 3])


class BotosError(Exception):
    """Stands for what botocore raises, which has no class in common with anything."""


BotosError.__module__ = "botocore.exceptions"


@pytest.mark.parametrize(
    ("error", "tries", "raised"),
    [
        (TypeError("a fault"), 1, TypeError), (KeyError("a fault"), 1, KeyError),
        (ValueError("no such thing"), 1, CallError), (PermissionError("no"), 1, CallError),
        (OSError("cut"), 2, CallError), (TimeoutError(), 2, CallError), (BotosError("cut"), 2, CallError),
    ],
)  # fmt: skip
def test_what_is_tried_again_and_what_is_no_network_s_fault(
    error: Exception, tries: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def at(_: Remote, name: str) -> str:
        calls.append(name)
        raise error

    monkeypatch.setattr(Remote, "_at", at)
    with pytest.raises(raised):
        Remote("memory://x").read("name")
    assert len(calls) == tries


def test_a_pin_goes_along(url: str, root: Path) -> None:
    trained(root, 1).manager.close()
    (root / "global_step_1" / PIN).touch()
    run = resumed(root, remote=url, keep_last=1)
    run.train(2)
    run.manager.close()
    assert numbers(url) == [1, 2]
    step = remote_steps(Remote(url))[0]
    assert isinstance(step, RemoteStep) and step.pinned
    assert json.loads(json.dumps(step.facts().metrics)) == {"reward": 0.1}
