"""How milepost words bytes, durations, moments, lists of steps and ranks, and what a disk refuses."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from datetime import UTC, datetime


def file_size(count: float) -> str:
    """A number of bytes in decimal units: 999 B, 1.5 kB, 12 MB, 3.4 GB."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while round(value, 1) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{value:.{0 if value >= 9.95 else 1}f} {units[0]}"


def duration(seconds: float) -> str:
    """A duration with its two leading units: 0.42 s, 7.3 s, 48 s, 4 min 10 s, 3 h 12 min, 2 d 5 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.995 or seconds < 0.005 else f"{seconds:.2f} s"
    whole = round(seconds)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            count, rest = whole // size, whole % size // part
            return f"{count} {unit} {rest} {part_unit}" if rest else f"{count} {unit}"
    return f"{whole} s"


def moment(time: float) -> str:
    """Unix seconds as date and time of day in UTC; `an unknown time` beyond the years of the calendar."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `1,500 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ranges(steps: Iterable[int]) -> str:
    """Whole numbers in words: `4`, `4-6`, `4-6, 9`."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named_ranks(ranks: Collection[int]) -> str:
    """`rank 4`, `ranks 0-3, 9`; `nobody` where there is none."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranges(ranks)}" if ranks else "nobody"


def printable(words: str) -> str:
    """Words that come from files, fit for a terminal: no control character reaches it, nor half a surrogate pair its
    encoder."""
    return "".join(char if char.isprintable() else "?" for char in words)


_ELSEWHERE = "choose another place"
_REFUSALS = {
    errno.ENOSPC: ("the disk is full", ""),
    errno.EDQUOT: ("your disk quota is used up", ""),
    errno.EFBIG: ("File too large for the file system or for `ulimit -f`", _ELSEWHERE),
    errno.EMFILE: ("more files than `ulimit -n` lets a process open", "raise it, or make fewer and larger files"),
    errno.ENFILE: ("more files than this machine lets all processes open", "end some that have many open"),
    errno.EROFS: ("the file system is read-only", _ELSEWHERE),
    errno.EACCES: ("no permission to write there", _ELSEWHERE),
    errno.EPERM: ("no permission to write there", _ELSEWHERE),
    errno.EEXIST: ("a file of that name is there already", _ELSEWHERE),
    errno.ENOTDIR: ("a part of the path is a file", _ELSEWHERE),
}


def disk_error(error: OSError, room: str = "make room and try again") -> str:
    """Why something could not be written, and what to do; `room`: what to do where there is no space."""
    why, advice = _REFUSALS.get(error.errno or 0, (None, ""))
    return f"{why}; {advice or room}" if why else f"{error.strerror or error}"
