"""Reading a checkpoint starts without a training framework: no module of these rooms imports one when it is loaded."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import milepost

HEAVY = ("torch", "transformers", "omegaconf", "deepspeed", "megatron", "safetensors", "pyarrow", "tensorboard")
ROOMS = ("layouts", "transfer", "mapping", "index", "fileio", "cast", "jobs", "edits", "errors", "api")


def _modules(room: str) -> list[str]:
    """A room's module, and those below it."""
    root = Path(milepost.__file__).parent / room
    below = pkgutil.walk_packages([str(root)], f"milepost.{room}.")
    return [f"milepost.{room}", *(module.name for module in below)]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_framework(room: str) -> None:
    modules = _modules(room)
    program = f"import sys, {', '.join(modules)}\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
