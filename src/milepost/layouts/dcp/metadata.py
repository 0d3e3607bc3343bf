"""The table of contents of a torch DCP folder (`torch.distributed.checkpoint`), read as data.

    .metadata          a bare pickle, written last, by rank 0; `__{rank}.metadata`, one a rank, where the ranks saved
                       without talking to each other
    __{rank}_{i}.distcp  the parts, one after the other; each is a small torch.save archive of its own

`.metadata` says for every key its element type, global shape and boxes (`state_dict_metadata`), for every box a file,
first byte and length (`storage_data`), and, where the state was nested, the path of the key in it (`planner_data`:
`model.x.weight` is `("model", "x.weight")`). Facts: torch 2.13,
`torch/distributed/checkpoint/{metadata,filesystem}.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from milepost.errors import DamagedError, IncompleteError, RefusedError
from milepost.index import DTYPES, Box, ByteSource, Chunk, Shape, TensorEntry, contiguous_strides
from milepost.layouts import pickles
from milepost.layouts.inert import ints
from milepost.layouts.pickles import Record, record_type

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
KeyPath = tuple[str | int, ...]

_RANK_METADATA = re.compile(r"__\d{1,6}\.metadata")
_RANK_DATA = re.compile(r"__(\d{1,6})_\d{1,6}\.distcp")
_MODULE = "torch.distributed.checkpoint"
_ALLOWED: Mapping[str, Any] = MappingProxyType(
    {
        **pickles.GLOBALS,
        **{
            kind: record_type(kind)
            for kind in (
                f"{_MODULE}.metadata.Metadata",
                f"{_MODULE}.metadata.TensorStorageMetadata",
                f"{_MODULE}.metadata.BytesStorageMetadata",
                f"{_MODULE}.metadata.ChunkStorageMetadata",
                f"{_MODULE}.metadata.TensorProperties",
                f"{_MODULE}.metadata._MEM_FORMAT_ENCODING",
                f"{_MODULE}.metadata.MetadataIndex",
                f"{_MODULE}.metadata.StorageMeta",
                f"{_MODULE}.filesystem._StorageInfo",
                # torch before 2.3
                "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
                "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
                # the folder in which it was saved; Python 3.13 names the module otherwise
                "pathlib.PosixPath",
                "pathlib._local.PosixPath",
                # plans, which Megatron notes too
                f"{_MODULE}.planner.SavePlan",
                f"{_MODULE}.planner.WriteItem",
                f"{_MODULE}.planner.WriteItemType",
                f"{_MODULE}.planner.TensorWriteData",
            )
        },
    }
)
"""Every global that a `.metadata` may name: those of any checkpoint, and these records."""


@dataclass(frozen=True, slots=True)
class Span:
    """A torch.save archive inside a file: first byte, and length in bytes."""

    file: Path
    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.start} to {self.start + self.length}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: element type, global shape, and the boxes that tile it, each with the archive that holds it."""

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    tensors, objects:  by key, in the order of the model where the folder tells it
    paths:             where each key stood in the nested state
    metadata:          the files that say so
    data:              the files of the parts
    world_size:        number of ranks that wrote
    replicas:          further copies of a box: key, box, the span that is taken, the other
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Span]
    paths: Mapping[str, KeyPath]
    metadata: tuple[Path, ...]
    data: tuple[Path, ...]
    world_size: int
    replicas: tuple[tuple[str, Box, Span, Span], ...] = ()


def holds_dcp(directory: Path) -> bool:
    """Whether any file of a DCP folder lies here, by names alone."""
    return directory.is_dir() and any(_is_metadata(p.name) or p.name.endswith(DATA_SUFFIX) for p in directory.iterdir())


def read_contents(directory: Path) -> Contents:
    """Read and check the table of contents; no part is read.

    Raises IncompleteError for missing files and parts, DamagedError for a table that contradicts itself or its files,
    RefusedError for a pickle or a path that no checkpoint needs.
    """
    found = sorted(path for path in directory.iterdir() if _is_metadata(path.name) and path.is_file())
    files = [directory / METADATA] if directory / METADATA in found else found
    if not files:
        raise IncompleteError(
            f"{directory}: its {METADATA} is missing; the save did not come to its end, or a copy left out hidden files"
        )
    table = _Table()
    for path in files:
        try:
            _read_table(path, table)
        except (DamagedError, IncompleteError) as error:
            raise type(error)(f"{path}: {error}") from None
    data = _check_files(directory, table.spans())
    ranks = {int(m[1]) for m in map(_RANK_DATA.fullmatch, (path.name for path in data)) if m}
    return Contents(
        table.tensors(),
        table.objects,
        table.paths,
        tuple(files),
        data,
        max(ranks, default=0) + 1,
        tuple(table.replicas),
    )


@dataclass
class _Table:
    """What the metadata files of one folder say together."""

    heads: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    parts: dict[str, dict[Box, Span]] = field(default_factory=dict)
    objects: dict[str, Span] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    replicas: list[tuple[str, Box, Span, Span]] = field(default_factory=list)

    def spans(self) -> Iterator[Span]:
        for parts in self.parts.values():
            yield from parts.values()
        yield from self.objects.values()
        yield from (span for *_, span in self.replicas)

    def tensors(self) -> dict[str, StoredTensor]:
        stored = {}
        # The ranks' plans are joined rank by rank; only the paths keep the order of the state dict.
        for key in sorted(self.heads, key={key: n for n, key in enumerate(self.paths)}.__getitem__):
            dtype, shape = self.heads[key]
            boxes, spans = tuple(self.parts[key]), tuple(self.parts[key].values())
            _check_tiling(key, dtype, shape, boxes, spans)
            stored[key] = StoredTensor(dtype, shape, boxes, spans)
        return stored


