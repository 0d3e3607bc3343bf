"""A directory that appears whole: what is flushed before it takes its place, and what stays of a writer that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import interrupted
import pytest
from interrupted import read, write

from milepost.errors import CallError, WriteError
from milepost.jobs.output import output_directory


def test_files_of_folders_inside_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.fstat(fd).st_ino), fsync(fd))[1])
    with output_directory(tmp_path / "out", overwrite=False) as building:
        (building / "lora_adapter").mkdir()
        (building / "lora_adapter" / "adapter_config.json").write_text("{}")
        (building / "config.json").write_text("{}")
    inside = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert len(inside) == 4 and {path.stat().st_ino for path in inside} <= flushed


def test_whenever_a_writer_ends_a_whole_directory_stands(tmp_path: Path) -> None:
    program = [sys.executable, interrupted.__file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    for name, place in (("link", tmp_path / "disk" / "model"), ("far", tmp_path / "new" / "place")):
        (tmp_path / name).symlink_to(place)
    (tmp_path / "disk" / "model").mkdir(parents=True)
    for name, place in (("link", "disk/model"), ("far", "new/place"), ("link", "disk/model")):
        write(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and read(tmp_path / place) == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "far", "link", "new"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_places_that_cannot_be_replaced_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (Path("/"), Path("/proc"), tmp_path / "loop"):
        with (
            pytest.raises((CallError, WriteError), match=f"^{place}: is a (whole disk|link)"),
            output_directory(place, overwrite=True),
        ):
            raise AssertionError("the work has begun")


def test_a_path_that_goes_up_means_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "out" / "inner").mkdir(parents=True)
    with pytest.raises(WriteError, match=f"^{tmp_path}/out: does not look like"):
        write(tmp_path / "out" / "inner" / "..", "new")
