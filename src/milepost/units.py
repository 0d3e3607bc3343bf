"""Sizes in bytes as people write them; `milepost.wording` is the other way round."""

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
