"""The index of a checkpoint of very many parts, kept for the next time it is opened.

Reading the headers of a thousand ranks takes minutes; what they say is one number a part. It is kept in the user's
cache directory, never beside the checkpoint, which may be somebody else's:

    $XDG_CACHE_HOME/milepost/index/{digest of the checkpoint's paths}     (default: ~/.cache)

    b"milepost index 1\\n", XXH3-128 of all that follows, length of the JSON (8 bytes, little-endian), JSON, numbers

A kept index counts only while every file has the size, times of change and inode that it had; the time of the last
change of the inode cannot be set by a program, so a file put in another's place shows whatever dates it claims. It is
JSON and numbers, is read only where it is the user's own and nobody else may write it, and must tile every shape and
stay inside the files. Whatever is wrong with it, it is as if it were not there.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from milepost.chunks import Grid
from milepost.errors import CheckpointError
from milepost.index import DTYPES, Box, ByteSource, Chunk, Shape, TensorEntry, itemsize

LARGE = 100_000
"""Parts from which on an index is kept: about ten seconds of reading headers."""
ROOM = 2 << 30
"""Bytes of kept indexes beyond which the oldest go."""

_MAGIC = b"milepost index 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}s16sQ")
_SETTLED = 2.0  # seconds; the coarsest time stamps of file systems in use
_KINDS = ("<u4", "<i4", "<i8")
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Kept:
    """What is kept of a checkpoint: its tensors, and small facts as JSON knows them."""

    entries: dict[str, TensorEntry]
    facts: Mapping[str, Any]


class IndexCache:
    """The place of one checkpoint's index; made before its files are read, so that a change meanwhile shows."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]
        self._states = _states(self._files)
        paths = "\n".join(str(file.absolute()) for file in files)
        directory = _directory()
        self._place = None if directory is None else directory / xxhash.xxh3_128_hexdigest(os.fsencode(paths))

    def read(self) -> Kept | None:
        """The kept index, or None where there is none that counts."""
        if self._place is None:
            return None
        try:
            with self._place.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                    return None
                data = np.fromfile(file, np.uint8)
            magic, digest, length = _HEAD.unpack(data[: _HEAD.size].tobytes())
            if magic != _MAGIC or xxhash.xxh3_128_digest(data[len(_MAGIC) + 16 :].data) != digest:
                return None
            header = json.loads(data[_HEAD.size : _HEAD.size + length].tobytes())
            if header["states"] != self._states:
                return None
            sizes = [state[0] for state in self._states]
            unpacked = _Unpacked(header, data[_HEAD.size + length :], self._files, sizes)
            return Kept(unpacked.entries, header["facts"])
        except (OSError, struct.error, CheckpointError, *_MALFORMED):
            return None  # the files themselves are there to be read

    def write(self, entries: Mapping[str, TensorEntry], facts: Mapping[str, Any]) -> None:
        """Keep an index that has just been read, if it is large and its files have not changed since."""
        if self._place is None or sum(len(entry.chunks) for entry in entries.values()) < LARGE:
            return
        newest = max(max(state[1:3]) for state in self._states)
        if _states(self._files) != self._states or newest / 1e9 > time.time() - _SETTLED:
            return  # in the same tick of the clock a file could change again and look the same
        packed = _pack(entries, self._files)
        if packed is None:
            return
        text, columns = json.dumps({**packed[0], "states": self._states, "facts": facts}).encode(), packed[1]
        text += b" " * (-(_HEAD.size + len(text)) % 8)
        try:
            self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_room(self._place.parent, len(text) + sum(column.nbytes for column in columns))
            _write(self._place, text, columns)
        except OSError:
            return  # a cache is no reason to fail


