"""The preload shim `shim.c`: built once, then armed in a process that was started with it.

A program is started with what `build` makes as LD_PRELOAD. In it, or in a child that it forks, `watch` names the
directory, and each `Rule` says what becomes of which call. Operations: create, empty (open with truncation), write,
truncate, copy, fsync, fsyncdir, close (of a file that was open for writing), mkdir, rmdir, unlink, rename, link;
and read, which is counted only where a rule asks for it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@dataclass(frozen=True)
class Rule:
    """What happens at a call.

    act:      kill (this process), group (its process group), parent (the process that started it; the call goes on),
              cut (the power of the file system, then the group), freeze (the file system: this call and all others
              wait until it is thawed), stop (SIGSTOP), errno=N, delay=MILLISECONDS,
              signal=N (to this process), signals=N (to its process group); the call goes on,
              hang (the call waits until `release`),
              torn (half of the bytes are written, then it is killed), short (half of the bytes are written),
              skip (the call does nothing and says it did)
    k:        at which call, counted from 1
    onwards:  and at all later ones
    ops:      which operations are counted; none: all
    part:     only those of a path that has this in it
    """

    act: str
    k: int = 1
    onwards: bool = False
    ops: tuple[str, ...] = ()
    part: str = ""


@dataclass(frozen=True)
class Change:
    """One recorded call.

    path:   below the watched directory; of a rename or link the new name
    other:  of a rename or link the old name
    data:   the bytes of a write, `offset` where they went
    """

    pid: int
    op: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


def build(directory: Path) -> Path:
    """Compile the shim into that directory."""
    assert COMPILER is not None, "no C compiler"
    built = directory / "shim.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE)], check=True)
    return built


def watch(
    directory: Path, rules: Sequence[Rule], counters: Path, trace: Path | None = None, mount: Path | None = None
) -> None:
    """In a process that has the shim: count, record and break changes below `directory` from now on.

    counters:  a file name; with a number at its end, the file in which a rule's calls are counted
    trace:     where changes are recorded
    mount:     whose power the act "cut" cuts
    """
    shim = ctypes.CDLL(None)
    problem = shim.fault_watch(*(None if path is None else os.fsencode(path) for path in (directory, trace, mount)))
    for slot, rule in enumerate(rules):
        ops = f",{','.join(rule.ops)}," if rule.ops else ""
        counter = os.fsencode(f"{counters}{slot}")
        onwards, k = int(rule.onwards), ctypes.c_long(rule.k)
        problem |= shim.fault_rule(slot, ops.encode(), rule.part.encode(), k, onwards, rule.act.encode(), counter)
    if problem:
        raise OSError(problem, os.strerror(problem))


def mark(word: str) -> None:
    """Put a word into the trace, as a change of the kind "mark"."""
    ctypes.CDLL(None).fault_mark(word.encode())


def counted(counters: Path, slot: int = 0) -> int:
    """How many calls a rule has seen."""
    path = Path(f"{counters}{slot}")
    content = path.read_bytes() if path.exists() else b""
    value: int = struct.unpack("qq", content)[0] if content else 0  # empty: it is just being made
    return value


def release(counters: Path, slot: int = 0) -> None:
    """Let what hangs by a rule go on."""
    with Path(f"{counters}{slot}").open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("q", 1))


def read_trace(path: Path) -> list[Change]:
    """What was recorded, in order."""
    content, changes, at = path.read_bytes(), [], 0
    while at < len(content):
        end = content.index(b"\n", at)
        pid, op, size, offset, place, other = content[at:end].decode().split("\t")
        at = end + 1 + int(size)
        changes.append(Change(int(pid), op, place, other, int(offset), content[end + 1 : at]))
    return changes
