"""Writing the few pickles that torch's files are made of, without torch: the inverse of `milepost.layouts.pickles`.

Python's own pickler imports every class that it names, to see that it is there. Here a name is a name (`Global`).
Protocol 2, which every torch reads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_PROTOCOL = b"\x80\x02"
_STOP = b"."


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a function or class gives for these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made without its constructor and then given a state."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """An id that the reader resolves: torch's storages."""

    id: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict by its items, whose keys may be objects."""

    items: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """The pickle of texts, numbers, booleans, None, tuples, lists and dicts, and of the classes of this module.

    Raises TypeError for anything else.
    """
    writer = _Writer()
    writer.put(value)
    return _PROTOCOL + b"".join(writer.parts) + _STOP


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[str | Global, int] = {}

    def put(self, value: Any) -> None:
        """Append the opcodes that leave `value` on the stack."""
        match value:
            case None:
                self.parts.append(b"N")
            case bool():
                self.parts.append(b"\x88" if value else b"\x89")
            case int():
                self._int(value)
            case float():
                self.parts.append(b"G" + struct.pack(">d", value))
            case str():
                self._once(value, b"X" + struct.pack("<I", len(value.encode())) + value.encode())
            case Global():
                self._once(value, f"c{value.module}\n{value.name}\n".encode())
            case tuple():
                self._many(value)
            case list():
                self._filled(b"]", value, b"e")
            case dict():
                self.put(Pairs(tuple(value.items())))
            case Pairs():
                self._filled(b"}", [each for item in value.items for each in item], b"u")
            case Call():
                self._joined(value.function, value.arguments, b"R")
            case Instance():
                self._joined(value.kind, (), b"\x81")
                self.put(value.state)
                self.parts.append(b"b")
            case Persistent():
                self.put(value.id)
                self.parts.append(b"Q")
            case _:
                raise TypeError(f"no way to write a {type(value).__name__}")

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.parts.append(b"K" + struct.pack("<B", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.parts.append(b"\x8a" + struct.pack("<B", len(data)) + data)

    def _once(self, value: str | Global, opcodes: bytes) -> None:
        """Texts and names come again and again: later ones point at the first."""
        known = self._memo.get(value)
        if known is None:
            known = self._memo[value] = len(self._memo)
            self.parts.append(opcodes + b"r" + struct.pack("<I", known))
        else:
            self.parts.append(b"j" + struct.pack("<I", known))

    def _many(self, values: tuple[Any, ...]) -> None:
        short = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values))
        if short is None:
            self.parts.append(b"(")
        for value in values:
            self.put(value)
        self.parts.append(b"t" if short is None else short)

    def _filled(self, empty: bytes, values: list[Any], fill: bytes) -> None:
        self.parts.append(empty)
        if values:
            self.parts.append(b"(")
            for value in values:
                self.put(value)
            self.parts.append(fill)

    def _joined(self, kind: Global, arguments: tuple[Any, ...], opcode: bytes) -> None:
        self.put(kind)
        self._many(arguments)
        self.parts.append(opcode)
