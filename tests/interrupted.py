"""A program for tests: a writer of a directory is stopped, or killed, before each line that `jobs.output` runs.

    python interrupted.py FOLDER

A process of its own, since each kill takes a fork. It fails where a directory is found half written, or where something
stays that the next writer does not clear away.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from milepost.errors import WriteError
from milepost.jobs import output

FILES = ("config.json", "model.safetensors")


def write(target: Path, text: str) -> None:
    with output.output_directory(target, overwrite=True) as building:
        for name in FILES:
            (building / name).write_text(text)


def read(target: Path) -> str:
    """What all files of a whole directory say."""
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    (text,) = {(target / name).read_text() for name in FILES}
    return text


def at_line(number: int, act: Callable[[], None], *modules: ModuleType) -> Callable[..., Any]:
    """A tracer that acts before the line of that number which the modules run."""
    files = [module.__file__ for module in modules]
    left = [number]

    def local(_frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                act()
        return local

    return lambda frame, event, _: local if frame.f_code.co_filename in files else None


def stop() -> None:
    raise KeyboardInterrupt


def stopped_at(number: int, target: Path) -> bool:
    """Write, with Ctrl-C before that line; whether there was such a line."""
    sys.settrace(at_line(number, stop, output, shutil))
    try:
        write(target, "new")
    except (KeyboardInterrupt, WriteError):  # of shutil, which may then close a descriptor twice
        return True
    finally:
        sys.settrace(None)
    return False


def killed_at(number: int, target: Path) -> bool:
    """The same with the end of the process, after which nothing is cleared up."""
    child = os.fork()
    if not child:
        sys.settrace(at_line(number, lambda: os._exit(9), output))
        write(target, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def sweep(folder: Path, end: Callable[[int, Path], bool], exchange: bool) -> None:
    lines, seen, left = 0, set(), Counter[str]()
    while True:
        target = folder / str(lines) / "out"
        write(target, "old")
        if not end(lines + 1, target):
            break
        lines += 1
        left.update(path.suffix for path in target.parent.iterdir() if path != target)
        if exchange or target.exists():
            seen.add(read(target))
        write(target, "newer")
        assert read(target) == "newer" and list(target.parent.iterdir()) == [target]
    assert lines > 30 and seen == {"old", "new"} and read(target) == "new", (lines, seen)
    if end is stopped_at:
        # A lock file may stay, empty and guarding nothing once its process has gone; and a directory, where Ctrl-C
        # comes in the three lines before the call that removes it.
        assert left[".tmp"] <= 3 and left[".old"] <= (0 if exchange else 4), left


def main(folder: Path) -> None:
    os.fsync = lambda _: None  # no power is cut here
    real = output._exchange
    for exchange in (True, False):
        # Without: as on a file system that cannot, where the old one has another name for a moment.
        output._exchange = real if exchange else lambda *_: False
        for end in (stopped_at, killed_at):
            sweep(folder / f"{end.__name__}{exchange}", end, exchange)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
