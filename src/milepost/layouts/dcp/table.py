"""`.metadata` of a torch DCP folder, written without torch: the inverse of `milepost.layouts.dcp.metadata`.

Facts: torch 2.6 to 2.13, `torch/distributed/checkpoint/{metadata,filesystem}.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.index import Box, Shape
from milepost.layouts.pickling import Call, Global, Instance, Pairs, dumps

_DCP = "torch.distributed.checkpoint"
_CONTIGUOUS = 0  # torch's number of the memory format


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a key's tensor, and the archive that holds it: file, first byte, length in bytes."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(slots=True)
class Tensor:
    """A key's tensor: element type, global shape, its parts."""

    dtype: str
    shape: Shape
    parts: list[Part] = field(default_factory=list)


def table_of_contents(tensors: Mapping[str, Tensor], objects: Iterable[tuple[str, str, int, int]]) -> bytes:
    """The whole file. objects: key, file, first byte and length in bytes of what is no tensor."""
    described: dict[str, Instance] = {}
    stored: list[tuple[Instance, Instance]] = []
    for key, tensor in tensors.items():
        described[key] = _made(
            "metadata.TensorStorageMetadata",
            {
                "properties": _properties(tensor.dtype),
                "size": _size(tensor.shape),
                "chunks": [
                    _made(
                        "metadata.ChunkStorageMetadata",
                        {"offsets": _size(part.box.offsets), "sizes": _size(part.box.sizes)},
                    )
                    for part in tensor.parts
                ],
            },
        )
        stored += [_stored(key, _size(part.box.offsets), part.file, part.start, part.length) for part in tensor.parts]
    for key, file, start, length in objects:
        described[key] = _made("metadata.BytesStorageMetadata", {})
        stored.append(_stored(key, None, file, start, length))
    state = {
        "state_dict_metadata": described,
        "planner_data": {key: (key,) for key in described},
        "storage_data": Pairs(tuple(stored)),
    }
    return dumps(_made("metadata.Metadata", state))


def _made(kind: str, state: Any) -> Instance:
    module, _, name = kind.rpartition(".")
    return Instance(Global(f"{_DCP}.{module}", name), state)


def _size(sizes: Shape) -> Call:
    return Call(Global("torch", "Size"), (sizes,))


def _properties(dtype: str) -> Instance:
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Global(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,))
    return _made("metadata.TensorProperties", (Global("torch", dtype), strided, False, memory_format, False))


def _stored(key: str, offset: Call | None, file: str, start: int, length: int) -> tuple[Instance, Instance]:
    index = _made("metadata.MetadataIndex", {"fqn": key, "offset": offset, "index": None})
    return index, _made("filesystem._StorageInfo", {"relative_path": file, "offset": start, "length": length})
