"""A look over a pickle's instructions before it is unpickled, and what of them must be done otherwise.

Python's unpickler makes room for as many memo slots as the largest index that a PUT names, so that eight bytes can
claim 64 GiB, and for as many bytes as a length says, whether they follow or not. A pickle written by a program numbers
its slots in order, so no index reaches the number of its bytes.

It also hashes whatever is to be a key, and the hash of a tuple calls itself for what the tuple holds, without an end:
a megabyte of nested tuples overflows the stack and ends the process, and sixty bytes of shared ones take for ever. So
dictionaries and sets are not made by its instructions but by our `persistent_load`, which hands out ones that look at
a key first. Instructions and their arguments: `pickletools`.
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
A_DICT, A_SET = None, True
"""The persistent ids for which `persistent_load` hands out an empty dictionary and an empty set."""
_INSTEAD: Mapping[int, tuple[int, bytes]] = MappingProxyType(
    {
        ord("}"): (1, b"NQ"),  # EMPTY_DICT: push None, BINPERSID
        ord("("): (2, b"NQ"),  # MARK, DICT: an empty one in protocol 0
        0x8F: (1, b"\x88Q"),  # EMPTY_SET: push True, BINPERSID
        0x95: (9, b""),  # FRAME: its length is no longer true, and an unpickler does without
    }
)
"""Instruction -> how many bytes of the pickle to replace, and by what."""
_AT_ONCE: Mapping[int, str] = MappingProxyType({ord("d"): "dictionary", 0x91: "frozen set"})


def harmless(data: bytes) -> bytes:
    """The same pickle, its dictionaries and sets made by `persistent_load`.

    Raises unless every length lies within the pickle and no memo index is beyond its size in bytes: RefusedError for an
    index, and for instructions that make a dictionary or a frozen set of what lies on the stack, DamagedError for a
    pickle that ends early or holds an unknown instruction.
    """
    match = _run_of_fixed_length(len(data)).match
    parts: list[bytes] = []
    position = 0
    while position < len(data):
        found = match(data, position)
        if found:
            parts.append(found[0])
            position = found.end()
            continue
        instruction = data[position]
        if instruction in _INSTEAD:
            length, written = _INSTEAD[instruction]
            parts.append(written)
            position += length
            continue
        if instruction == _STOP:
            return b"".join((*parts, b"."))
        if instruction in _PUTS and position + 5 <= len(data):
            raise RefusedError("its pickle claims more memory than it can need")
        if instruction in _AT_ONCE:
            raise RefusedError(f"its pickle makes a {_AT_ONCE[instruction]} at once")
        width = _LENGTH_BYTES.get(instruction)
        if width is None:
            raise DamagedError(f"its pickle cannot be read: byte {position} begins no whole instruction")
        begin, argument = position, position + 1 + width
        position = argument + int.from_bytes(data[begin + 1 : argument], "little")
        parts.append(data[begin:position])
    raise DamagedError("its pickle ends before it is whole")


@lru_cache(maxsize=64)
def _run_of_fixed_length(size: int) -> re.Pattern[bytes]:
    """Instructions whose length needs no reading, up to a thousand of them, in a pickle of `size` bytes.

    The extension codes of `copyreg` are none of them: what this process registered is no business of a file.
    """
    high = b"..[\\x00-\\x%02x]\\x00" % (size >> 16) if size < 1 << 24 else b"...[\\x00-\\x%02x]" % min(size >> 24, 255)
    # The most frequent first. A MARK before DICT is none of them, nor is anything that makes a dictionary or a set.
    return re.compile(
        b"(?s:"
        + b"|".join(
            (
                rb"r" + high,
                rb"[\x80Khq].",
                rb"[\x29\x30-\x32\x4e\x51\x52\x5d\x61\x62\x65\x6c\x6f\x73-\x75\x81\x85-\x89\x90\x92-\x94\x97\x98]",
                rb"\x28(?!d)",
                rb"M..",
                rb"[Jj]....",
                rb"G.{8}",
                rb"[FILPSVg][^\n]*\n",
                rb"[ci][^\n]*\n[^\n]*\n",
                rb"p[0-9]{1,6}\n",
            )
        )
        + rb"){1,1000}+"
    )
