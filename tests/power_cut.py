"""A program for tests: the power fails before every change that a save makes on an ext4 file system.

Run it as root in a mount namespace of its own (`unshare -m`), with an empty directory, where it makes file systems in
image files and mounts them. A power cut is ext4's shutdown ioctl without a flush: what was not synced is lost, names
and bytes alike. It prints, as JSON, for each cut: whether the saver was still at work, the step that it had been told
was saved, and the newest whole step after the file system was mounted again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from save_loop import before_change, die, save_steps
from tiny_engine import disk_is_at, trained

from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.steps import newest_good

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_FLUSH = 2
IMAGE_BYTES = 8 << 20


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def cut_power(at: Path) -> None:
    fd = os.open(at, os.O_RDONLY)
    fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_FLUSH))
    die()


def save_until_cut(at: Path, root: Path, ack: Path, change: int) -> bool:
    """Save one step in a child and cut the power before that change, or once it has ended; whether it was cut short."""
    pid = os.fork()
    if pid == 0:
        before_change(change, root, lambda: cut_power(at))
        save_steps(root, ack, 1)
        cut_power(at)
    os.waitpid(pid, 0)
    return not ack.read_text()


def newest_whole(root: Path) -> int:
    newest = newest_good(root, ("actor", "critic"))
    if newest.good is None:
        return 0
    path = newest.good.path
    whole = not check_files(path, read_manifest(path), deep=True) and disk_is_at(path, newest.good.step)
    return newest.good.step if whole else -1


def main() -> None:
    base = Path(sys.argv[1])
    template, image, at, ack = base / "template", base / "image", base / "at", base / "ack"
    root = at / "run"
    at.mkdir()
    with template.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(template)], check=True)
    with mounted(template, at):
        trained(root, 1, 2)
    found = []
    # Each cut that leaves the same picture as its neighbours says little, so not every change is tried.
    for change in range(1, 200, 5):
        shutil.copyfile(template, image)
        ack.write_text("")
        with mounted(image, at):
            cut_short = save_until_cut(at, root, ack, change)
        with mounted(image, at):
            found.append((cut_short, 2 if cut_short else int(ack.read_text()), newest_whole(root)))
        if not cut_short:
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main()