def _directory() -> Path | None:
    """Where indexes are kept; None for a user without a home, as containers have them."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base.startswith("/") else Path("~/.cache").expanduser()) / "milepost" / "index"
    except RuntimeError:
        return None


def _states(files: Iterable[str]) -> list[list[int]]:
    """Size, time of change of the content and of the inode in nanoseconds, inode and device, of each file."""
    found = []
    for file in files:
        facts = Path(file).stat()
        found.append([facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_dev])
    return found


def _write(place: Path, header: bytes, columns: Sequence[_Numbers]) -> None:
    digest = xxhash.xxh3_128(struct.pack("<Q", len(header)) + header)
    for column in columns:
        digest.update(column.data.cast("B"))
    import tempfile  # noqa: PLC0415  takes long to import, and few indexes are kept

    fd, name = tempfile.mkstemp(dir=place.parent)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123  a descriptor
            file.write(_HEAD.pack(_MAGIC, digest.digest(), len(header)) + header)
            for column in columns:
                file.write(column.data)
        Path(name).replace(place)
    finally:
        Path(name).unlink(missing_ok=True)


def _make_room(directory: Path, nbytes: int) -> None:
    """Remove the indexes that were kept longest ago, until the new one fits beside the others."""
    found = sorted(((path, path.stat()) for path in directory.iterdir()), key=lambda pair: pair[1].st_mtime_ns)
    free = ROOM - nbytes - sum(facts.st_size for _, facts in found)
    for path, facts in found:
        if free >= 0:
            return
        path.unlink(missing_ok=True)
        free += facts.st_size


def _pack(entries: Mapping[str, TensorEntry], files: Sequence[str]) -> tuple[dict[str, Any], list[_Numbers]] | None:
    """Entries as JSON and columns of offsets; None where one cannot be written so."""
    numbers = {file: number for number, file in enumerate(files)}
    grids: dict[tuple[int, ...], int] = {}
    header: dict[str, list[Any]] = {"grids": [], "entries": []}
    columns: list[_Numbers] = []
    at = 0
    for name, entry in entries.items():
        chunks = entry.chunks
        if isinstance(chunks, Grid):
            # What tensors that are cut alike have in common is one object.
            key = (*map(id, chunks.cuts), id(chunks.files), id(chunks.file), id(chunks.strides))
            if key not in grids:
                grids[key] = len(grids)
                table = [numbers[file] for file in chunks.files]
                header["grids"].append([chunks.cuts, table, chunks.file.tolist(), chunks.strides.tolist()])
            column = np.ascontiguousarray(chunks.offsets, chunks.offsets.dtype.newbyteorder("<"))
            where = [grids[key], column.dtype.str, at, chunks.unit]
            columns.append(column)
            at += column.nbytes
        else:
            if not all(isinstance(chunk.source.offset, int) and chunk.source.data is None for chunk in chunks):
                return None
            where = [
                [c.box.offsets, c.box.sizes, numbers[c.source.file], c.source.offset, c.source.strides] for c in chunks
            ]
        header["entries"].append([name, entry.dtype, entry.shape, entry.alias_of, isinstance(chunks, Grid), where])
    return header, columns


class _Unpacked:
    """Entries of a kept index, each looked at with as much distrust as if a stranger had written it."""

    def __init__(
        self, header: Mapping[str, Any], numbers: _Numbers, files: Sequence[str], sizes: Sequence[int]
    ) -> None:
        self._numbers = numbers
        self._files = files
        self._sizes = np.array(sizes, np.int64)
        tables: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._grids = [self._grid(tables, *grid) for grid in header["grids"]]
        self._limits: dict[tuple[int, str, int], _Numbers] = {}
        self.entries = {
            name: self._entry(name, dtype, _ints(shape), alias, where, grid=grid)
            for name, dtype, shape, alias, grid, where in header["entries"]
        }
        if any(entry.alias_of is not None and entry.alias_of not in self.entries for entry in self.entries.values()):
            raise ValueError("an alias of nothing")

    def _grid(
        self, tables: dict[tuple[str, ...], tuple[str, ...]], cuts: Any, table: Any, file: Any, strides: Any
    ) -> Grid:
        """A grid without its offsets."""
        names = tuple(self._files[number] for number in _ints(table))
        lines = tuple(_ints(line) for line in cuts)
        cells = tuple(len(line) - 1 for line in lines)
        found = Grid(
            lines,
            tables.setdefault(names, names),
            np.array(file, np.int32),
            np.zeros(cells, np.int64),
            np.array(strides, np.int64),
        )
        every = np.broadcast_to(found.strides, (*cells, len(cells)))
        rising = all(a < b for line in lines for a, b in pairwise(line))
        known = found.file.shape == cells and ((found.file >= 0) & (found.file < len(names))).all()
        if not (rising and known and (every >= 0).all()):
            raise ValueError("no grid")
        return found

    def _entry(self, name: Any, dtype: Any, shape: Shape, alias: Any, where: Any, *, grid: bool) -> TensorEntry:
        if not isinstance(name, str) or dtype not in DTYPES:
            raise ValueError("no tensor")
        chunks = self._cells(dtype, *where) if grid else [self._chunk(dtype, *chunk) for chunk in where]
        entry = TensorEntry(dtype, shape, chunks, alias)
        entry.check_tiling(name)
        return entry

    def _cells(self, dtype: str, number: int, kind: str, at: int, unit: int) -> Grid:
        grid = self._grids[number]
        if kind not in _KINDS or at < 0 or unit < 1:
            raise ValueError("no offsets")
        offsets = np.frombuffer(self._numbers.data, kind, len(grid), at).reshape(grid.offsets.shape)
        limits = self._limits.get((number, dtype, unit))
        if limits is None:
            last = _last_elements(grid)
            ends = self._sizes[[self._files.index(file) for file in grid.files]][grid.file]
            limits = self._limits[number, dtype, unit] = (ends - (last + 1) * itemsize(dtype)) // unit
        if not ((offsets <= limits) & (offsets >= 0)).all():
            raise ValueError("offsets outside the files")
        return replace(grid, offsets=offsets, unit=unit)

    def _chunk(self, dtype: str, offsets: Any, sizes: Any, file: int, start: int, strides: Any) -> Chunk:
        chunk = Chunk(Box(_ints(offsets), _ints(sizes)), ByteSource(self._files[file], start, _ints(strides)))
        if start < 0 or file < 0 or start + chunk.span() * itemsize(dtype) > self._sizes[file]:
            raise ValueError("a chunk outside its file")
        return chunk


def _last_elements(grid: Grid) -> _Numbers:
    """How far, in elements, the last one of each cell lies behind its first."""
    last = np.zeros(grid.offsets.shape, np.int64)
    for dim, cuts in enumerate(grid.cuts):
        steps = (np.diff(cuts) - 1).reshape([-1 if d == dim else 1 for d in range(len(grid.cuts))])
        last += steps * grid.strides[..., dim]
    return last


def _ints(values: Any) -> Shape:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("no numbers")
    return tuple(values)
