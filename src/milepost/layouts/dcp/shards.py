"""Shards of torch DCP in safetensors form, as `HuggingFaceStorageWriter(save_distributed=True)` writes them.

    shard-{rank + 1}-model-{i}-of-{n}.safetensors   the parts of one rank; its `__metadata__` holds DCP_SHARDING_INFO,
                                                    JSON: name -> {"saved_offsets": where the part begins}

Nothing says the global shapes: a tensor reaches as far as its parts do. If the files of the last ranks are missing, its
tail is missing without a sign, and only the shapes that config.json asks for tell. Facts: torch 2.13,
`torch/distributed/checkpoint/{hf_storage,_hf_utils}.py`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError
from milepost.index import Box, Chunk, TensorEntry
from milepost.layouts.huggingface import read_safetensors

_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_INFO = "DCP_SHARDING_INFO"
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def holds_shards(directory: Path) -> bool:
    """Whether such shards lie here, by names alone."""
    return directory.is_dir() and any(_SHARD.fullmatch(path.name) for path in directory.iterdir())


def read_shards(directory: Path) -> tuple[dict[str, TensorEntry], tuple[Path, ...]]:
    """Entries by name, and the files. Raises IncompleteError where parts, or ranks before the last, are missing."""
    files = _files(directory)
    parts: dict[str, dict[Box, Chunk]] = {}
    dtypes: dict[str, str] = {}
    for name, dtype, chunk in _parts(files):
        if dtypes.setdefault(name, dtype) != dtype:
            raise DamagedError(f"{chunk.source.file}: {name} is {dtype}, {dtypes[name]} in another shard")
        parts.setdefault(name, {}).setdefault(chunk.box, chunk)
    entries = {}
    for name, chunks in parts.items():
        dims = range(len(next(iter(chunks)).sizes))
        if any(len(box.sizes) != len(dims) for box in chunks):
            raise DamagedError(f"{directory}: the shards disagree about the dimensions of {name}")
        shape = tuple(max(box.offsets[d] + box.sizes[d] for box in chunks) for d in dims)
        entries[name] = TensorEntry(dtypes[name], shape, tuple(c for box, c in chunks.items() if box.volume))
        try:
            entries[name].check_tiling(name)
        except IncompleteError as error:
            raise IncompleteError(f"{directory}: {error}; a rank's shard is missing") from None
    return entries, tuple(files)


def replicas(directory: Path) -> Iterator[tuple[str, str, Chunk, Chunk]]:
    """Further copies of a part: name, element type, the chunk that `read_shards` takes, the other."""
    first: dict[tuple[str, Box], Chunk] = {}
    for name, dtype, chunk in _parts(_files(directory)):
        kept = first.setdefault((name, chunk.box), chunk)
        if kept is not chunk and chunk.box.volume:
            yield name, dtype, kept, chunk


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _SHARD.fullmatch(path.name))


def _parts(files: Iterable[Path]) -> Iterator[tuple[str, str, Chunk]]:
    """Name, element type and chunk of each part."""
    for path in files:
        offsets = _offsets(path)
        for name, entry in read_safetensors(path).items():
            begin = offsets.get(name)
            if begin is None or len(begin) != len(entry.shape) or not all(type(n) is int and n >= 0 for n in begin):
                raise DamagedError(f"{path}: {name} does not say where in its tensor it begins")
            yield name, entry.dtype, Chunk(Box(tuple(begin), entry.shape), entry.chunks[0].source)


def _offsets(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if 8 + length > path.stat().st_size:
            raise DamagedError(f"{path}: too short for its own header; it was truncated")
        try:
            info = json.loads(json.loads(file.read(length))["__metadata__"][_INFO])
            return {name: value["saved_offsets"] for name, value in info.items()}
        except _MALFORMED as error:
            raise DamagedError(f"{path}: does not say where its parts belong ({error})") from None
