"""A directory that appears whole: what is flushed before it takes its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
