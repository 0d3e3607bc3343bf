"""`.pt` archives read as byte ranges, against torch's own reading of the same files; and every way to spoil one."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import tempfile
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import tensor_pickle, write_archive
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from milepost.errors import CallError, DamagedError, MilepostError, NotFoundError, RefusedError
from milepost.index import DTYPES, TensorEntry
from milepost.layouts.huggingface import read_safetensors
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile


def _entries(path: Path) -> dict[str, TensorEntry]:
    file = TorchFile(path)
    return {name: file.entry(value) for name, value in file.root.items() if isinstance(value, TensorRef)}


def _saved(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    torch.save(tensors, path)
    return _entries(path)


def _assert_equal(entry: TensorEntry, tensor: torch.Tensor) -> None:
    read = entry.read()
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    expected = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    assert torch.equal(read.reshape(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 5), (0, 4)])
def test_every_dtype(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    count = torch.Size(shape).numel()
    raw = torch.arange(count * DTYPES[name].itemsize, dtype=torch.uint8) % (2 if name == "bool" else 120)
    tensor = raw.view(getattr(torch, name)).reshape(shape)
    _assert_equal(_saved(tmp_path / "f.pt", {"w": tensor})["w"], tensor)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_view_of_any_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    view = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, view.dim() - 1))
        kind = data.draw(st.sampled_from(("narrow", "step", "turn", "expand", "diagonal")))
        if kind == "narrow":
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, data.draw(st.integers(0, view.shape[dim] - start)))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "turn":
            view = view.transpose(dim, 0)
        elif kind == "expand":
            view = view.unsqueeze(dim).expand(*view.shape[:dim], 3, *view.shape[dim:])
        elif view.dim() > 1:
            view = view.diagonal(0, 0, 1)
        if not view.numel() or view.dim() > 4:
            break
    with tempfile.TemporaryDirectory() as scratch:
        _assert_equal(_saved(Path(scratch) / "f.pt", {"w": view})["w"], view)


def test_views_of_one_storage_point_at_the_same_bytes(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "same": base, "row": base[1], "turned": base.t(), "other": base.clone()}
    entries = _saved(tmp_path / "f.pt", tensors)
    for name, tensor in tensors.items():
        _assert_equal(entries[name], tensor)
    starts = {name: entry.chunks[0].source.start() for name, entry in entries.items()}
    assert starts["base"] == starts["same"] == starts["turned"] == starts["row"] - 16
    assert starts["other"] != starts["base"]
    refs = TorchFile(tmp_path / "f.pt").root
    assert refs["base"] == refs["same"] != refs["other"]


def test_a_small_view_of_a_large_storage_reads_only_its_own_bytes(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    _assert_equal(_saved(tmp_path / "f.pt", {"w": base[500:503]})["w"], base[500:503])


class _Subclass(torch.Tensor):
    """A tensor that torch pickles with its class."""


def test_parameters_buffers_and_attributes(tmp_path: Path) -> None:
    plain = nn.Parameter(torch.arange(3.0))
    with_state = nn.Parameter(torch.arange(4.0))
    with_state.tensor_parallel = True  # type: ignore[attr-defined]
    with_attribute = torch.arange(5.0)
    with_attribute.note = "x"  # type: ignore[attr-defined]
    tensors = {"plain": plain, "state": with_state, "attribute": with_attribute, "buffer": nn.Buffer(torch.arange(6))}
    entries = _saved(tmp_path / "f.pt", tensors)
    assert list(entries) == list(tensors)
    for name, tensor in tensors.items():
        _assert_equal(entries[name], tensor)


def test_a_tensor_of_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2).as_subclass(_Subclass)}, tmp_path / "f.pt")
    with pytest.raises(RefusedError, match=r"test_torchfile\._Subclass"):
        TorchFile(tmp_path / "f.pt")


def test_a_state_dict_with_its_metadata(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    assert state._metadata  # type: ignore[attr-defined]
    entries = _saved(tmp_path / "f.pt", state)
    assert list(entries) == list(state)
    for name, tensor in state.items():
        _assert_equal(entries[name], tensor)


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(got, np.ndarray) and np.array_equal(got, expected.numpy())
    if isinstance(expected, np.ndarray):
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, dict):
        return type(got) is dict and list(got) == list(expected) and all(_same(got[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return type(got) is type(expected) and all(_same(*pair) for pair in zip(got, expected, strict=True))
    return type(got) is type(expected) and bool(got == expected)


def test_extra_state_holds_what_torch_loads(fsdp_checkpoints: Path) -> None:
    for rank in range(2):
        path = fsdp_checkpoints / "w2" / f"extra_state_world_size_2_rank_{rank}.pt"
        file = TorchFile(path)
        expected = torch.load(path, weights_only=False)
        assert set(expected["rng"]) == {"cpu", "numpy", "random"}
        assert _same(file.plain(file.root), expected)


def test_a_tensor_that_occurs_often_is_read_once(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 18)
    torch.save([tensor] * 1000, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    arrays = file.plain(file.root)
    assert len(arrays) == 1000
    assert all(array is arrays[0] for array in arrays)


# Archives larger than 4 GiB


def _large_archive(path: Path, size: int) -> None:
    """An archive whose storage of `size` zeros but for its last 4 bytes is a hole of the file, with zip64 records as
    torch writes them for such sizes: each number in an extra field, 0xFFFFFFFF in its own place."""

    def extra(*numbers: int) -> bytes:
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)

    pickle = tensor_pickle(count=size // 4, shape=(size // 4,))
    directory = b""
    with path.open("wb") as file:
        for name, length in (("a/data/0", size), ("a/data.pkl", len(pickle))):
            at = file.tell()
            field = extra(length, length)
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20))
            file.write(name.encode() + field)
            if length == size:
                file.seek(size - 4, os.SEEK_CUR)
                file.write(np.float32(7).tobytes())
            else:
                file.write(pickle)
            field = extra(length, length, at)
            directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, *(0xFFFFFFFF,) * 2, len(name), len(field), 0, 0, 0, 0, 0xFFFFFFFF)  # noqa: E501  # fmt: skip
            directory += name.encode() + field
        at = file.tell()
        file.write(directory)
        end = file.tell()
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(directory), at))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def test_an_archive_beyond_4_gib(tmp_path: Path) -> None:
    size = (4 << 30) + 4096
    path = tmp_path / "f.pt"
    _large_archive(path, size)
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("the file system of the temporary folder makes no holes, and 4 GiB are too much to write")
    entry = _entries(path)["w"]
    assert entry.shape == (size // 4,)
    last = entry.chunks[0].narrow(type(entry.chunks[0].box)((size // 4 - 2,), (2,)), entry.dtype)
    assert TensorEntry(entry.dtype, entry.shape, (last,)).bits(last.box).view(np.float32).tolist() == [0.0, 7.0]


# Files that are not what they should be


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"gone\.pt: no such file"):
        TorchFile(tmp_path / "gone.pt")
    with pytest.raises(NotFoundError, match="is a directory"):
        TorchFile(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x00" * 100, b"PK\x05\x06" + bytes(18), b"{}", os.urandom(5000)])
def test_a_file_of_another_kind(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(content)
    with pytest.raises(DamagedError, match=r"f\.pt: .*"):
        TorchFile(tmp_path / "f.pt")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    for read in (TorchFile, read_safetensors):
        with pytest.raises(DamagedError, match="f: is no regular file"):
            read(tmp_path / "f")


def test_a_file_of_torch_before_1_6_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedError, match=r"older than 1\.6: load and save it once"):
        TorchFile(tmp_path / "f.pt")


def test_a_compressed_archive(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "f.pt", tensor_pickle(), {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedError, match="compressed"):
        TorchFile(path)


def test_a_big_endian_archive(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "f.pt", tensor_pickle(), {"0": bytes(16)}, byteorder=b"big")
    with pytest.raises(DamagedError, match="big-endian"):
        TorchFile(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_that_is_there_twice(tmp_path: Path) -> None:
    # Which of the two counts is up to the reader, so a file could look harmless to one and not to another.
    path = write_archive(tmp_path / "f.pt", tensor_pickle(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle(offset=1, shape=(2,)))
    with pytest.raises(DamagedError, match=r"archive/data\.pkl twice"):
        TorchFile(path)


def test_an_archive_without_a_pickle(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as archive:
        archive.writestr("archive/version", "3")
    with pytest.raises(DamagedError, match=r"no record data\.pkl"):
        TorchFile(tmp_path / "f.pt")


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (5,)},
        {"offset": 1},
        {"shape": (2, 2), "strides": (3, 1)},
        {"key": "1"},
        {"storage": "DoubleStorage"},
        {"shape": (1 << 70,)},
        {"offset": 1 << 70, "shape": (1,)},
    ],
)
def test_a_tensor_outside_its_storage(arguments: dict[str, Any], tmp_path: Path) -> None:
    file = TorchFile(write_archive(tmp_path / "f.pt", tensor_pickle(**arguments), {"0": bytes(16)}))
    with pytest.raises(DamagedError, match=r"f\.pt: a tensor of shape .* reaches outside storage"):
        file.entry(file.root["w"])


def test_a_few_bytes_that_claim_to_be_terabytes(tmp_path: Path) -> None:
    # Steps of 0 let 16 bytes stand for any number of elements.
    pickle = tensor_pickle(shape=(1 << 20, 1 << 20), strides=(0, 0))
    file = TorchFile(write_archive(tmp_path / "f.pt", pickle, {"0": bytes(16)}))
    with pytest.raises(RefusedError, match="made of 16 bytes"):
        file.entry(file.root["w"])
    with pytest.raises(RefusedError):
        file.plain(file.root)


@pytest.fixture
def several(tmp_path: Path, fsdp_checkpoints: Path) -> list[Path]:
    """Files of all kinds of content: DTensors, optimizer state, generators, element types with their own pickles."""
    everything = {
        "view": torch.arange(100.0).reshape(10, 10)[2:5, ::3],
        "parameter": nn.Parameter(torch.ones(3)),
        **{name: torch.zeros(2, dtype=getattr(torch, name)) for name in DTYPES},
    }
    torch.save(everything, tmp_path / "several.pt")
    kinds = ("model", "optim", "extra_state")
    return [tmp_path / "several.pt", *(fsdp_checkpoints / "tp" / f"{kind}_world_size_4_rank_1.pt" for kind in kinds)]


def test_truncated_anywhere(several: list[Path], tmp_path: Path) -> None:
    for path in several:
        data = path.read_bytes()
        for length in [*range(0, len(data), max(1, len(data) // 100)), *range(len(data) - 30, len(data))]:
            (tmp_path / "cut.pt").write_bytes(data[:length])
            with pytest.raises(DamagedError, match=r"cut\.pt: not a whole torch\.save archive .*truncated"):
                TorchFile(tmp_path / "cut.pt")


def _read_all(path: Path) -> None:
    """Everything that a reader does with a file."""
    file = TorchFile(path)
    with contextlib.suppress(CallError):  # numpy lacks the 8-bit floats
        file.plain(file.root)
    if isinstance(file.root, dict):
        for value in file.root.values():
            if isinstance(value, TensorRef):
                file.entry(value).read()
    list(file.bad_records())


@pytest.mark.parametrize("seed", range(4))
def test_spoilt_bytes_give_an_error_of_ours_or_a_valid_read(seed: int, several: list[Path], tmp_path: Path) -> None:
    dice = random.Random(seed)
    data = several[seed].read_bytes()
    spoilt_path = tmp_path / "spoilt.pt"
    # The pickle comes first and the directory last; bytes of tensors lie between and matter least here.
    head, tail = min(len(data) // 2, 6000), min(len(data) // 2, 4000)
    started = time.monotonic()
    outcomes = {"read": 0, "error": 0}
    for _ in range(500):
        spoilt = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            place = dice.choice((dice.randrange(head), len(data) - 1 - dice.randrange(tail)))
            spoilt[place] = dice.choice((spoilt[place] ^ 1 << dice.randrange(8), dice.randrange(256), 0, 255))
        spoilt_path.write_bytes(spoilt)
        try:
            _read_all(spoilt_path)
            outcomes["read"] += 1
        except MilepostError as error:
            assert "spoilt.pt" in str(error)
            outcomes["error"] += 1
    assert outcomes["read"] > 10
    assert outcomes["error"] > 100
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # KiB


def test_a_flipped_byte_of_any_record_is_found(several: list[Path], tmp_path: Path) -> None:
    path = several[0]
    data = path.read_bytes()
    assert list(TorchFile(path).bad_records()) == []
    records = [record for record in TorchFile(path).records() if record.size]
    assert len(records) > 18
    for record in records:
        if not record.name.startswith("data/"):
            continue
        for place in (record.start, record.start + record.size - 1):
            spoilt = bytearray(data)
            spoilt[place] ^= 1
            (tmp_path / "spoilt.pt").write_bytes(spoilt)
            assert list(TorchFile(tmp_path / "spoilt.pt").bad_records()) == [record.name]


def test_the_check_of_records_tells_how_far_it_is(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "f.pt")
    file = TorchFile(tmp_path / "f.pt")
    told: list[int] = []
    assert list(file.bad_records(told.append)) == []
    assert sum(told) == sum(record.size for record in file.records())
    assert max(told) <= 1 << 20


# What an archive's directory may claim


def _patched(path: Path, old: bytes, new: bytes, place: int = 0) -> Path:
    """The file with one occurrence of `old` replaced: the first, or the last where `place` is -1."""
    data = path.read_bytes()
    at = data.rfind(old) if place else data.find(old)
    assert at >= 0 and len(old) == len(new)
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    return path


def _two_storages(path: Path) -> Path:
    return write_archive(path, tensor_pickle(), {"0": bytes(16), "1": bytes(range(16))})


def test_records_that_share_bytes_are_damage(tmp_path: Path) -> None:
    """Two names for the same bytes: the directory of the archive sends `data/1` into `data/0`."""
    path = _two_storages(tmp_path / "f.pt")
    with zipfile.ZipFile(path) as archive:
        offsets = [struct.pack("<L", archive.getinfo(f"archive/data/{key}").header_offset) for key in "01"]
    _patched(path, offsets[1] + b"archive/data/1", offsets[0] + b"archive/data/1", place=-1)
    with pytest.raises(DamagedError, match="archive/data/1 has another name before its bytes"):
        TorchFile(path)
    # the same with a header of its own inside the other's bytes
    inner = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 4, 4, 14, 0) + b"archive/data/1" + b"abcd"
    path = write_archive(tmp_path / "g.pt", tensor_pickle(), {"0": inner, "1": b"abcd"})
    with zipfile.ZipFile(path) as archive:
        outer = archive.getinfo("archive/data/0").header_offset + 30 + 14
        old = struct.pack("<L", archive.getinfo("archive/data/1").header_offset)
    _patched(path, old + b"archive/data/1", struct.pack("<L", outer) + b"archive/data/1", place=-1)
    with pytest.raises(DamagedError, match="data/1 begins inside another"):
        TorchFile(path)


@pytest.mark.parametrize("size", [17, 1 << 16, 0xFFFFFFFF])
def test_a_record_that_claims_more_than_the_file_holds(size: int, tmp_path: Path) -> None:
    path = _two_storages(tmp_path / "f.pt")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/1")
    old = struct.pack("<3L", info.CRC, 16, 16)
    _patched(path, old, struct.pack("<3L", info.CRC, size, size), place=-1)
    with pytest.raises(DamagedError, match=r"f\.pt: (record|not a whole)"):
        TorchFile(path)
        raise AssertionError  # 17 bytes reach into the directory of the archive, which is no record


@pytest.mark.parametrize(
    "name", ["archive/../../etc/passwd", "/etc/passwd", "..\\data.pkl", "archive/data/0\0x", "a" * 60000]
)
def test_names_of_records_are_never_paths(name: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "f.pt", tensor_pickle(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("placeholder")
        info.filename = info.orig_filename = name
        archive.writestr(info, b"x")
    before = sorted(tmp_path.iterdir())
    with contextlib.suppress(DamagedError):
        file = TorchFile(path)
        assert file.entry(file.root["w"]).numpy().tolist() == [0.0] * 4
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["modell-größe/data.pkl", "模型/data.pkl"])
def test_an_archive_of_another_alphabet(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as archive:
        archive.writestr(name, tensor_pickle())
        archive.writestr(name.replace("data.pkl", "data/0"), bytes(16))
    file = TorchFile(tmp_path / "f.pt")
    assert file.entry(file.root["w"]).numpy().tolist() == [0.0] * 4


def test_a_bomb_is_refused_by_its_compression_before_a_byte_is_unpacked(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "f.pt", tensor_pickle(), {"0": bytes(1 << 24)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 16
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="compressed"):
        TorchFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


@pytest.mark.parametrize("nested", [b")" + b"\x85" * 200_000, b")" + b"2\x86" * 60], ids=["deep", "wide"])
def test_a_file_whose_keys_are_nested_tuples_is_refused(nested: bytes, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "f.pt", b"\x80\x02}" + nested + b"Ns.", {})
    with pytest.raises(RefusedError, match=r"f\.pt: its pickle uses a tuple of tuples"):
        TorchFile(path)
