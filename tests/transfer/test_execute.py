"""Moving bytes: the right ones, within the memory bound, and a stop at the first error."""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, entry_of, pictures

from milepost.cast import cast_bits
from milepost.errors import CallError, DamagedError, NotFoundError
from milepost.index import (
    Bits,
    Box,
    ByteSource,
    Chunk,
    TensorEntry,
    TensorIndex,
    bits_dtype,
    contiguous_strides,
    itemsize,
)
from milepost.transfer import Window, execute, plan
from milepost.transfer.execute import copy_range, window_bytes_for


@dataclass
class Memory:
    """A sink of arrays."""

    arrays: dict[str, Bits]
    dtypes: dict[str, str]
    writes: list[tuple[str, Box]] = field(default_factory=list)

    def dtype(self, name: str) -> str:
        return self.dtypes[name]

    def file_range(self, name: str, box: Box) -> None:
        return None

    def write(self, name: str, box: Box, bits: Bits) -> None:
        assert bits.shape == box.sizes
        assert bits.dtype == bits_dtype(self.dtypes[name])
        self.arrays[name][box.slices()] += bits  # a box moved twice would not read as it should
        self.writes.append((name, box))


@dataclass
class OneFile:
    """A sink of one tensor in one file, after `head` bytes."""

    fd: int
    shape: tuple[int, ...]
    wanted: str
    head: int = 5

    def dtype(self, name: str) -> str:
        return self.wanted

    def file_range(self, name: str, box: Box) -> tuple[int, int]:
        strides = contiguous_strides(self.shape)
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        return self.fd, self.head + first * itemsize(self.wanted)

    def write(self, name: str, box: Box, bits: Bits) -> None:
        raise AssertionError("a box with a place in a file")


def _moving(entry: TensorEntry, window_bytes: int = 64) -> Iterator[Window]:
    return plan(TensorIndex({"w": entry}, "fsdp"), [("w", Box.whole(entry.shape))], window_bytes)


def _memory(entry: TensorEntry, dtype: str | None = None) -> Memory:
    dtype = dtype or entry.dtype
    return Memory({"w": np.zeros(entry.shape, bits_dtype(dtype))}, {"w": dtype})


@given(pictures(), st.integers(1, 100), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_into_memory(picture: Picture, window_bytes: int, workers: int) -> None:
    sink = _memory(picture.entry)
    moved: list[int] = []
    execute(_moving(picture.entry, window_bytes), sink, workers=workers, progress=moved.append)
    assert np.array_equal(sink.arrays["w"], picture.bits)
    assert sum(moved) == picture.entry.nbytes


@given(pictures(), st.integers(1, 100), st.booleans())
@settings(max_examples=100, deadline=None)
def test_into_a_file_with_and_without_a_cast(picture: Picture, window_bytes: int, cast: bool) -> None:
    wanted = "float32" if cast and picture.entry.dtype == "bfloat16" else picture.entry.dtype
    fd = os.memfd_create("target")
    try:
        execute(_moving(picture.entry, window_bytes), OneFile(fd, picture.entry.shape, wanted))
        data = os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)
    expected = cast_bits(picture.bits, picture.entry.dtype, wanted).tobytes()
    assert data == (bytes(5) + expected if expected else b"")


def test_a_box_of_a_larger_tensor_lands_in_its_place(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.uint32)
    values.tofile(tmp_path / "f")
    index = TensorIndex({"w": entry_of(tmp_path / "f", "float32", (10, 4))}, "fsdp")
    sink = _memory(index["w"])
    execute(plan(index, [("w", Box((3, 1), (4, 2)))], 20), sink)
    expected = np.zeros((10, 4), np.uint32)
    expected[3:7, 1:3] = values.reshape(10, 4)[3:7, 1:3]
    assert np.array_equal(sink.arrays["w"], expected)


MIB = 1 << 20


