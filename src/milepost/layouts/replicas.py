"""Copies of one box on several ranks, compared: HSDP replicas, and tensors that tensor parallelism leaves whole.

Opening takes the first copy of each box. Here the others are looked at too: by the CRC-32 that torch.save notes for a
record, where a copy is the whole of its record on both ranks, else by their bytes. Only the headers are read again, so
this is for checks that read everything anyhow; the caller has checked the CRC-32s themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milepost.errors import DamagedError
from milepost.index import Box, Chunk, TensorIndex, itemsize, read_chunk
from milepost.layouts import fsdp
from milepost.layouts.dcp import reader as dcp
from milepost.layouts.dcp import shards as dcp_shards
from milepost.layouts.dcp.metadata import Span, read_contents
from milepost.layouts.headers import rank_part
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile

_READ = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of a box. crc32: of its bytes, where a record holds nothing else."""

    dtype: str
    chunk: Chunk
    crc32: int | None = None

    @property
    def file(self) -> str:
        return self.chunk.source.file


def differing(index: TensorIndex) -> Iterator[DamagedError]:
    """One error for each tensor of which two copies differ, naming it and both files.

    Raises CheckpointError where a file cannot be read.
    """
    if index.layout == fsdp.FsdpLayout.name:
        for prefix in ("model_", "optim_"):
            files = [path for path in index.files if path.name.startswith(prefix)]
            yield from _in_ranks(files) if len(files) > 1 else ()
    elif index.layout == dcp.DcpLayout.name:
        for directory in dict.fromkeys(path.parent for path in index.files):
            yield from _in_dcp(directory)


def _in_ranks(files: Iterable[Path]) -> Iterator[DamagedError]:
    first: dict[tuple[str, Box], _Copy] = {}
    wrong: set[str] = set()
    for path in files:
        file = TorchFile(path)
        for name, value in _values(file.root, ""):
            part = rank_part(value)
            for ref, box in () if part is None else part.pieces:
                if not box.volume or name in wrong:
                    continue
                copy = _copy(file, ref, box)
                kept = first.setdefault((name, box), copy)
                if kept is not copy and _differ(kept, copy):
                    wrong.add(name)
                    yield _error(name, kept, copy)


def _values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What stands in nested dictionaries, under names joined by dots."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _in_dcp(directory: Path) -> Iterator[DamagedError]:
    if dcp_shards.holds_shards(directory):
        copies = dcp_shards.replicas(directory)
        pairs = ((name, _Copy(dtype, kept), _Copy(dtype, copy)) for name, dtype, kept, copy in copies)
    else:
        contents = read_contents(directory)
        pairs = ((key, _stored(kept, box), _stored(copy, box)) for key, box, kept, copy in contents.replicas)
    wrong: set[str] = set()
    for name, kept, copy in pairs:
        if name not in wrong and _differ(kept, copy):
            wrong.add(name)
            yield _error(name, kept, copy)


def _stored(span: Span, box: Box) -> _Copy:
    file = TorchFile(span.file, (span.start, span.length))
    if not isinstance(file.root, TensorRef) or file.root.shape != box.sizes:
        raise DamagedError(f"{span}: holds no tensor of {list(box.sizes)} as .metadata says")
    return _copy(file, file.root, box)


def _copy(file: TorchFile, ref: TensorRef, box: Box) -> _Copy:
    chunk = file.chunk(ref, box.offsets)
    noted = file.checksum(ref)
    whole = noted is not None and chunk.contiguous and box.volume * itemsize(ref.dtype) == noted[1]
    return _Copy(ref.dtype, chunk, noted[0] if noted is not None and whole and file.has_checksums else None)


def _differ(left: _Copy, right: _Copy) -> bool:
    if left.dtype != right.dtype:
        return True
    if left.crc32 is not None and right.crc32 is not None:
        return left.crc32 != right.crc32
    with Path(left.file).open("rb", buffering=0) as one, Path(right.file).open("rb", buffering=0) as two:
        for box in _rows(left.chunk.box, max(1, _READ // itemsize(left.dtype))):
            ours = read_chunk(one.fileno(), left.chunk.narrow(box, left.dtype), left.dtype)
            theirs = read_chunk(two.fileno(), right.chunk.narrow(box, right.dtype), right.dtype)
            if not np.array_equal(ours, theirs):
                return True
    return False


def _rows(box: Box, limit: int) -> Iterator[Box]:
    """A box in runs of rows of at most `limit` elements, or of one row."""
    if not box.sizes:
        yield box
        return
    step = max(1, limit // (box.volume // box.sizes[0]))
    for start in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (rows, *box.sizes[1:]))


def _error(name: str, left: _Copy, right: _Copy) -> DamagedError:
    return DamagedError(
        f"{name}: {left.file} and {right.file} hold other bytes of the same part {left.chunk.box}, which replicas must "
        "share; one of them is of another save or was altered"
    )
