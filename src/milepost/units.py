"""Sizes in bytes and durations, as people write and read them."""

from __future__ import annotations

import re

from milepost.errors import CallError

_FACTORS = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "KIB": 2**10,
    "M": 10**6, "MB": 10**6, "MIB": 2**20,
    "G": 10**9, "GB": 10**9, "GIB": 2**30,
    "T": 10**12, "TB": 10**12, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """ "5GB" -> 5_000_000_000, "1GiB" -> 1_073_741_824, "4096" -> 4096. Raises CallError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise CallError(f"{text!r} is no size; write for instance 512MB, 5GB or 1GiB")
    return int(float(match[1]) * factor)


def format_bytes(count: float) -> str:
    """1_980_000_000 -> "1.98 GB"; decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_seconds(seconds: float) -> str:
    """0.123 -> "0.12 s", 75 -> "1 min 15 s", 7200 -> "2 h 0 min"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
