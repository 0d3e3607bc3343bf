"""diff: by how much do two checkpoints differ, tensor by tensor? Both are streamed; neither is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from milepost.errors import NotFoundError
from milepost.index import OPTIMIZER_PREFIX, Bits, TensorEntry, TensorIndex
from milepost.jobs.companions import companions_of
from milepost.jobs.compare import numbers
from milepost.layouts import open_directory
from milepost.layouts.huggingface import read_config
from milepost.mapping import FAMILIES, names
from milepost.mapping.wrappers import Part, holds_parts, take_part
from milepost.transfer import Window, windows
from milepost.transfer.execute import OpenFiles, Progress, read_window, window_bytes_for

SAME, CHANGED, ADDED, REMOVED, SHAPE, DTYPE = "same", "changed", "added", "removed", "shape", "dtype"


@dataclass(frozen=True)
class TensorChange:
    """How one tensor of B differs from A's.

    kind:      "added" (only in B), "removed" (only in A), "shape", "dtype" (of equal shape, see the numbers), "changed"
    elements:  how many differ
    norm:      |b - a|, the Euclidean norm; NaN where one of them has a NaN that the other has not
    relative:  |b - a| / |a|
    max_abs:   the largest |b - a| of one element
    """

    name: str
    kind: str
    detail: str
    elements: int = 0
    norm: float = 0.0
    relative: float = 0.0
    max_abs: float = 0.0


@dataclass(frozen=True)
class Diff:
    """What differs between A and B, in A's order; `tensors` and `nbytes` (A's) are what was compared: what both have in
    one shape.

    norm, relative:  of all tensors that both have in one shape, as one vector
    notes:           how the two were made comparable
    """

    changes: tuple[TensorChange, ...]
    tensors: int
    nbytes: int
    norm: float
    relative: float
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes


def open_pair(
    a: tuple[Path, str], b: tuple[Path, str], parts: tuple[str | None, str | None] = (None, None)
) -> tuple[TensorIndex, TensorIndex, tuple[str, ...]]:
    """Open two role directories (each with its layout's name) so that one tensor has one name in both.

    Where their names differ, as those of two layouts may, both get Hugging Face's, by the config.json of either.
    Moments are compared where both have them.

    parts:  of each, "policy" or "value" of a state dict that holds both: its weights are compared, under the names of
            a model of its own. The other may hold one model. CallError where neither holds what is asked for.
    """
    ours, theirs = (names.strip_wrappers(open_directory(*place)) for place in (a, b))
    notes: list[str] = []
    beside: tuple[Mapping[str, TensorEntry], Mapping[str, TensorEntry]] = ({}, {})
    if any(parts):
        first_part, second_part = _parts_of((ours, theirs), (a[0], b[0]), parts)
        ours, theirs, beside = first_part.index, second_part.index, (first_part.beside, second_part.beside)
        notes += dict.fromkeys((*first_part.notes, *second_part.notes))
    if set(ours.weights()) != set(theirs.weights()):
        first, second = _mapped(ours, a[0], b[0]), _mapped(theirs, b[0], a[0])
        if first is not None and second is not None:
            ours, theirs = first, second
            notes.append("names are Hugging Face's")
    ours, theirs = (
        index.with_entries({**index, **more}) if more else index
        for index, more in zip((ours, theirs), beside, strict=True)
    )
    held = [any(name.startswith(OPTIMIZER_PREFIX) for name in index) for index in (ours, theirs)]
    if held[0] != held[1]:
        notes.append(f"only {'A' if held[0] else 'B'} has moments: weights are compared")
        ours, theirs = ours.weights(), theirs.weights()
    return ours, theirs, tuple(notes)


def _parts_of(
    pair: tuple[TensorIndex, TensorIndex], directories: tuple[Path, Path], parts: tuple[str | None, str | None]
) -> tuple[Part, Part]:
    """What is meant of each of two state dicts; of one that holds one model, where the other holds two, all of it."""
    weights = [index.weights() for index in pair]
    both = [holds_parts(index) for index in weights]
    taken = []
    for index, directory, part, several in zip(weights, directories, parts, both, strict=True):
        family = FAMILIES.get(_config(directory).get("model_type", ""))
        wanted = part if several or not any(both) else None
        taken.append(take_part(index, wanted, "model" if family is None else family.base))
    return taken[0], taken[1]


def _config(directory: Path) -> dict[str, Any]:
    try:
        return read_config(companions_of(directory))
    except NotFoundError:
        return {}


def _mapped(index: TensorIndex, directory: Path, other: Path) -> TensorIndex | None:
    """The index under Hugging Face's names, or None where no config.json says what they are."""
    for place in (directory, other):
        try:
            config = read_config(companions_of(place))
        except NotFoundError:
            continue
        return names.to_huggingface(index, config, complete=False).index
    return None


def diff(
    ours: TensorIndex,
    theirs: TensorIndex,
    *,
    patterns: Sequence[str] = (),
    memory_limit: int = 1 << 30,
    progress: Progress | None = None,
    notes: tuple[str, ...] = (),
) -> Diff:
    """Compare B (`theirs`) with A (`ours`) in float64, window by window within `memory_limit` bytes.

    patterns: globs of the names to look at; none: all. NotFoundError for one that no name of either is like.
    """

    def wanted(name: str) -> bool:
        return _is_wanted(name, patterns)

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for index in (ours, theirs) for name in index):
            raise NotFoundError(f"no tensor of A or B has a name like {pattern}; `milepost inspect` lists the names")
    shared = [name for name in ours if wanted(name) and name in theirs]
    changes = [TensorChange(name, REMOVED, _about(ours[name])) for name in ours if wanted(name) and name not in theirs]
    sums, compared_bytes = [], 0
    # A window lives as two arrays of bits, and as three of float64, at most 8 times as wide.
    window = window_bytes_for(memory_limit, 8)
    with OpenFiles() as files:
        for name in shared:
            a, b = ours[name], theirs[name]
            if a.shape != b.shape:
                changes.append(TensorChange(name, SHAPE, f"{list(a.shape)} -> {list(b.shape)}"))
                continue
            total = _sum(_parts(name, a, b, window, files, progress))
            sums.append(total)
            compared_bytes += a.nbytes
            kind = DTYPE if a.dtype != b.dtype else CHANGED if total.elements else SAME
            if kind != SAME:
                detail = f"{a.dtype} -> {b.dtype}" if kind == DTYPE else f"{total.elements} of {a.numel} elements"
                norm, relative = total.norms()
                changes.append(TensorChange(name, kind, detail, total.elements, norm, relative, total.max_abs))
    order = {name: place for place, name in enumerate(ours)}
    changes.sort(key=lambda change: order[change.name])
    changes += [TensorChange(n, ADDED, _about(theirs[n])) for n in theirs if wanted(n) and n not in ours]
    norm, relative = _sum(iter(sums)).norms()
    return Diff(tuple(changes), len(sums), compared_bytes, norm, relative, notes)


