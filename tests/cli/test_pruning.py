"""prune, and what inspect says of a run: the same decisions, from the disk."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import disk_is_at, halve, make_foreign, names, trained

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.inventory import PIN
from milepost.checkpoint.litter import delete_step
from milepost.checkpoint.lock import LOCK
from milepost.checkpoint.manifest import MANIFEST, FileRecord, check_files, digest_file, read_manifest
from milepost.checkpoint.pruning import _touched, carry_out, drop_export, plan_prune, sweepable
from milepost.checkpoint.retention import Retention
from milepost.checkpoint.steps import TRACKER, judge, newest_good, read_tracker
from milepost.cli.app import run
from milepost.layouts.huggingface import SUBDIRECTORY

LITTER = ".global_step_5.00ff00ff.tmp"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that ended well, with steps 1 to 5 of rewards 0.1 to 0.5."""
    trained(tmp_path, 1, 2, 3, 4, 5).manager.close()
    return tmp_path


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in root.glob("global_step_*"))


def asked(root: Path, *arguments: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["prune", str(root), *arguments, "--json", "-q"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_dry_run_says_everything_and_changes_nothing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    found = asked(root, "--keep_last", "1", "--keep_every", "2", "--dry-run", capfd=capfd)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert [(step["step"], step["kept"], step["why"]) for step in found["steps"]] == [
        (1, False, "nothing keeps it"),
        (2, True, "a multiple of 2"),
        (3, False, "nothing keeps it"),
        (4, True, "a multiple of 2"),
        (5, True, "the last"),
    ]
    size = sum(read_manifest(root / f"global_step_{number}").nbytes for number in (1, 3))
    assert (found["dry_run"], found["bytes"], [one["step"] for one in found["deleted"]]) == (True, size, [1, 3])
    marked = ["--pin", "1", "--unpin", "2", "--dry-run"]
    found = asked(root, *marked, capfd=capfd)
    assert (found["pinned"], found["unpinned"], found["deleted"]) == ([1], [2], [])
    assert run(["prune", str(root), *marked]) == 0
    assert capfd.readouterr().out == "would be pinned: 1\nwould no longer be pinned: 2\n"
    found = asked(root, "--keep_last", "1", *marked, capfd=capfd)  # as it will be once the step is pinned
    assert ([one["step"] for one in found["deleted"]], found["pinned"]) == ([2, 3, 4], [1])
    assert found["steps"][0] == {"step": 1, "kept": True, "why": "pinned"}
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_pins_are_all_looked_at_before_one_is_written(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", str(root), "--pin", "1", "--unpin", "77"]) == 2
    assert "holds no step 77" in capfd.readouterr().err
    assert run(["prune", str(root), "--pin", "1", "--unpin", "1"]) == 2
    assert "one of them" in capfd.readouterr().err
    with pytest.MonkeyPatch.context() as at:
        at.setattr("sys.stdin", io.StringIO())
        assert run(["prune", str(root), "--pin", "1", "--keep_last", "1"]) == 2  # nobody said yes
    assert not list(root.rglob(PIN))
    assert asked(root, "--pin", "1", capfd=capfd)["pinned"] == [1]
    assert run(["prune", str(root), "--pin", "2", "--keep_last", "1", "--yes", "-q"]) == 0
    assert capfd.readouterr().out.startswith("pinned: 2\ndeleted: 2 steps")
    assert steps(root) == [1, 2, 5]
    assert run(["prune", str(root), "--unpin", "1"]) == 0
    assert capfd.readouterr().out == "no longer pinned: 1\n"
    assert list(root.rglob(PIN)) == [root / "global_step_2" / PIN]


@pytest.mark.parametrize("arguments", ["--pin 1", "--unpin 2", "--keep_last 1 --yes"])
def test_a_run_that_may_not_be_written(root: Path, arguments: str) -> None:
    nobody = "setpriv --bounding-set -dac_override --inh-caps -dac_override"  # root without its right to write all
    if subprocess.run([*nobody.split(), "true"], check=False).returncode:
        pytest.skip("needs to give up the rights of root")
    (root / "global_step_2" / PIN).touch()
    (root / LOCK).touch()
    closed = [root / "global_step_1", root / "global_step_2", root / LOCK]
    for path in closed:
        path.chmod(0o555)
    call = f"{nobody} {sys.executable} -m milepost prune '{root}' {arguments}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=60, check=False)
    place = {"--pin 1": closed[0] / PIN, "--unpin 2": closed[1] / PIN}.get(arguments, root / LOCK)
    assert (done.returncode, done.stdout, steps(root)) == (2, "", [1, 2, 3, 4, 5])
    assert done.stderr.startswith(f"milepost: {place}: cannot be written: no permission to write there")


def test_it_needs_a_yes_where_there_is_no_terminal(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for stdin in ("</dev/null", "<&-"):
        call = f"{sys.executable} -m milepost prune '{root}' --keep_last 1 {stdin}"
        done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, steps(root)) == (2, [1, 2, 3, 4, 5])
        assert "--yes" in done.stderr.splitlines()[-1]
    assert run(["prune", str(root), "--keep_last", "1", "--yes"]) == 0
    assert "deleted: 4 steps" in capfd.readouterr().out
    assert names(root) == {"global_step_5", TRACKER}
    assert disk_is_at(root / "global_step_5", 5)


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", [5]), (b"\n", [1, 2, 3, 4, 5])])
def test_it_asks_on_a_terminal(root: Path, answer: bytes, left: list[int]) -> None:
    outer, inner = pty.openpty()
    os.write(outer, answer)
    done = subprocess.run(
        [sys.executable, "-m", "milepost", "prune", str(root), "--keep_last", "1", "-q"],
        stdin=inner, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "delete 4 things" in done.stderr
    assert steps(root) == left


def test_what_is_never_deleted(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A foreign step, a pinned one, the newest whole one, and the damaged one after it."""
    make_foreign(root / "global_step_1")
    halve(root / "global_step_5/actor/model_world_size_1_rank_0.pt")
    assert asked(root, "--pin", "2", capfd=capfd)["pinned"] == [2]
    asked(root, "--keep_every", "1000", "--yes", capfd=capfd)
    assert steps(root) == [1, 2, 4, 5]
    assert asked(root, "--unpin", "2", capfd=capfd)["unpinned"] == [2]
    asked(root, "--keep_every", "1000", "--yes", capfd=capfd)
    assert steps(root) == [1, 4, 5]
    assert run(["prune", str(root), "--pin", "77"]) == 2
    assert "holds no step 77" in capfd.readouterr().err


def test_the_run_s_own_retention_is_the_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(
        tmp_path, 1, 2, 3, retention=Retention(keep_every=2, keep_best="reward", keep_best_mode="min")
    ).manager.close()
    assert steps(tmp_path) == [1, 2, 3]
    assert asked(tmp_path, "--yes", capfd=capfd)["deleted"] == []
    trained(tmp_path / "all", 1, 2).manager.close()
    assert run(["prune", str(tmp_path / "all"), "--yes"]) == 2
    assert "say what is to stay" in capfd.readouterr().err


def test_a_live_run_is_left_alone(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (root / LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("some_run process 7 on here\n")
        lock.flush()
        assert run(["prune", str(root), "--keep_last", "1", "--yes"]) == 2
    assert "process 7 on here" in capfd.readouterr().err
    assert steps(root) == [1, 2, 3, 4, 5]
    with (root / EVENTS).open("a") as diary:  # a run on another machine, whose lock does not reach here
        diary.write(json.dumps({"time": time.time(), "event": "start", "host": "elsewhere", "pid": 1}) + "\n")
    assert run(["prune", str(root), "--keep_last", "1", "--yes"]) == 2
    assert "the run on elsewhere may be alive" in capfd.readouterr().err
    assert steps(root) == [1, 2, 3, 4, 5]


def test_litter_goes_once_it_is_certain_that_nobody_writes_it(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / LITTER).mkdir()
    (root / LITTER / "file").write_bytes(b"1")
    assert asked(root, "--keep_last", "9", "--yes", capfd=capfd)["litter"] == []  # perhaps a save of this moment
    (root / LOCK).touch()  # of a trainer, which would hold it
    assert asked(root, "--keep_last", "9", "--yes", capfd=capfd)["litter"] == [LITTER]
    assert not (root / LITTER).exists()
    (root / LOCK).unlink()
    (root / LITTER).mkdir()
    os.utime(root / LITTER, (1, 1))
    assert asked(root, "--keep_last", "9", "--yes", capfd=capfd)["litter"] == [LITTER]


def test_a_save_that_is_on_its_way_is_no_litter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the look at it, the folder becomes a step, or a file in it goes."""
    monkeypatch.setattr("milepost.checkpoint.pruning.litter", lambda root: [LITTER])
    assert _touched(root / LITTER) == math.inf
    assert sweepable(root, certain=False) == []
    (root / LITTER).mkdir()
    os.utime(root / LITTER, (1, 1))
    assert sweepable(root, certain=False) == [LITTER]
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: iter([self / "gone"]))
    assert sweepable(root, certain=False) == []


def test_a_deletion_that_is_cut_off_leaves_litter_and_no_half_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milepost.checkpoint.litter.remove", lambda path: None)  # killed right after the rename
    delete_step(root / "global_step_2")
    assert steps(root) == [1, 3, 4, 5]
    assert all(judge(root / f"global_step_{number}").good for number in steps(root))


def test_the_tracker_never_names_a_step_that_went(root: Path) -> None:
    (root / TRACKER).write_text("2")
    carry_out(plan_prune(root, Retention(keep_last=1)))
    assert read_tracker(root) == 5


# Exports


@pytest.fixture
def exporting(tmp_path: Path) -> Path:
    """Steps 1 to 3, each as with hf_model among what is saved."""
    trained(tmp_path, 1, 2, 3).manager.close()
    for number in (1, 2, 3):
        step = tmp_path / f"global_step_{number}"
        folder = step / "actor" / SUBDIRECTORY
        folder.mkdir()
        records = []
        for name, content in (("config.json", b"{}"), ("model.safetensors", b"12345678"), ("tokenizer.json", b"{}")):
            (folder / name).write_bytes(content)
            records.append(FileRecord(f"actor/{SUBDIRECTORY}/{name}", len(content), digest_file(folder / name)))
        saved = read_manifest(step)
        exported = replace(saved, contents=(*saved.contents, "hf_model"), files=(*saved.files, *records))
        (step / MANIFEST).write_text(exported.to_json())
    return tmp_path


def test_exports_go_before_their_steps_do(exporting: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = asked(exporting, "--keep_exports", "1", "--yes", capfd=capfd)
    assert [(one["what"], one["step"], one["bytes"]) for one in found["deleted"]] == [
        ("export", 1, 8),
        ("export", 2, 8),
    ]
    for number, exported in ((1, False), (2, False), (3, True)):
        step = exporting / f"global_step_{number}"
        assert judge(step).good and disk_is_at(step, number)
        assert ("hf_model" in read_manifest(step).contents) is exported
        assert (step / "actor" / SUBDIRECTORY / "model.safetensors").exists() is exported
        assert (step / "actor" / SUBDIRECTORY / "config.json").exists()
        assert not check_files(step, read_manifest(step), deep=True)
    assert asked(exporting, "--keep_exports", "1", "--yes", capfd=capfd)["deleted"] == []


@pytest.mark.parametrize("killed_at", ["replace", "unlink"])
def test_an_export_half_deleted_is_a_whole_step_and_goes_next_time(
    exporting: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = exporting / "global_step_1"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as at:
        at.setattr(Path, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            drop_export(step)
    assert judge(step).good
    assert (step / "actor" / SUBDIRECTORY / "model.safetensors").exists()
    carry_out(plan_prune(exporting, Retention(keep_exports=1)))
    assert judge(step).good
    assert not (step / "actor" / SUBDIRECTORY / "model.safetensors").exists()
    assert not list(step.glob(".*"))


def test_an_export_that_the_disk_refuses_to_delete_stays_and_is_told_of(
    exporting: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if "global_step_1" in path.parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    plan = plan_prune(exporting, Retention(keep_exports=1))
    assert [one.step for one in plan.going] == [1, 2]
    assert [one.step for one in carry_out(plan)] == [2]
    assert "global_step_1 were not deleted" in caplog.text
    assert judge(exporting / "global_step_1").good
    assert run(["prune", str(exporting), "--keep_exports", "1", "--yes"]) == 2
    assert "1 thing could not be deleted" in capfd.readouterr().err


def test_a_run_has_a_budget_for_exports(tmp_path: Path) -> None:
    run_ = trained(tmp_path, 1, retention=Retention(keep_exports=0))
    folder = tmp_path / "global_step_1/actor" / SUBDIRECTORY
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"left by a kill")
    run_.train(2)
    assert not (folder / "model.safetensors").exists()
    assert newest_good(tmp_path).good is not None
