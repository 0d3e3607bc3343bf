"""What killed saves leave in a run's folder, and how a step goes: it becomes such litter first.

By one rename a folder stops being a step, or stops being about to become one; then its files go. A kill in between
leaves a name that no reader takes for a step and the next start sweeps away.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from milepost.checkpoint.files import sync_directory

_LITTER = re.compile(r"\.(global_steps?_\d+|latest_checkpointed_iteration)\.[0-9a-f]{8}\.tmp")
_log = logging.getLogger(__name__)


def temporary_path(path: Path) -> Path:
    """A new name beside `path` for what is on its way to that name, or away from it: litter, where a kill leaves it."""
    return path.with_name(f".{path.name.removeprefix('.').partition('.')[0]}.{secrets.token_hex(4)}.tmp")


def litter(root: Path) -> list[str]:
    """The names of what killed saves have left in `root`. A save that is on its way has such a name too."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _LITTER.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def sweep(root: Path, names: Iterable[str] | None = None) -> list[str]:
    """Remove what killed saves of earlier processes left in `root`, or only these `names` of it; what went."""
    return [name for name in (litter(root) if names is None else names) if delete_step(root / name)]


def delete_step(path: Path) -> bool:
    """Delete a step, or what was to become one. It first loses its name, at once or not at all: a kill in between
    leaves litter and no half step, and another job may be about to commit it in this very moment. False, and a line in
    the log, where the disk refuses: it is still there, or it is litter, whose files stay since the name may come back.
    """
    aside = temporary_path(path)
    try:
        path.rename(aside)
        sync_directory(path.parent)  # or a power cut could bring back the name, and a part of the files
    except OSError as error:
        _log.warning("%s was not deleted: %s", path, error.strerror)
        return False
    remove(aside)
    return True


def remove(path: Path) -> None:
    """Remove a file or a folder that is no step; a line in the log where the disk refuses."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_unless_gone)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s was left behind and may be deleted: %s", path, error.strerror)


def _unless_gone(_call: object, _path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Who gave up a save and the thread that was left to itself may remove the same at once."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]
