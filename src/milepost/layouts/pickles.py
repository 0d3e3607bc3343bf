"""Unpickling without trust: a pickle is read as data, and whatever it asks to call is looked up in a fixed table.

The table holds three kinds of things, all inert:

- functions of this module that build references to tensors (`TensorRef`) and small plain values;
- record types: stand-ins for the classes of torch and numpy that occur in checkpoints. They remember what they were
  built from and do nothing;
- names of element types.

Everything else is refused by name (`RefusedError`), before anything is called. The callables are sealed: a pickle
cannot set attributes on them. Facts about which globals occur: `torch.save` of torch 2.6 to 2.13, numpy 1 and 2.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast

import numpy as np

from milepost.errors import DamagedError, RefusedError
from milepost.index import DTYPES, Shape
from milepost.layouts.opcodes import check_proportion

_MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


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


class _SealedType(type):
    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise RefusedError(f"its pickle tries to set {name} on {cls.__name__}")


class Record(metaclass=_SealedType):
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
        """The attributes that its state would set: an instance dictionary, slots, or both."""
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


class PlainDict(dict[Any, Any]):
    """An OrderedDict of a pickle; its attributes (torch puts `_metadata` there) are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Attributes of a dictionary carry no tensors."""


@dataclass(frozen=True)
class _StorageType(_Fixed):
    __slots__ = ("dtype",)

    dtype: str


_NUMBER_TYPE = re.compile(r"[biufc][0-9]{1,2}")


class _Array:
    """A numpy array while it is being built: `_reconstruct` makes it, BUILD fills it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes):
            raise DamagedError("a numpy array of objects")
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.value = np.array(np.frombuffer(data, dtype.value()).reshape(_ints(shape), order=order))


class _ArrayType:
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
            raise RefusedError(f"a numpy array of type {_shown(self.letters)}")
        return np.dtype(self.order + self.letters)


def load(data: bytes, where: str) -> Any:
    """The object graph of a pickle. `where` names its file in errors."""
    try:
        check_proportion(data)
        return _Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except RefusedError as error:
        raise RefusedError(f"{where}: {error}; nothing was run. Do not use a file from this source") from None
    except DamagedError as error:
        raise DamagedError(f"{where}: {error}") from None
    except _MALFORMED as error:
        raise DamagedError(
            f"{where}: its pickle cannot be read ({type(error).__name__}: {_shown(str(error))})"
        ) from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{_PYTHON2.get(module, module)}.{name}"
        found = GLOBALS.get(full)
        if found is None:
            raise RefusedError(f"its pickle asks for {_shown(full)}, which no checkpoint needs")
        return found

    def persistent_load(self, pid: Any) -> StorageRef:
        tag, kind, key, _location, numel = pid
        known = tag == "storage" and isinstance(kind, _StorageType)
        if not (known and isinstance(key, str) and isinstance(numel, int)):
            raise DamagedError("a persistent id that names no storage")
        return StorageRef(kind.dtype, key, numel)


def plain(value: Any, read_tensor: Callable[[TensorRef], Any], limit: int = 1_000_000) -> Any:
    """The graph as plain containers, numbers, strings and numpy arrays; tensors through `read_tensor`.

    Records become dictionaries of their fields. Raises DamagedError beyond `limit` nodes: a few hundred bytes of
    nested shared tuples can otherwise unfold without end.
    """
    budget = iter(range(limit))
    try:
        return _plain(value, read_tensor, budget)
    except (RecursionError, TypeError):
        raise DamagedError("an object graph nested too deep, or with a key that is no plain value") from None


def _plain(value: Any, read_tensor: Callable[[TensorRef], Any], budget: Iterator[int]) -> Any:
    if next(budget, None) is None:
        raise DamagedError("an object graph of more than a million nodes")
    if isinstance(value, dict):
        return {_plain(k, read_tensor, budget): _plain(v, read_tensor, budget) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, read_tensor, budget) for v in value]
    if isinstance(value, tuple):
        return tuple(_plain(v, read_tensor, budget) for v in value)
    if isinstance(value, set):
        return {_plain(v, read_tensor, budget) for v in value}
    if isinstance(value, TensorRef):
        return read_tensor(value)
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, Record):
        return {name: _plain(v, read_tensor, budget) for name, v in value.fields().items()}
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray):
        return value
    return str(value)