def bytes_to_compare(ours: TensorIndex, theirs: TensorIndex, patterns: Sequence[str] = ()) -> int:
    """The bytes of A that `diff` reads."""
    return sum(
        entry.nbytes
        for name, entry in ours.items()
        if _is_wanted(name, patterns) and name in theirs and theirs[name].shape == entry.shape
    )


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of some elements: how many differ, the sums of squares of b - a and of a, and the largest |b - a|."""

    elements: int = 0
    gap: float = 0.0
    size: float = 0.0
    max_abs: float = 0.0

    def norms(self) -> tuple[float, float]:
        """|b - a|, and that by |a|."""
        norm, size = math.sqrt(self.gap), math.sqrt(self.size)
        return norm, norm / size if size else (0.0 if norm == 0 else math.inf)


def _sum(parts: Iterator[_Sums]) -> _Sums:
    found = list(parts)
    return _Sums(
        sum(part.elements for part in found),
        _total([part.gap for part in found]),
        _total([part.size for part in found]),
        max((part.max_abs for part in found), key=_with_nan_on_top, default=0.0),
    )


def _total(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _with_nan_on_top(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _parts(
    name: str, a: TensorEntry, b: TensorEntry, window: int, files: OpenFiles, progress: Progress | None
) -> Iterator[_Sums]:
    for box in windows(a, window):
        ours = Window(name, a.dtype, box, tuple(a.pieces(box)))
        theirs = Window(name, b.dtype, box, tuple(b.pieces(box)))
        yield _between(ours, theirs, lambda one: read_window(one, files))
        if progress is not None:
            progress(ours.nbytes)


def _between(ours: Window, theirs: Window, read: Callable[[Window], Bits]) -> _Sums:
    a, b = read(ours), read(theirs)
    x = numbers(a, ours.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        size = float(np.vdot(x, x))
        if ours.dtype == theirs.dtype and np.array_equal(a, b):
            return _Sums(size=size)
        y = numbers(b, theirs.dtype)
        same = (a == b) if ours.dtype == theirs.dtype else (x == y) | (np.isnan(x) & np.isnan(y))
        gap = np.where(same, 0.0, y - x)
    return _Sums(int(same.size - np.count_nonzero(same)), float(np.vdot(gap, gap)), size, float(np.abs(gap).max()))


def _about(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
