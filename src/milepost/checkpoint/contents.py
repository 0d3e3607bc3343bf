"""What a step holds of a run's state, by the names that a config gives: model, optimizer, extra, hf_model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from milepost.checkpoint.manifest import HF_MODEL
from milepost.errors import ConfigError
from milepost.jobs.merge import merge
from milepost.jobs.prepare import prepare

CONTENTS = ("model", "optimizer", "extra")


def check_contents(option: str, contents: Sequence[str]) -> list[str]:
    """Refuse unknown contents; the line for a part of what goes together."""
    unknown = [name for name in contents if name not in (*CONTENTS, HF_MODEL)]
    if unknown:
        raise ConfigError(f"{option}: {unknown[0]!r} is none of {', '.join((*CONTENTS, HF_MODEL))}")
    lacking = [name for name in CONTENTS if name not in contents]
    if not lacking:
        return []
    return [f"{option} leaves out {', '.join(lacking)}: {', '.join(CONTENTS)} go together, so all are taken"]


def export_hf(role_dir: Path, target: Path) -> None:
    """Write the weights of a role's directory in Hugging Face's form into a new one, durably."""
    merge(prepare(role_dir), target)
