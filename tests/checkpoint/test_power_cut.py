"""The power fails at any moment: what `save` has returned is on the disk, and what is there is whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_a_power_cut_at_any_change_takes_no_step_that_was_saved(tmp_path: Path, mount_namespace: list[str]) -> None:
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("needs mkfs.ext4 and loop devices")
    command = [*mount_namespace, sys.executable, str(TESTS / "power_cut.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *cuts, last = json.loads(done.stdout)
    assert len(cuts) > 6
    for cut_short, saved, newest in cuts:
        assert cut_short
        assert newest in (2, 3)
        assert newest >= saved
    # Cut right after `save` returned: nothing is left to be flushed.
    assert last == [False, 3, 3]
