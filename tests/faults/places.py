"""File systems of one's own, in the mount namespace of the savers' program: cut off from power, frozen, or read-only.

They are mounted for the savers alone and vanish with them. This process sees them below `/proc/<pid>/root`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.savers import Savers

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
NO_FLUSH = 2
THAW = 0xC0045878  # FITHAW
IMAGE_BYTES = 8 << 20


def why_not() -> str:
    """Why file systems cannot be mounted here; empty where they can."""
    if os.geteuid():
        return "mounting a file system needs root"
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        return "needs mkfs.ext4 and loop devices"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        return "needs mount namespaces"
    return ""


def make_image(image: Path) -> None:
    """An empty ext4 file system in a file."""
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)


@contextmanager
def mounted(savers: Savers, image: Path, at: Path) -> Iterator[Path]:
    """The image, mounted at `at` for the savers; yields where this process sees it."""
    inside = ["nsenter", "-m", "-t", str(savers.pid)]
    at.mkdir(exist_ok=True)
    subprocess.run([*inside, "mount", "-o", "loop", str(image), str(at)], check=True)
    try:
        yield Path(f"/proc/{savers.pid}/root{at}")
    finally:
        subprocess.run([*inside, "umount", str(at)], check=True)


def cut_power(seen: Path) -> None:
    """Shut a file system down as a power cut would: nothing that was not flushed gets to the disk any more."""
    with _directory(seen) as fd:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_FLUSH))


def read_only(savers: Savers, at: Path) -> None:
    """Let the file system take no more changes, as after an error of the disk."""
    inside = ["nsenter", "-m", "-t", str(savers.pid)]
    subprocess.run([*inside, "mount", "-o", "remount,ro", str(at)], check=True)


def thaw(seen: Path) -> None:
    """Let a frozen file system go on. While it is frozen, whoever changes it waits, and not even SIGKILL ends the wait:
    as where a server is gone."""
    with _directory(seen) as fd, contextlib.suppress(OSError):
        fcntl.ioctl(fd, THAW, 0)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)
