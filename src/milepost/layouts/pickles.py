"""Unpickling without trust: a pickle is read as data, and whatever it asks to call is looked up in a fixed table.

The table holds three kinds of things, all inert (`milepost.layouts.inert`):

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
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from milepost.errors import DamagedError, RefusedError
from milepost.index import DTYPES
from milepost.layouts.inert import (
    Array,
    ArrayType,
    PlainDict,
    PlainSet,
    Record,
    Sealed,
    SealedType,
    StorageRef,
    StorageType,
    TensorRef,
    ints,
    reconstruct,
    scalar,
    shown,
)
from milepost.layouts.opcodes import A_DICT, A_SET, harmless

__all__ = ["GLOBALS", "SHARDED_TENSOR", "Record", "StorageRef", "TensorRef", "load", "plain", "record_type"]

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


def load(data: bytes, where: str, allowed: Mapping[str, Any] | None = None) -> Any:
    """The object graph of a pickle.

    where:    names its file in errors
    allowed:  what the pickle may name; default: `GLOBALS`
    """
    try:
        return _Unpickler(harmless(data), GLOBALS if allowed is None else allowed).load()
    except RefusedError as error:
        raise RefusedError(f"{where}: {error}; nothing was run. Do not use a file from this source") from None
    except DamagedError as error:
        raise DamagedError(f"{where}: {error}") from None
    except _MALFORMED as error:
        raise DamagedError(
            f"{where}: its pickle cannot be read ({type(error).__name__}: {shown(str(error))})"
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_PYTHON2.get(module, module)}.{name}"
        found = self._allowed.get(full)
        if found is None and full.startswith(_INERT_PACKAGES):
            found = record_type(full)
        if found is None:
            raise RefusedError(f"its pickle asks for {shown(full)}, which no checkpoint needs")
        return found

    def persistent_load(self, pid: Any) -> Any:
        if pid is A_DICT:
            return PlainDict()
        if pid is A_SET:
            return PlainSet()
        tag, kind, key, _location, numel = pid
        known = tag == "storage" and isinstance(kind, StorageType)
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
    if isinstance(value, PlainSet):
        return {_plain(v, read_tensor, budget) for v in value.value}
    if isinstance(value, TensorRef):
        return read_tensor(value)
    if isinstance(value, Array):
        return value.value
    if isinstance(value, Record):
        return {name: _plain(v, read_tensor, budget) for name, v in value.fields().items()}
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray):
        return value
    return str(value)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: str | None = None) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(offset, int):
        raise DamagedError("a tensor without a storage")
    flags = rest[2] if len(rest) > 2 else None
    if flags:
        # A conjugate or negative view holds other values than its bytes say.
        raise RefusedError("a tensor saved as a conjugate or negative view; save a clone of it")
    shape, strides = ints(size), ints(stride)
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


def _attribute(owner: Any, name: Any) -> Any:
    """The one attribute that a checkpoint asks for: in protocol 2, a nested class is written as `getattr` of its outer
    class."""
    if owner is not GLOBALS[SHARDED_TENSOR] or name != "ProcessGroupState":
        raise RefusedError("its pickle asks for builtins.getattr of something that no checkpoint needs")
    return GLOBALS[f"{SHARDED_TENSOR}.ProcessGroupState"]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RefusedError("its pickle asks to encode a text otherwise than in latin1")
    return text.encode("latin1")


_PYTHON2: Mapping[str, str] = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})

_INERT_PACKAGES = ("megatron.",)
"""Packages of which any name becomes a record: the settings that Megatron saves name dozens of its enums, by version.
Like every record it remembers what it was built from, and does nothing."""

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"

_RECORDS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "_io.BytesIO",
    "signal.Signals",
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
    SHARDED_TENSOR,
    f"{SHARDED_TENSOR}.ProcessGroupState",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

_OLDER: Mapping[str, str] = MappingProxyType(
    {
        "torch.distributed._tensor.api.DTensor": "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor": "torch.distributed.tensor.DTensor",
        "torch.distributed._tensor.device_mesh.DeviceMesh": "torch.distributed.device_mesh.DeviceMesh",
        **{
            f"torch.distributed._tensor.{module}.{name}": f"torch.distributed.tensor._dtensor_spec.{name}"
            for module in ("placement_types", "_dtensor_spec")
            for name in ("DTensorSpec", "TensorMeta")
        },
        **{
            f"torch.distributed._tensor.placement_types.{name}": f"torch.distributed.tensor.placement_types.{name}"
            for name in ("Shard", "_StridedShard", "Replicate", "Partial")
        },
        "torch.distributed._tensor.placement_types._Partial": "torch.distributed.tensor.placement_types.Partial",
    }
)
"""Where torch before 2.5 kept the same classes."""

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


def record_type(kind: str) -> type[Record]:
    """The stand-in for a class, named with its module."""
    return cast(type[Record], SealedType(kind.rpartition(".")[2], (Record,), {"__slots__": (), "kind": kind}))


_KINDS: Mapping[str, type[Record]] = MappingProxyType({kind: record_type(kind) for kind in _RECORDS})

GLOBALS: Mapping[str, Any] = MappingProxyType(
    {
        "builtins.getattr": Sealed(_attribute),
        "builtins.set": Sealed(PlainSet),
        "builtins.bytes": Sealed(lambda: b""),  # how protocol 2 writes no bytes
        "collections.OrderedDict": Sealed(PlainDict),
        "torch.Size": Sealed(ints),
        "torch.serialization._get_layout": Sealed(_nothing),
        "torch._utils._rebuild_tensor_v2": Sealed(_tensor),
        "torch._utils._rebuild_tensor_v3": Sealed(_tensor_with_dtype),
        "torch._utils._rebuild_parameter": Sealed(_first),
        "torch._utils._rebuild_parameter_with_state": Sealed(_first),
        "torch._utils._rebuild_wrapper_subclass": Sealed(_nothing),
        "torch._tensor._rebuild_from_type_v2": Sealed(_subclass),
        "_codecs.encode": Sealed(_latin1),
        "numpy.ndarray": Sealed(_nothing),
        "numpy.dtype": Sealed(ArrayType),
        **dict.fromkeys(
            ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"), Sealed(reconstruct)
        ),
        **dict.fromkeys(("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"), Sealed(scalar)),
        **_KINDS,
        **{older: _KINDS[kind] for older, kind in _OLDER.items()},
        **{name: StorageType(dtype) for name, dtype in _STORAGES.items()},
        **{f"torch.{name}": name for name in DTYPES},
    }
)
"""Every global that a checkpoint may name, and what it is taken for here."""
