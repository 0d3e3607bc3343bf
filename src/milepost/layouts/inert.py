"""What a pickle becomes here: inert values, which a pickle may hold and cannot alter.

References to tensors and storages, records of the objects of known classes, and numpy arrays while they are being
built. Which name of a pickle becomes which of them is the table of `milepost.layouts.pickles`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from milepost.errors import DamagedError, RefusedError
from milepost.index import Shape


class _Fixed:
    """What a pickle may hold and must not alter: its BUILD, which sets the state of an object, is refused.

    Dataclasses of this kind name their `__slots__` themselves: with `slots=True`, a frozen one gets a `__setstate__`
    that sets its fields.
    """

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise RefusedError(f"its pickle tries to alter a {type(self).__name__}")


@dataclass(frozen=True)
class StorageRef(_Fixed):
    """One storage of a torch archive: element type, record key, and number of elements."""

    __slots__ = ("dtype", "key", "numel")

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class TensorRef(_Fixed):
    """A tensor as a view of a storage: strides and offset count elements."""

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")

    dtype: str
    shape: Shape
    strides: Shape
    storage: StorageRef
    offset: int


class SealedType(type):
    """The type of record types: a pickle cannot set their attributes."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise RefusedError(f"its pickle tries to set {name} on {cls.__name__}")


class Record(metaclass=SealedType):
    """Stand-in for an object of a known class: its class name, constructor arguments and state, and no behaviour."""

    __slots__ = ("args", "state")
    kind = "?"

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args = args
        record.state = None
        return record

    def __init__(self, *args: Any) -> None:
        """Takes what its class took; see `args`."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """The attributes that its state would set: an instance dictionary, slots, or both. Not to be altered."""
        if type(self.state) is dict:
            return self.state
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        merged: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update(part)
        return merged

    def field(self, name: str) -> Any:
        """One attribute; raises DamagedError where it is not there."""
        fields = self.fields()
        if name not in fields:
            raise DamagedError(f"a {self.kind} without {name}")
        return fields[name]


class Sealed(_Fixed):
    """A function that a pickle may call and not alter."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise RefusedError(f"its pickle tries to set {name} on a function")


def check_key(key: Any) -> None:
    """Raise RefusedError for what may not be a key: tuples nested deep or without end, whose hash would not return, and
    numbers beyond any use, which can be chosen to share one hash."""
    if type(key) is tuple:
        level, count = [key], 0
        for _ in range(_KEY_DEPTH):
            count += len(level)
            level = [part for inner in level for part in inner if type(part) is tuple] if count <= _KEY_PARTS else level
            if not level:
                return
        raise RefusedError("its pickle uses a tuple of tuples, nested deep, as a key")
    if type(key) is int and key.bit_length() > _KEY_BITS:
        raise RefusedError(f"its pickle uses a number of {key.bit_length()} bits as a key")


_KEY_DEPTH = 8
_KEY_PARTS = 1000  # tuples of a key
_KEY_BITS = 60  # up to here a number is its own hash


class PlainDict(dict[Any, Any]):
    """A dictionary of a pickle, which looks at a key before it hashes it; the attributes of an OrderedDict (torch puts
    `_metadata` there) are dropped."""

    __slots__ = ()

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__()
        for key, value in items.items() if isinstance(items, PlainDict) else items:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            check_key(key)
        super().__setitem__(key, value)

    def __setstate__(self, state: object) -> None:
        """Attributes of a dictionary carry no tensors."""


class PlainSet:
    """A set of a pickle, which looks at a member before it hashes it. No subclass of set: the unpickler would fill such
    a one by itself."""

    __slots__ = ("value",)

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.value: set[Any] = set()
        for item in items:
            self.add(item)

    def add(self, item: Any) -> None:
        """Add a member: what the unpickler calls."""
        check_key(item)
        self.value.add(item)

    def __setstate__(self, state: object) -> NoReturn:
        raise RefusedError("its pickle tries to alter a set")


@dataclass(frozen=True)
class StorageType(_Fixed):
    """The class of a storage: its element type."""

    __slots__ = ("dtype",)

    dtype: str


_NUMBER_TYPE = re.compile(r"[biufc][0-9]{1,2}")


class Array:
    """A numpy array while it is being built: `reconstruct` makes it, BUILD fills it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes):
            raise DamagedError("a numpy array of objects")
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.value = np.array(np.frombuffer(data, dtype.value()).reshape(ints(shape), order=order))


class ArrayType:
    """A numpy element type while it is being built: letters, then BUILD names the byte order."""

    __slots__ = ("letters", "order")

    def __init__(self, letters: object, *_: object) -> None:
        self.letters = letters
        self.order = ""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"

    def value(self) -> np.dtype[Any]:
        """The element type, of numbers or booleans. Only those letters: numpy reads others as a small language."""
        if not isinstance(self.letters, str):
            raise DamagedError("a numpy type that is no text")
        if not _NUMBER_TYPE.fullmatch(self.letters):
            raise RefusedError(f"a numpy array of type {shown(self.letters)}")
        return np.dtype(self.order + self.letters)


def scalar(dtype: Any, data: bytes) -> Any:
    """A numpy number as Python's."""
    return np.frombuffer(data, dtype.value())[0].item()


def reconstruct(*_: Any) -> Array:
    """An empty array, which BUILD fills."""
    return Array()


def shown(name: str) -> str:
    """A name from a file, fit for a line of a message."""
    short = name if len(name) <= 100 else name[:100] + "..."
    return short if short.isprintable() else ascii(short)


def ints(values: Any) -> Shape:
    """A sequence of sizes. DamagedError for anything else."""
    if not isinstance(values, tuple | list):
        raise DamagedError("a shape that is no sequence of sizes")
    for value in values:  # a loop: this is called three times a tensor
        if not isinstance(value, int) or value < 0:
            raise DamagedError("a shape that is no sequence of sizes")
    return tuple(values)
