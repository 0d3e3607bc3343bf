"""Two runs in one folder: the second is refused before it touches anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.checkpoint.lock import exclusive
from milepost.errors import WriteError


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path, "one"):
        said = f"another run writes here now .process {os.getpid()} on "
        with pytest.raises(WriteError, match=said) as refused, exclusive(tmp_path, "two"):
            pass
        assert str(tmp_path) in str(refused.value) and "trainer.default_local_dir" in str(refused.value)
        with exclusive(tmp_path, "one"):
            pass  # a restart of the same run
    with exclusive(tmp_path, "two"):
        pass


def test_the_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from milepost.checkpoint.lock import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'dead'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path], timeout=60, check=False)
    assert killed.returncode == -9
    with exclusive(tmp_path, "next"):
        pass
