"""Whether megatron-core is there: asked before anything is started. Imports neither it nor torch."""

from __future__ import annotations

import importlib.metadata
import re

from milepost.errors import CallError

_OLDEST = (0, 16)


def check_installed() -> None:
    """Raise CallError where megatron-core is missing or too old."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise CallError("strategy megatron needs megatron-core: pip install 'milepost[megatron]'") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise CallError(f"megatron-core {version} is too old for milepost: pip install -U 'milepost[megatron]'")
