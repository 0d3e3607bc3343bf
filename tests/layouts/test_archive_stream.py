"""Archives laid out before they are written: what torch, zipfile and the reader of this package say of them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.checkpoint.saving.torch_pickle import pickled
from milepost.crc import crc32_of_both
from milepost.layouts.archive_stream import archive_stream
from milepost.layouts.torchfile import TorchFile

GIB = 1 << 30


def written(state: Any) -> bytes:
    """An archive of a state, put together gap by gap."""
    data_pkl, storages = pickled(state)
    plan = archive_stream(data_pkl, [storage.nbytes for storage in storages])
    found, crcs = b"", []
    for number, storage in enumerate(storages):
        gap = plan.gap(number, crcs)
        assert len(gap) == plan.gap_lengths[number]
        found += gap
        assert len(found) == plan.starts[number]
        data = storage.numpy().tobytes()
        crcs.append(zlib.crc32(data))
        found += data
    found += plan.gap(len(storages), crcs)
    assert len(found) == plan.length
    return found


def example() -> dict[str, Any]:
    weight = torch.randn(300, 7)
    return {
        "weight": weight,
        "view": weight[10:20],
        "turned": weight.t(),
        "empty": torch.zeros(0, 4),
        "bfloat16": torch.randn(33).bfloat16(),
        "float8": torch.randn(64).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "step": torch.tensor(3.0),
        "numbers": {"lr": 0.5, "betas": (0.9, 0.95), "names": ["a", "b"]},
    }


def test_torch_reads_what_was_saved_and_shared_memory_stays_shared(tmp_path: Path) -> None:
    state = example()
    path = tmp_path / "a.pt"
    path.write_bytes(written(state))
    for kwargs in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **kwargs)
        assert loaded["numbers"] == state["numbers"]
        for name in state.keys() - {"numbers"}:
            assert loaded[name].dtype == state[name].dtype
            assert torch.equal(loaded[name].float(), state[name].float()), name
        assert loaded["weight"].data_ptr() + 280 == loaded["view"].data_ptr()
        assert loaded["turned"].stride() == (1, 7)


def test_records_and_pickle_are_torch_saves_own(tmp_path: Path) -> None:
    state = example()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs.pt"
    ours.write_bytes(written(state))
    torch.save(state, theirs)
    with zipfile.ZipFile(ours) as one, zipfile.ZipFile(theirs) as other:
        assert one.testzip() is None
        found = {info.filename.partition("/")[2]: one.read(info) for info in one.infolist()}
        expected = {info.filename.partition("/")[2]: other.read(info) for info in other.infolist()}
    del expected[".data/serialization_id"]  # a hash of the others, which nobody needs to read them
    assert list(found) == list(expected)
    assert found == expected


def test_the_reader_of_this_package_finds_every_checksum_right(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(written(example()))
    file = TorchFile(path)
    assert file.has_checksums
    assert list(file.bad_records()) == []
    assert all(record.start % 64 == 0 for record in file.records())


def test_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(written({"lr_scheduler": None, "epoch": 3}))
    assert torch.load(path, weights_only=True) == {"lr_scheduler": None, "epoch": 3}


def crc32_of_zeros(length: int) -> int:
    found, done = 0, 0
    power, size = zlib.crc32(b"\0"), 1
    while size <= length:
        if length & size:
            found, done = crc32_of_both(found, power, size), done + size
        power, size = crc32_of_both(power, power, size), 2 * size
    assert done == length
    return found


def test_a_file_of_more_than_4_gib_with_a_tensor_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sparse, so that it costs neither disk nor time: all elements are 0 but the last of each tensor."""
    numels = (5 * GIB + 3, 1000, 7)
    tensors = [torch.empty(numel, dtype=torch.uint8) for numel in numels]  # never touched
    data_pkl, storages = pickled({str(number): tensor for number, tensor in enumerate(tensors)})
    plan = archive_stream(data_pkl, [storage.nbytes for storage in storages])
    path = tmp_path / "large.pt"
    crcs: list[int] = []
    with path.open("wb") as file:
        for number, numel in enumerate(numels):
            file.write(plan.gap(number, crcs))
            file.seek(numel - 1, 1)
            file.write(b"\7")
            crcs.append(crc32_of_both(crc32_of_zeros(numel - 1), zlib.crc32(b"\7"), 1))
        file.write(plan.gap(len(numels), crcs))
        assert file.tell() == plan.length > 5 * GIB
    with zipfile.ZipFile(path) as archive:
        assert [archive.getinfo(f"archive/data/{n}").file_size for n in range(3)] == list(numels)
        assert archive.read("archive/data/1") == b"\0" * 999 + b"\7"
    records = {record.name: record for record in TorchFile(path).records()}
    assert records["data/2"].crc32 == zlib.crc32(b"\0" * 6 + b"\7")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [(tensor.numel(), int(tensor[-1]), int(tensor[0])) for tensor in loaded.values()] == [
        (numel, 7, 0) for numel in numels
    ]
    path.unlink()


@pytest.mark.parametrize("count", [0xFFFF - 6, 0xFFFF - 5])
def test_very_many_records(tmp_path: Path, count: int) -> None:
    plan = archive_stream(b"x", [1] * count)
    crc = zlib.crc32(b"y")
    crcs: Sequence[int] = [crc] * count
    path = tmp_path / "many.pt"
    path.write_bytes(b"".join(plan.gap(number, crcs) + b"y" for number in range(count)) + plan.gap(count, crcs))
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == count + 5
        assert archive.read(f"archive/data/{count - 1}") == b"y"
