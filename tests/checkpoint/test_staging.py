"""Files on their way to the disk: copied into pages that are used again, hashed and written by a crew."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import os
import resource
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import xxhash

from milepost.checkpoint.deadline import in_time
from milepost.checkpoint.files import StepFiles
from milepost.checkpoint.saving import staging, writing
from milepost.checkpoint.saving.staged_file import Staging
from milepost.checkpoint.saving.staging import LEAST, PAGE, PagePool
from milepost.checkpoint.saving.torch_pickle import pickled
from milepost.checkpoint.saving.writing import Crew, Piece
from milepost.errors import MilepostError, WriteError

SIZES = (3, 5_000_001, 2_100_000, 0, 64)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """28 MB, so four pages, of tensors that end anywhere in them."""
    generator = torch.Generator().manual_seed(seed)
    return {str(number): torch.randn(size, generator=generator) for number, size in enumerate(SIZES)}


def same(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    loaded = torch.load(path, weights_only=True)
    return list(loaded) == list(expected) and all(torch.equal(loaded[name], expected[name]) for name in expected)


def check_records(files: StepFiles, root: Path) -> None:
    assert files.records
    for record in files.records:
        content = (root / record.path).read_bytes()
        assert (record.size, record.xxh3_128) == (len(content), xxhash.xxh3_128(content).hexdigest())


def in_use(pool: PagePool) -> int:
    return pool.nbytes - len(pool._free) * PAGE


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    pool = PagePool()
    into = Staging.make(pool, blocking=False)
    files = StepFiles(tmp_path / "actor", tmp_path, into)
    tensors, before = state(), state()
    files.save("model.pt", tensors)
    with files.create("tensors.pt") as file:  # by torch.save itself
        torch.save(tensors, file)
    with files.create("huggingface/config.json") as file:
        file.write(b"{}")
    for tensor in tensors.values():
        tensor.zero_()
    # Nothing was written while training waited.
    assert {path.stat().st_size for path in tmp_path.rglob("*.*")} == {0}
    assert files.nbytes > 2 * 4 * sum(SIZES)
    into.copies.wait()
    into.wait()
    assert same(tmp_path / "actor/model.pt", before)
    assert same(tmp_path / "actor/tensors.pt", before)
    assert (tmp_path / "actor/huggingface/config.json").read_bytes() == b"{}"
    assert len(files.records) == 3
    check_records(files, tmp_path)
    assert in_use(pool) == 0


def test_tensors_alone_leave_behind_what_else_is_in_their_memory(tmp_path: Path) -> None:
    flat = torch.arange(10_000_000, dtype=torch.float32)
    weight = torch.nn.Parameter(flat[7:1_000_007].view(1000, 1000))
    views = {"weight": weight, "turned": flat[:6].view(2, 3).t(), "half": flat[:4].bfloat16(), "none": flat[:0]}
    given = {**views, "tied": weight, "number": torch.tensor(3), "other": [1, "a"]}
    _, storages = pickled(given, alone=True)
    assert storages[0].data_ptr() == weight.data_ptr()  # none is copied before it is copied once
    assert [storage.nbytes for storage in storages] == [4_000_000, 24, 8, 0, 8]
    clones = {name: value.detach().clone() for name, value in views.items()}
    files = StepFiles(tmp_path, tmp_path)
    files.save("model.pt", given, alone=True)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded.keys() == given.keys() and loaded["other"] == [1, "a"]
    for name, clone in clones.items():
        assert torch.equal(loaded[name], clone) and loaded[name].dtype == clone.dtype
        assert type(loaded[name]) is torch.Tensor and not loaded[name].requires_grad
    check_records(files, tmp_path)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_row_of_tensors_and_bytes_is_one_file(tmp_path: Path, blocking: bool) -> None:
    """As DCP's data files are: each part can be read alone."""
    flat = torch.randn(9_000_000)
    values = [memoryview(b"small object"), *(flat[begin : begin + size] for begin, size in ((1, 5), (3, 8_000_000)))]
    values += [flat[:0], memoryview(b""), flat[:2_500_000]]
    into = Staging.make(blocking=blocking)
    files = StepFiles(tmp_path, tmp_path, into)
    places = files.save_row("below/__0_0.distcp", values)
    expected = [bytes(value) if isinstance(value, memoryview) else value.clone() for value in values]
    flat.zero_()
    into.wait()
    content = (tmp_path / "below/__0_0.distcp").read_bytes()
    assert [start for start, _ in places] == [sum(n for _, n in places[:number]) for number in range(len(places))]
    assert sum(length for _, length in places) == len(content)
    for (start, length), value in zip(places, expected, strict=True):
        part = content[start : start + length]
        if isinstance(value, bytes):
            assert part == value
        else:
            assert zipfile.ZipFile(io.BytesIO(part)).testzip() is None
            assert torch.equal(torch.load(io.BytesIO(part), weights_only=True), value)
    check_records(files, tmp_path)


def test_pages_are_used_again_by_the_next_save(tmp_path: Path) -> None:
    pool = PagePool()
    sizes = set()
    for step in range(4):
        into = Staging.make(pool, blocking=step % 2 == 1)
        StepFiles(tmp_path / str(step), tmp_path, into).save("model.pt", state(step))
        into.wait()
        sizes.add(pool.nbytes)
        assert same(tmp_path / str(step) / "model.pt", state(step))
    assert len(sizes) == 1
    pool.close()
    assert pool.nbytes == 0