def _is_metadata(name: str) -> bool:
    return name == METADATA or _RANK_METADATA.fullmatch(name) is not None


def _read_table(path: Path, table: _Table) -> None:
    metadata = pickles.load(path.read_bytes(), str(path), _ALLOWED)
    if not isinstance(metadata, Record) or metadata.kind != f"{_MODULE}.metadata.Metadata":
        raise DamagedError("holds no table of contents")
    stored = _storage(metadata.field("storage_data"), path.parent)
    paths = metadata.fields().get("planner_data")
    keys = _dict(metadata.field("state_dict_metadata"))
    for key in (*_dict(paths or {}), *keys):
        if not isinstance(key, str):
            raise DamagedError("a key that is no text")
        if key in keys:
            table.paths.setdefault(key, _path((paths or {}).get(key, (key,))))
    for key, what in keys.items():
        kind = getattr(what, "kind", "")
        if kind == f"{_MODULE}.metadata.BytesStorageMetadata":
            if (key, None) not in stored:
                raise IncompleteError(f"{key}: no file is named for it")
            table.objects.setdefault(key, stored[key, None])
        elif kind == f"{_MODULE}.metadata.TensorStorageMetadata":
            _read_tensor(key, what, stored, table)
        else:
            raise DamagedError(f"{key}: neither a tensor nor an object")


def _read_tensor(key: str, what: Record, stored: Mapping[tuple[str, Shape | None], Span], table: _Table) -> None:
    properties = what.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedError(f"{key}: a tensor of an unknown type")
    head = dtype, ints(what.field("size"))
    if table.heads.setdefault(key, head) != head:
        raise DamagedError(f"{key}: {head[0]}{list(head[1])} here, {table.heads[key]} in another rank's table")
    parts = table.parts.setdefault(key, {})
    chunks = what.field("chunks")
    for chunk in chunks if isinstance(chunks, list) else ():
        if not isinstance(chunk, Record):
            raise DamagedError(f"{key}: a part without a box")
        box = Box(ints(chunk.field("offsets")), ints(chunk.field("sizes")))
        if not box.volume:
            continue
        span = stored.get((key, box.offsets)) or (stored.get((key, None)) if len(chunks) == 1 else None)
        if span is None:
            raise IncompleteError(f"{key}: no file is named for its part {box}")
        # Replicas hold the same box: each counts once.
        kept = parts.setdefault(box, span)
        if kept != span:
            table.replicas.append((key, box, kept, span))


def _storage(value: Any, directory: Path) -> dict[tuple[str, Shape | None], Span]:
    stored: dict[tuple[str, Shape | None], Span] = {}
    places: dict[Any, Path] = {}
    for index, info in _dict(value).items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise DamagedError("a part without a place")
        key, offset = index.field("fqn"), index.fields().get("offset")
        start, length = info.field("offset"), info.field("length")
        if not isinstance(key, str) or type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise DamagedError("a part at no place in a file")
        if info.fields().get("transform_descriptors"):
            raise RefusedError(
                f"{directory}: {key} was written through a stream extension (compression, encryption), which only its "
                "writer can undo; save it again without extensions"
            )
        name = info.field("relative_path")
        if not isinstance(name, str) or name not in places:
            places[name] = _inside(directory, name)
        stored[key, None if offset is None else ints(offset)] = Span(places[name], start, length)
    return stored


def _inside(directory: Path, name: Any) -> Path:
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        named = ascii(name[:100]) if isinstance(name, str) else f"a {type(name).__name__}"
        raise RefusedError(f"{directory}: its {METADATA} names {named}, which is no file of this folder")
    return directory.joinpath(*parts)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise DamagedError("a table that is none")
    return value


def _path(value: Any) -> KeyPath:
    if not isinstance(value, tuple) or not value or not all(isinstance(part, str | int) for part in value):
        raise DamagedError("a key without a path")
    return value


def _check_tiling(key: str, dtype: str, shape: Shape, boxes: Iterable[Box], spans: Iterable[Span]) -> None:
    chunks = [
        Chunk(box, ByteSource(str(span.file), 0, contiguous_strides(box.sizes)))
        for box, span in zip(boxes, spans, strict=True)
    ]
    TensorEntry(dtype, shape, chunks).check_tiling(key)


def _check_files(directory: Path, spans: Iterable[Span]) -> tuple[Path, ...]:
    """Raise unless every span lies inside its file, apart from the others; returns the files."""
    by_file: dict[Path, set[tuple[int, int]]] = {}
    for span in spans:
        by_file.setdefault(span.file, set()).add((span.start, span.start + span.length))
    missing = sorted(str(path.relative_to(directory)) for path in by_file if not path.is_file())
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise IncompleteError(
            f"{directory}: {shown} missing, of {len(by_file)} files (likely on another node's local disk, or not "
            "copied whole); bring them here and try again"
        )
    for path, places in by_file.items():
        size = path.stat().st_size
        end = 0
        for start, stop in sorted(places):
            if start < end:
                raise DamagedError(f"{path}: two parts share the bytes {start} to {min(end, stop)}")
            end = stop
        if end > size:
            raise DamagedError(
                f"{path}: ends at byte {size}, {end - size} bytes short; the file was truncated: copy it again or use "
                "another step"
            )
    return tuple(sorted(by_file))
