"""A look over a pickle's instructions before it is unpickled: does it stay in proportion to its size?

Python's unpickler makes room for as many memo slots as the largest index that a PUT names, so that eight bytes can
claim 64 GiB, and for as many bytes as a length says, whether they follow or not. A pickle written by a program numbers
its slots in order, so no index reaches the number of its bytes. Instructions and their arguments: `pickletools`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from milepost.errors import DamagedError, RefusedError

_STOP = ord(".")
_LENGTH_BYTES: Mapping[int, int] = MappingProxyType(
    {
        **dict.fromkeys(b"CU\x8a\x8c", 1),  # bytes, texts and integers with a length of 1 byte before them
        **dict.fromkeys(b"BTX\x8b", 4),
        **dict.fromkeys(b"\x8d\x8e\x96", 8),
    }
)
_PUTS = b"pr"


def check_proportion(data: bytes) -> None:
    """Raise unless every length lies within the pickle and no memo index is beyond its size in bytes.

    RefusedError for an index, DamagedError for a pickle that ends early or holds an unknown instruction.
    """
    run = _run_of_fixed_length(len(data))
    position = 0
    while position < len(data):
        found = run.match(data, position)
        if found:
            position = found.end()
            continue
        instruction = data[position]
        if instruction == _STOP:
            return
        if instruction in _PUTS and position + 5 <= len(data):
            raise RefusedError("its pickle claims more memory than it can need")
        width = _LENGTH_BYTES.get(instruction)
        if width is None:
            raise DamagedError(f"its pickle cannot be read: byte {position} begins no whole instruction")
        position += 1 + width
        position += int.from_bytes(data[position - width : position], "little")
    raise DamagedError("its pickle ends before it is whole")


@lru_cache(maxsize=64)
def _run_of_fixed_length(size: int) -> re.Pattern[bytes]:
    """Instructions whose length needs no reading, up to a thousand of them, in a pickle of `size` bytes.

    The extension codes of `copyreg` are none of them: what this process registered is no business of a file.
    """
    high = b"..[\\x00-\\x%02x]\\x00" % (size >> 16) if size < 1 << 24 else b"...[\\x00-\\x%02x]" % min(size >> 24, 255)
    return re.compile(
        b"(?s:"
        + b"|".join(
            (
                rb"[\x28\x29\x30-\x32\x4e\x51\x52\x5d\x61\x62\x64\x65\x6c\x6f\x73-\x75\x7d\x81\x85-\x89\x8f-\x94\x97\x98]",
                rb"[\x80Khq].",
                rb"M..",
                rb"[Jj]....",
                rb"[\x95G].{8}",
                rb"[FILPSVg][^\n]*\n",
                rb"[ci][^\n]*\n[^\n]*\n",
                rb"p[0-9]{1,6}\n",
                rb"r" + high,
            )
        )
        + rb"){1,1000}"
    )
