"""Writing a model as safetensors files, box by box, in any order and from several threads.

The writer lays out every file before a byte of tensor data is there: header, then each tensor at its offset. It is a
sink for transfers (`milepost.transfer.Sink`): it tells where in which file a box belongs, and the mover puts it there.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from milepost.errors import CheckpointError
from milepost.fileio import write_exactly
from milepost.index import Bits, Box, Shape, TensorEntry, contiguous_strides, itemsize
from milepost.layouts.huggingface import WEIGHTS, WEIGHTS_INDEX, header_bytes
from milepost.layouts.new_files import new_files


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the output: open file, byte offset, element type, shape."""

    fd: int
    offset: int
    dtype: str
    shape: Shape


def assign_shards(tensors: Mapping[str, TensorEntry], max_shard_size: int) -> list[list[str]]:
    """Names of each file's tensors, in order; only a single tensor may make a file pass `max_shard_size` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in tensors.items():
        if shards[-1] and size + entry.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.nbytes
    return shards


def shard_files(tensors: Mapping[str, TensorEntry], max_shard_size: int) -> dict[str, list[str]]:
    """The output files by name, in order, and the names of the tensors in each."""
    shards = assign_shards(tensors, max_shard_size)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, 1)}


class SafetensorsWriter:
    """The safetensors files of one model in `directory`, open for writing; a context manager.

    tensors:  name -> what is to be written (only dtype and shape count)
    only:     the files that this process writes, where others write the rest; all of them by default

    Leaving the context well flushes the files to disk; a directory left with an error holds incomplete files, and is
    the caller's to remove. The index of the weights comes with the first file.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, TensorEntry],
        max_shard_size: int,
        only: Container[str] | None = None,
    ) -> None:
        self._places: dict[str, Place] = {}
        shards = shard_files(tensors, max_shard_size)
        mine = {file: names for file, names in shards.items() if only is None or file in only}
        heads = {
            file: header_bytes((name, tensors[name].dtype, tensors[name].shape) for name in mine[file]) for file in mine
        }
        sizes = {
            file: len(heads[file][0]) + sum(tensors[name].nbytes for name in names) for file, names in mine.items()
        }
        with ExitStack() as stack:
            files = stack.enter_context(new_files(directory, sizes))
            for file, (head, offsets) in heads.items():
                write_exactly(files[file], head, 0)
                for name in mine[file]:
                    self._places[name] = Place(files[file], offsets[name], tensors[name].dtype, tensors[name].shape)
            if len(shards) > 1 and next(iter(shards)) in mine:
                weight_map = {name: file for file, names in shards.items() for name in names}
                total = sum(entry.nbytes for entry in tensors.values())
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (directory / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            self._open = stack.pop_all()

    def dtype(self, name: str) -> str:
        """The element type in which the tensor is written."""
        return self._places[name].dtype

    def file_range(self, name: str, box: Box) -> tuple[int, int]:
        """File descriptor and byte offset of a box, which must be one run of the tensor in row-major order."""
        place = self._places[name]
        strides = contiguous_strides(place.shape)
        # A run of bytes may cut the first dimension longer than 1; every dimension after it must be whole.
        first = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(box.sizes))
        if box.sizes[first + 1 :] != place.shape[first + 1 :]:
            raise CheckpointError(f"{name}: box {box} is not one run of bytes of shape {list(place.shape)}")
        start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        return place.fd, place.offset + start * itemsize(place.dtype)

    def write(self, name: str, box: Box, bits: Bits) -> NoReturn:
        """Never called: every box has its place in a file."""
        raise AssertionError(f"{name}{box} should go to its file range")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def with_dtype(config: Mapping[str, Any], dtype: str, nested: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The config with its element type made true, under the names it uses (`dtype`, or `torch_dtype` before
    transformers 5), nested configs alike; `nested` names those with a type of their own: key -> element type."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            changed[key] = dtype
        elif isinstance(value, Mapping):
            changed[key] = with_dtype(value, (nested or {}).get(key, dtype))
        else:
            changed[key] = value
    return changed
