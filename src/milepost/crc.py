"""CRC-32, the checksum that zip archives carry: every byte of a torch.save file passes through it.

Intel's ISA-L computes it ten times as fast as zlib does, with the processor's carry-less multiplication. `isal` has
wheels for x86_64 and aarch64; elsewhere it may be missing, and zlib gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32", "crc32_of_both"]


def crc32_of_both(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes, from those of each and the length in bytes of the second.

    To append a byte of zeros is a linear map of the 32 bits, so `length` of them are its power (as zlib's
    crc32_combine).
    """
    for power in range(length.bit_length()):
        if length >> power & 1:
            first = _times(_zeros(power), first)
    return first ^ second


_ONE_ZERO_BIT = (0xEDB88320, *(1 << n for n in range(31)))
Matrix = Sequence[int]


@cache
def _zeros(power: int) -> Matrix:
    """What 2 ** power bytes of zeros do."""
    if power:
        return _squared(_zeros(power - 1))
    return _squared(_squared(_squared(_ONE_ZERO_BIT)))


def _times(matrix: Matrix, vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _squared(matrix: Matrix) -> Matrix:
    return [_times(matrix, column) for column in matrix]
