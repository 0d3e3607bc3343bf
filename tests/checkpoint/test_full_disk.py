"""A disk that is full at any byte or any file: one sentence on every rank, and the step before as it was."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import names, resumed, trained

from milepost.checkpoint.steps import TRACKER
from milepost.errors import WriteError

TESTS = Path(__file__).parents[1]


def test_a_file_that_may_not_grow_is_one_sentence_at_any_size(tmp_path: Path) -> None:
    run = trained(tmp_path, 1)
    run.reach(2)
    largest = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = set()
    for limit in range(0, largest, 97):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(WriteError, match=r"^step 2 was not saved: \S+: File too large") as error:
                run.manager.save(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        files.add(Path(str(error.value).split(": ")[1]).name)
        assert names(tmp_path) == {"global_step_1", TRACKER}
    assert len(files) > 2
    assert resumed(tmp_path).is_at(1)
    run.manager.save(2)
    assert resumed(tmp_path).is_at(2)


@pytest.fixture(scope="module")
def outcomes(module_path: Path, mount_namespace: list[str]) -> Any:
    root = module_path / "tmpfs"
    root.mkdir()
    command = [*mount_namespace, sys.executable, str(TESTS / "full_disk.py"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["pages", "files", "background"])
def test_a_full_disk_at_every_page_and_every_file_of_a_save_on_two_ranks(outcomes: Any, kind: str) -> None:
    *failed, last = zip(outcomes[0][kind], outcomes[1][kind], strict=True)
    assert len(failed) > (15 if kind != "background" else 5)
    for ranks in failed:
        # Both ranks are told the same: which rank, which file, why, what to do.
        assert ranks[0]["told"] == ranks[1]["told"]
        assert "the disk is full; free some space, or keep fewer steps" in ranks[0]["told"]
        assert ranks[0]["told"].startswith("WriteError: step 2 was not saved: rank ")
        assert ".tmp" not in ranks[0]["told"]
        for seen in ranks:
            assert seen["left"] == ["global_step_1", TRACKER]
            assert seen["whole"]
            assert seen["tracker"] == 1
    for seen in last:
        assert seen["told"] == ""
        assert seen["left"] == ["global_step_1", "global_step_2", TRACKER]
        assert seen["tracker"] == 2