@pytest.mark.parametrize("layout", ["rows", "columns", "transposed"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_memory_stays_within_the_limit_whatever_the_strides(layout: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    shape = (4096, 1024)  # 16 MiB
    with path.open("wb") as file:
        file.truncate(math.prod(shape) * 4)
    if layout == "transposed":
        chunks = [Chunk(Box.whole(shape), ByteSource(str(path), 0, (1, shape[0])))]
    else:
        parts = [Box((0, 0), shape)] if layout == "rows" else [Box((0, n), (4096, 512)) for n in (0, 512)]
        chunks = [Chunk(box, ByteSource(str(path), box.offsets[1] * 4, (1024, 1))) for box in parts]
    entry = TensorEntry("float32", shape, chunks)

    class Nowhere(Memory):
        def write(self, name: str, box: Box, bits: Bits) -> None:
            self.writes.append((name, box))

    sink = Nowhere({}, {"w": wanted})
    limit, workers = 2 * MIB, 2
    tracemalloc.start()
    try:
        execute(_moving(entry, window_bytes_for(limit, workers)), sink, workers=workers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(box.volume for _, box in sink.writes) == entry.numel
    # Beside the windows: the casts' blocks of 1 MiB with their temporaries, and 512 KiB of a strided read, a worker.
    assert peak < limit + workers * (3 * MIB + MIB // 2)


@pytest.mark.parametrize(("limit", "workers"), [(1 << 30, 2), (1 << 30, 64), (4 * MIB, 2), (600_000, 2), (1, 8)])
def test_windows_fit_four_times_a_worker_into_the_limit(limit: int, workers: int) -> None:
    size = window_bytes_for(limit, workers)
    assert 1 << 16 <= size <= 8 * MIB
    assert 4 * workers * size <= max(limit, 4 * workers << 16)


def _open_now() -> int:
    """How many files this process has open, the listing of them too."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _many_windows(path: Path, count: int = 100) -> TensorEntry:
    """A tensor of `count` windows of 64 bytes."""
    path.write_bytes(np.random.default_rng(4).bytes(64 * count))
    return entry_of(path, "uint8", (count, 64))


def test_the_plan_is_drawn_only_as_fast_as_windows_are_moved(tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "f")
    ahead: list[int] = []
    sink = _memory(entry)

    def drawing() -> Iterator[Window]:
        for number, window in enumerate(_moving(entry)):
            ahead.append(number - len(sink.writes))
            yield window

    execute(drawing(), sink, workers=2)
    assert len(sink.writes) == 100
    assert max(ahead) <= 4


def test_the_first_error_stops_the_work_and_is_raised(tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "f", 1000)

    class Full(Memory):
        def write(self, name: str, box: Box, bits: Bits) -> None:
            if len(self.writes) >= 10:
                raise OSError(errno.ENOSPC, "No space left on device", "target")
            super().write(name, box, bits)

    sink = Full(_memory(entry).arrays, {"w": "uint8"})
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left on device") as caught:
        execute(_moving(entry), sink, workers=2)
    assert caught.value.errno == errno.ENOSPC
    # What was in flight may still end; nothing goes on behind the caller's back.
    assert 10 <= len(sink.writes) <= 20
    assert threading.active_count() == before


def test_an_error_of_the_plan_waits_for_the_windows_in_flight(tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "f")
    sink = _memory(entry)

    def breaking() -> Iterator[Window]:
        for number, window in enumerate(_moving(entry)):
            if number == 30:
                raise DamagedError("w: torn")
            yield window

    with pytest.raises(DamagedError, match="w: torn"):
        execute(breaking(), sink, workers=2)
    written = len(sink.writes)
    assert 26 <= written <= 30
    assert len(sink.writes) == written


@pytest.mark.parametrize("into_file", [True, False])
def test_a_source_that_is_truncated_meanwhile_is_named(into_file: bool, tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "shard")
    os.truncate(tmp_path / "shard", 1000)
    with (tmp_path / "out").open("wb") as out:
        sink: Any = OneFile(out.fileno(), entry.shape, "uint8") if into_file else _memory(entry)
        with pytest.raises(DamagedError, match=r"shard: ends .* short; .*truncated.*copy it again"):
            execute(_moving(entry), sink)


def test_a_source_that_is_gone_is_named(tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "shard")
    (tmp_path / "shard").unlink()
    with pytest.raises(NotFoundError, match="shard: gone"):
        execute(_moving(entry), _memory(entry))


def test_no_file_stays_open_after_an_error(tmp_path: Path) -> None:
    entry = _many_windows(tmp_path / "shard")
    os.truncate(tmp_path / "shard", 1000)
    before = _open_now()
    with pytest.raises(DamagedError):
        execute(_moving(entry), _memory(entry))
    assert _open_now() == before


Copy = Callable[..., int]


def _copied(tmp_path: Path, size: int = 3 * MIB + 17) -> tuple[bytes, bytes]:
    """What `copy_range` should have copied and what it did, from byte 3 to byte 7."""
    data = np.random.default_rng(5).bytes(size)
    (tmp_path / "in").write_bytes(b"abc" + data + b"rest")
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("w+b") as target:
        copy_range(source.fileno(), 3, target.fileno(), 7, size, "in")
        return bytes(7) + data, os.pread(target.fileno(), size + 100, 0)


def test_copy_in_the_kernel(tmp_path: Path) -> None:
    expected, got = _copied(tmp_path)
    assert got == expected


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
def test_copy_through_memory_where_the_kernel_refuses(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    expected, got = _copied(tmp_path)
    assert got == expected


def test_copy_where_the_kernel_copies_little_or_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some file systems copy a part and some return 0 without an error and without having copied.
    real: Copy = os.copy_file_range
    calls: list[int] = []

    def odd(source: int, target: int, count: int, start: int, at: int) -> int:
        calls.append(count)
        return 0 if len(calls) % 2 else real(source, target, min(count, 300_000), start, at)

    monkeypatch.setattr(os, "copy_file_range", odd)
    expected, got = _copied(tmp_path)
    assert got == expected
    assert len(calls) > 2


@pytest.mark.parametrize(
    ("call", "code", "kind", "says"),
    [
        ("preadv", errno.EIO, DamagedError, "^in: cannot be read at byte 3: Input/output error"),
        ("pwrite", errno.ENOSPC, OSError, "No space left"),
    ],
)
def test_a_copy_that_fails_is_blamed_on_the_side_that_fails(
    call: str, code: int, kind: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's own copy says "Input/output error" of either.
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", fail)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(kind, match=says):
        _copied(tmp_path)


def _a_file_each(folder: Path, count: int) -> TensorEntry:
    """A tensor of `count` bytes, counted from 0, each in a file of its own."""
    chunks = []
    for number in range(count):
        (folder / str(number)).write_bytes(bytes([number % 256]))
        chunks.append(Chunk(Box((number,), (1,)), ByteSource(str(folder / str(number)), 0, (1,))))
    return TensorEntry("uint8", (count,), chunks)


@contextmanager
def _may_open(more: int) -> Iterator[None]:
    """This process may open so many files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_now() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("into_file", [True, False])
@pytest.mark.parametrize(("workers", "more"), [(2, 150), (16, 150), (2, 20)])
def test_more_files_than_a_process_may_open(tmp_path: Path, workers: int, more: int, into_file: bool) -> None:
    entry = _a_file_each(tmp_path, 400)
    memory = _memory(entry)
    with (tmp_path / "out").open("w+b") as out:
        sink: Any = OneFile(out.fileno(), entry.shape, "uint8") if into_file else memory
        with _may_open(more):
            execute(_moving(entry, 7), sink, workers=workers)
        got = os.pread(out.fileno(), 500, 5) if into_file else memory.arrays["w"].tobytes()
    assert got == bytes(range(256)) + bytes(range(144))


@pytest.mark.parametrize("more", [2000, 150])
def test_all_threads_together_keep_one_budget_of_files_open(tmp_path: Path, more: int) -> None:
    entry, workers = _a_file_each(tmp_path, 400), 8
    together, most = threading.Barrier(workers), [0]
    before = _open_now()

    class Counting(Memory):
        def write(self, name: str, box: Box, bits: Bits) -> None:
            together.wait(60)  # each thread opens as many files as the others
            most.append(_open_now() - before)

    with _may_open(more):
        execute(_moving(entry, 1), Counting({}, {"w": "uint8"}), workers=workers)
    assert workers < max(most) <= min(256, (before + more) // 4) + workers  # which have the listing open too


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_no_file_more_to_be_opened_is_no_damage(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    entry = _many_windows(tmp_path / "shard")
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(CallError, match=r"shard: cannot be opened: more files than .*; (raise|end) "):
        execute(_moving(entry), _memory(entry))


@pytest.mark.parametrize("kernel", [True, False])
def test_copy_of_a_short_source_names_it(kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    (tmp_path / "in").write_bytes(bytes(10))
    with (
        (tmp_path / "in").open("rb") as source,
        (tmp_path / "out").open("wb") as target,
        pytest.raises(DamagedError, match=r"^in: ends at byte 10, 5 bytes short"),
    ):
        copy_range(source.fileno(), 5, target.fileno(), 0, 10, "in")


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float64"])
def test_runs_longer_than_a_block_are_cast_in_place_of_the_file(wanted: str, tmp_path: Path) -> None:
    shape = (3, 100_001)  # each row is a window; all of them are more than two blocks, and none ends with one
    values = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    values[1, 7] = np.nan
    (tmp_path / "in").write_bytes(b"abcd" + values.tobytes())
    entry = TensorEntry("float32", shape, [Chunk(Box.whole(shape), ByteSource(str(tmp_path / "in"), 4, (100_001, 1)))])
    for window_bytes in (400_004, 10 * MIB):
        with (tmp_path / "out").open("w+b") as out:
            execute(_moving(entry, window_bytes), OneFile(out.fileno(), shape, wanted), workers=3)
            data = os.pread(out.fileno(), 10 * MIB, 0)
        assert data == bytes(5) + cast_bits(values.view(np.uint32), "float32", wanted).tobytes()
