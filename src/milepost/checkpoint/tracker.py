"""The tracker, `latest_checkpointed_iteration.txt`: the newest step by name, for people and for other programs.

Readers of milepost go by the steps. So the tracker may lag behind, where its saver was stopped or its disk refused, but
it never names a step that is not there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from milepost.checkpoint.files import sync_directory, write_durably
from milepost.checkpoint.litter import temporary_path
from milepost.checkpoint.saving.staged_file import reason
from milepost.checkpoint.steps import TRACKER, read_tracker, step_name
from milepost.errors import WriteError

_log = logging.getLogger(__name__)


def prepare_tracker(root: Path, step: int) -> Path:
    """Write the new tracker beside the old one, before the step appears: no full disk can come between the two."""
    path = temporary_path(root / TRACKER)
    try:
        write_durably(path, str(step).encode())
    except OSError as error:
        raise WriteError(f"{root / TRACKER}: {reason(error)}") from error
    return path


def move_tracker(root: Path, step: int, prepared: Path) -> None:
    """Name the new step in the tracker, unless a newer step that is still there has the name. Where the disk refuses,
    a line in the log says so: the step is committed whatever happens here."""
    try:
        named = read_tracker(root)
        if named is not None and named > step and (root / step_name(named)).exists():
            prepared.unlink()
            return
        prepared.replace(root / TRACKER)
        sync_directory(root)
    except OSError as error:
        _log.warning("%s still names an older step: %s", root / TRACKER, error.strerror)


def mend_tracker(root: Path, step: int) -> None:
    """Let the tracker name a committed step where it names an older one, or none: its saver was stopped right between
    the two."""
    named = read_tracker(root)
    if named is not None and named >= step:
        return
    try:
        move_tracker(root, step, prepare_tracker(root, step))
    except WriteError as error:
        _log.warning("%s still names an older step than %s: %s", root / TRACKER, step, error)
