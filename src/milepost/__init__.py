"""milepost: fault-tolerant RLHF training.

PPO whose every step is recorded whole, resumed anywhere, and exported to Hugging Face without the framework that
trained it. The names below are loaded when first used, so that `import milepost` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.api.comparing import TestCall, test
    from milepost.api.merging import MergeCall, merge
    from milepost.api.opening import Checkpoint, open
    from milepost.checkpoint.manager import CheckpointManager
    from milepost.checkpoint.pretrained import load_pretrained
    from milepost.errors import CallError, CheckpointError, MilepostError
    from milepost.integrations.policy import save_policy
    from milepost.jobs.convert import convert
    from milepost.jobs.prepare import ModelOptions

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "milepost.api.opening",
    "MergeCall": "milepost.api.merging",
    "ModelOptions": "milepost.jobs.prepare",
    "TestCall": "milepost.api.comparing",
    "merge": "milepost.api.merging",
    "open": "milepost.api.opening",
    "test": "milepost.api.comparing",
    "CheckpointManager": "milepost.checkpoint.manager",
    "convert": "milepost.jobs.convert",
    "load_pretrained": "milepost.checkpoint.pretrained",
    "CallError": "milepost.errors",
    "CheckpointError": "milepost.errors",
    "MilepostError": "milepost.errors",
    "save_policy": "milepost.integrations.policy",
}

__all__ = [
    "CallError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "MergeCall",
    "MilepostError",
    "ModelOptions",
    "TestCall",
    "convert",
    "load_pretrained",
    "merge",
    "open",
    "save_policy",
    "test",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'milepost' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
