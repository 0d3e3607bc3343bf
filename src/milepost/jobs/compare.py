"""test: is a checkpoint the same model as a reference? Both sides are streamed, no model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from milepost.cast import cast_bits, cast_dtype
from milepost.errors import CallError
from milepost.index import Bits, TensorEntry, TensorIndex
from milepost.settings import setting
from milepost.transfer import Window, windows
from milepost.transfer.execute import OpenFiles, Progress, Update, read_as, read_window, window_bytes_for


@dataclass(frozen=True)
class CompareOptions:
    """How to compare. Sizes in bytes."""

    dtype: str = setting("keep", "As what it was merged: keep, bf16, fp16 or fp32.")
    atol: float = setting(0.0, "Absolute tolerance; 0 with --rtol 0: bit for bit.")
    rtol: float = setting(0.0, "Tolerance relative to the reference.")
    memory_limit: int = setting("1GiB", "Bound on the memory for tensor data.", size=True)


@dataclass(frozen=True)
class Difference:
    """One tensor in which two models differ.

    kind: "missing" (only the reference has it), "extra" (only the checkpoint has it), "shape", "dtype" or "value".
    For "value", and for "dtype" where the shapes agree: number of elements that differ, and the largest absolute and
    relative difference (relative to the reference; in float32 arithmetic).
    """

    name: str
    kind: str
    detail: str
    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


@dataclass(frozen=True)
class LogitsReport:
    """Logits of the checkpoint against those of the reference: how many differ beyond the tolerance, of how many, and
    the largest absolute and relative difference."""

    elements: int
    numel: int
    max_abs: float
    max_rel: float

    @property
    def ok(self) -> bool:
        """Whether the two answer alike."""
        return not self.elements


@dataclass(frozen=True)
class Report:
    """The verdict: `ok` where there is no difference, nor one of logits where they were compared."""

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...]
    logits: LogitsReport | None = None

    @property
    def ok(self) -> bool:
        """Whether the two are the same model."""
        return not self.differences and (self.logits is None or self.logits.ok)


def compare(
    index: TensorIndex,
    reference: TensorIndex,
    options: CompareOptions | None = None,
    *,
    progress: Progress | None = None,
    updates: Mapping[str, Update] | None = None,
    allow_missing: Sequence[str] = (),
) -> Report:
    """Compare a checkpoint, cast as a merge would cast it, with a reference, tensor by tensor.

    `updates` change the tensors that they name, as a merge would change them. Names that a pattern of `allow_missing`
    matches may be missing.

    With both tolerances 0 values must be equal bit for bit (0.0 and -0.0 differ, a NaN equals the same NaN). Otherwise
    |a - b| <= atol + rtol * |b|, and NaN equals NaN.
    """
    options = options or CompareOptions()
    atol, rtol = options.atol, options.rtol
    if not (atol >= 0 and rtol >= 0):
        raise CallError(f"--atol {atol} --rtol {rtol}: a tolerance is 0 or more")
    differences: list[Difference] = []
    window = window_bytes_for(options.memory_limit, 2)
    with OpenFiles() as files:
        for name in reference:
            if name not in index and not any(fnmatchcase(name, pattern) for pattern in allow_missing):
                differences.append(Difference(name, "missing", "in the reference, not in the checkpoint"))
        for name, entry in index.items():
            other = reference.get(name)
            if other is None:
                differences.append(Difference(name, "extra", "in the checkpoint, not in the reference"))
                continue
            wanted = cast_dtype(name, entry.dtype, options.dtype)
            if entry.shape != other.shape:
                detail = f"{list(entry.shape)} in the checkpoint, {list(other.shape)} in the reference"
                differences.append(Difference(name, "shape", detail))
                continue
            update = (updates or {}).get(name)
            found = _values(name, entry, other, wanted, _Tolerance(atol, rtol), window, files, progress, update)
            if wanted != other.dtype:
                detail = f"{wanted} in the checkpoint, {other.dtype} in the reference"
                differences.append(Difference(name, "dtype", detail, found.elements, found.max_abs, found.max_rel))
            elif found.elements:
                detail = f"{found.elements} of {entry.numel} elements differ"
                differences.append(Difference(name, "value", detail, found.elements, found.max_abs, found.max_rel))
    return Report(len(index), index.nbytes, tuple(differences))


@dataclass(frozen=True, slots=True)
class _Tolerance:
    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class _Found:
    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


def _values(
    name: str,
    entry: TensorEntry,
    other: TensorEntry,
    wanted: str,
    tolerance: _Tolerance,
    window: int,
    files: OpenFiles,
    progress: Progress | None,
    update: Update | None,
) -> _Found:
    total = _Found()
    for box in windows(entry, window // 2):
        ours = Window(name, entry.dtype, box, tuple(entry.pieces(box)))
        theirs = Window(name, other.dtype, box, tuple(other.pieces(box)))
        bits = read_as(ours, wanted, update, files)
        found = _difference(bits, wanted, read_window(theirs, files), other.dtype, tolerance)
        total = _Found(
            total.elements + found.elements, max(total.max_abs, found.max_abs), max(total.max_rel, found.max_rel)
        )
        if progress is not None:
            progress(ours.nbytes)
    return total


def _difference(a: Bits, a_type: str, b: Bits, b_type: str, tolerance: _Tolerance) -> _Found:
    if a_type == b_type and np.array_equal(a, b):
        return _Found()
    x, y = numbers(a, a_type), numbers(b, b_type)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        gap = np.abs(x - y)
        if tolerance.atol or tolerance.rtol or a_type != b_type:
            differs = ~((gap <= tolerance.atol + tolerance.rtol * np.abs(y)) | (x == y) | (np.isnan(x) & np.isnan(y)))
        else:
            differs = a != b
        if not differs.any():
            return _Found()
        gap = np.where(np.isnan(gap), np.inf, gap)[differs]  # NaN against a number
        relative = gap / np.abs(y[differs])
        relative = np.where(np.isnan(relative), 0.0, relative)
    return _Found(int(differs.sum()), float(gap.max()), float(relative.max()))


def numbers(bits: Bits, dtype: str) -> npt.NDArray[np.float64]:
    """Values of bit patterns; NaN for the types in which numpy cannot reckon."""
    if dtype == "bfloat16":
        return cast_bits(bits, dtype, "float32").view(np.float32).astype(np.float64)
    if dtype.startswith(("float8", "complex")):
        return np.full(bits.shape, np.nan)  # numpy has no arithmetic for these: only their bits are compared
    return np.ascontiguousarray(bits).view(np.dtype(dtype)).astype(np.float64)
