"""New files of a model into a directory that holds other things too: a trainer's output, with its steps and logs."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milepost.errors import WriteError
from milepost.jobs.output import sync, sync_tree
from milepost.layouts.huggingface import CONFIG
from milepost.wording import disk_error

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def into_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory whose files go into `target` when the context ends well, each by one rename.

    The weights of an older model there go, whatever their files are called; all else stays. While files change places
    `target` has no config.json, so that nobody loads half of one model and half of another.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        building = target / f".milepost.{secrets.token_hex(4)}.tmp"
        building.mkdir()
        try:
            yield building
            sync_tree(building)
            _move(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {disk_error(error)}") from None


def _move(building: Path, target: Path) -> None:
    new = sorted(building.iterdir(), key=lambda path: path.name == CONFIG)
    (target / CONFIG).unlink(missing_ok=True)
    for old in [path for path in target.iterdir() if _WEIGHTS.fullmatch(path.name)]:
        old.unlink()
    for path in new:
        path.replace(target / path.name)
    sync(target)