def test_what_is_beyond_the_limit_is_written_while_training_waits(tmp_path: Path) -> None:
    pool = PagePool(limit=staging.LEAST * PAGE)
    into = Staging.make(pool, blocking=False)
    files = StepFiles(tmp_path, tmp_path, into)
    tensors = {str(seed): state(seed) for seed in range(4)}  # 113 MB through 32
    for name, tensor in tensors.items():
        files.save(f"{name}.pt", tensor)
    begun = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert pool.nbytes == staging.LEAST * PAGE
    assert begun > 113e6 - 2 * pool.nbytes
    into.wait()
    for name, tensor in tensors.items():
        assert same(tmp_path / f"{name}.pt", tensor)
    check_records(files, tmp_path)


def test_a_limit_is_at_least_what_a_save_can_work_with() -> None:
    pool = PagePool(limit=1)
    pages = [pool.take() for _ in range(staging.LEAST)]
    assert pool.nbytes == staging.LEAST * PAGE
    asked: list[int] = []

    def full() -> None:
        asked.append(1)
        pool.give(pages[0])

    assert pool.take(full=full) is pages[0]
    assert asked == [1]


@pytest.mark.parametrize("short", [4096, 1000])
def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    """At a whole block past the cache, else through it."""
    pwrite = os.pwrite
    calls: list[int] = []

    def some(fd: int, data: Any, offset: int) -> int:
        calls.append(1)
        return pwrite(fd, data[:short] if len(calls) % 3 else data, offset)

    monkeypatch.setattr(os, "pwrite", some)
    files = StepFiles(tmp_path, tmp_path)
    files.save("model.pt", state())
    assert len(calls) > 3
    assert same(tmp_path / "model.pt", state())
    check_records(files, tmp_path)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, refused = os.open, []

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    files = StepFiles(tmp_path, tmp_path)
    files.save("model.pt", state())
    assert refused == [tmp_path / "model.pt"]
    assert same(tmp_path / "model.pt", state())
    check_records(files, tmp_path)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_disk_that_refuses_is_one_sentence_and_keeps_no_page(tmp_path: Path, blocking: bool) -> None:
    pool = PagePool()
    into = Staging.make(pool, blocking=blocking)
    files, tensors = StepFiles(tmp_path, tmp_path, into), state()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, limits[1]))
    try:
        with pytest.raises(WriteError, match=rf"^{tmp_path}/\d.pt: File too large"):
            for number in range(30):
                files.save(f"{number}.pt", tensors)
            into.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    into.crew.abandon()
    assert in_use(pool) == 0
    assert not [thread for thread in into.crew._threads if thread.is_alive()]


def test_what_goes_wrong_in_a_worker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = Staging.make(blocking=False)
    files = StepFiles(tmp_path, tmp_path, into)
    files.save("model.pt", state())
    monkeypatch.setattr(writing, "crc32", lambda *args: 1 // 0)
    with pytest.raises(MilepostError, match=rf"^{tmp_path}/model.pt: ZeroDivisionError"):
        into.wait()
    assert in_use(into.pool) == 0


def test_an_abandoned_crew_writes_no_more(tmp_path: Path) -> None:
    into = Staging.make(blocking=False)
    files = StepFiles(tmp_path, tmp_path, into)
    files.save("model.pt", state())
    into.crew.abandon()
    assert in_use(into.pool) == 0
    assert (tmp_path / "model.pt").stat().st_size == 0
    with pytest.raises(writing.CrewFailedError):
        files.save("more.pt", state())
    assert in_use(into.pool) == 0


def broken_off(act: Callable[[], object], number: int) -> bool:
    """Do that, and let Ctrl-C come at its call of that number; whether there is one. The interpreter looks for signals
    where a function begins, and after one in C."""
    calls = itertools.count(1)

    def come(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_return") and next(calls) == number:
            raise KeyboardInterrupt

    sys.setprofile(come)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_ctrl_c_at_any_call_leaves_a_crew_that_can_be_stopped(tmp_path: Path) -> None:
    def use(crew: Crew, path: Path) -> None:
        file = crew.open(path)
        crew.add(file, Piece(memoryview(b"bytes")))
        crew.end(file)
        crew.call(gc.collect)
        crew.unfinished()

    for number in itertools.count(1):
        crew = Crew(held=True)
        hit = broken_off(partial(use, crew, tmp_path / str(number)), number)
        assert in_time(10, crew.abandon), f"stopped at call {number}"
        if not hit:
            break
    assert number > 20


def test_ctrl_c_at_any_call_leaves_a_pool_that_still_gives(tmp_path: Path) -> None:
    def use(pool: PagePool) -> None:
        pages = [pool.take() for _ in range(LEAST)]
        assert pool.take(seconds=0.0) is None
        for page in pages:
            assert page is not None
            pool.give(page)

    for number in itertools.count(1):
        pool = PagePool(LEAST * PAGE)
        hit = broken_off(partial(use, pool), number)
        assert in_time(10, partial(pool.take, seconds=0.0)), f"stopped at call {number}"
        if not hit:
            break
    assert number > 20


def test_a_finished_file_of_another_program_is_linked_at_once_and_read_later(tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.write_bytes(b"abc" * 1000)
    into = Staging.make(blocking=False)
    files = StepFiles(tmp_path / "actor", tmp_path, into)
    files.adopt(source, "model.distcp")
    source.unlink()
    assert files.records == []
    into.wait()
    check_records(files, tmp_path)