def _shown(name: str) -> str:
    """A name from a file, fit for a line of a message."""
    short = name if len(name) <= 100 else name[:100] + "..."
    return short if short.isprintable() else ascii(short)


def _ints(values: Any) -> Shape:
    if not isinstance(values, tuple | list) or not all(isinstance(v, int) and v >= 0 for v in values):
        raise DamagedError("a shape that is no sequence of sizes")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: str | None = None) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(offset, int):
        raise DamagedError("a tensor without a storage")
    flags = rest[2] if len(rest) > 2 else None
    if flags:
        # A conjugate or negative view holds other values than its bytes say.
        raise RefusedError("a tensor saved as a conjugate or negative view; save a clone of it")
    shape, strides = _ints(size), _ints(stride)
    if len(shape) != len(strides) or offset < 0:
        raise DamagedError(f"a tensor of shape {list(shape)}, strides {list(strides)}, offset {offset}")
    return TensorRef(dtype or storage.dtype, shape, strides, storage, offset)


def _tensor_with_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *flags: Any
) -> Any:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedError("a tensor of an unknown type")
    return _tensor(storage, offset, size, stride, grad, hooks, *flags, dtype=dtype)


def _first(value: Any, *_: Any) -> Any:
    return value


def _subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor subclass: one that wraps others (DTensor, ShardedTensor) stays a record of its state."""
    built = function(*args)
    if (
        isinstance(kind, type)
        and issubclass(kind, Record)
        and kind.kind != "torch.Tensor"
        and not isinstance(built, TensorRef)
    ):
        record = kind(*args)
        record.__setstate__(state)
        return record
    return built


def _nothing(*_: Any) -> None:
    return None


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RefusedError("its pickle asks to encode a text otherwise than in latin1")
    return text.encode("latin1")


def _scalar(dtype: Any, data: bytes) -> Any:
    return np.frombuffer(data, dtype.value())[0].item()


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _plain_dict(*items: Any) -> PlainDict:
    return PlainDict(*items)


_PYTHON2: Mapping[str, str] = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})

_RECORDS = (
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Partial",
)

_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "torch.DoubleStorage": "float64",
        "torch.FloatStorage": "float32",
        "torch.HalfStorage": "float16",
        "torch.BFloat16Storage": "bfloat16",
        "torch.LongStorage": "int64",
        "torch.IntStorage": "int32",
        "torch.ShortStorage": "int16",
        "torch.CharStorage": "int8",
        "torch.ByteStorage": "uint8",
        "torch.BoolStorage": "bool",
        "torch.ComplexFloatStorage": "complex64",
        "torch.storage.UntypedStorage": "uint8",
    }
)


def _record_type(kind: str) -> type[Record]:
    return cast(type[Record], _SealedType(kind.rpartition(".")[2], (Record,), {"__slots__": (), "kind": kind}))


GLOBALS: Mapping[str, Any] = MappingProxyType(
    {
        "builtins.set": Sealed(lambda items=(): set(items)),
        "builtins.bytes": Sealed(lambda: b""),  # how protocol 2 writes no bytes
        "collections.OrderedDict": Sealed(_plain_dict),
        "torch.Size": Sealed(_ints),
        "torch.serialization._get_layout": Sealed(_nothing),
        "torch._utils._rebuild_tensor_v2": Sealed(_tensor),
        "torch._utils._rebuild_tensor_v3": Sealed(_tensor_with_dtype),
        "torch._utils._rebuild_parameter": Sealed(_first),
        "torch._utils._rebuild_parameter_with_state": Sealed(_first),
        "torch._utils._rebuild_wrapper_subclass": Sealed(_nothing),
        "torch._tensor._rebuild_from_type_v2": Sealed(_subclass),
        "_codecs.encode": Sealed(_latin1),
        "numpy.ndarray": Sealed(_nothing),
        "numpy.dtype": Sealed(_ArrayType),
        **dict.fromkeys(
            ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"), Sealed(_reconstruct)
        ),
        **dict.fromkeys(("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"), Sealed(_scalar)),
        **{kind: _record_type(kind) for kind in _RECORDS},
        **{name: _StorageType(dtype) for name, dtype in _STORAGES.items()},
        **{f"torch.{name}": name for name in DTYPES},
    }
)
"""Every global that a checkpoint may name, and what it is taken for here."""
