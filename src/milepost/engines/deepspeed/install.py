"""Whether DeepSpeed, and what it needs, is there: asked before anything is started. Imports neither it nor torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil

from milepost.errors import CallError

_OLDEST = (0, 19)


def check_installed(*, offload_optimizer: bool = False) -> None:
    """Raise CallError where DeepSpeed, or what it compiles its CPU Adam with, is missing or too old."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise CallError("strategy deepspeed needs DeepSpeed: pip install 'milepost[deepspeed]'") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise CallError(
            f"DeepSpeed {version} is too old: it would train on through a gradient that is not finite; "
            "pip install -U 'milepost[deepspeed]'"
        )
    if offload_optimizer:
        # torch compiles with $CXX, or c++, and asks ninja to.
        missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
        if missing:
            raise CallError(
                f"offload_optimizer=true lets DeepSpeed compile its CPU Adam at the first start, and {missing[0]} is "
                "not here: install a C++ compiler and ninja (on Debian: apt install g++ ninja-build), or set "
                "offload_optimizer=false"
            )
