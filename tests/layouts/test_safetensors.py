"""The writer of safetensors files: what the library loads afterwards, and what transfers may ask of it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import Picture, entry_of, pictures

from milepost.errors import CheckpointError
from milepost.index import Box, TensorEntry, TensorIndex
from milepost.layouts.huggingface import WEIGHTS, WEIGHTS_INDEX, HuggingFaceLayout
from milepost.layouts.safetensors import SafetensorsWriter, assign_shards, with_dtype
from milepost.transfer import execute, plan


def _write(directory: Path, tensors: dict[str, TensorEntry], limit: int) -> None:
    wanted = [(name, Box.whole(entry.shape)) for name, entry in tensors.items()]
    with SafetensorsWriter(directory, tensors, limit) as writer:
        execute(plan(TensorIndex(tensors, "fsdp"), wanted, 40), writer)


@given(st.dictionaries(st.text("abc.", min_size=1), pictures(), max_size=5), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_the_library_loads_what_was_written(tensors: dict[str, Picture], limit: int) -> None:
    entries = {name: picture.entry for name, picture in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        _write(directory, entries, limit)
        files = sorted(directory.glob("*.safetensors"))
        loaded = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
        assert set(loaded) == set(tensors)
        for name, picture in tensors.items():
            assert loaded[name].dtype == getattr(torch, picture.entry.dtype)
            assert loaded[name].shape == picture.entry.shape
            assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == picture.bits.tobytes()
        index = HuggingFaceLayout().open(directory)
        assert {name: index[name].nbytes for name in index} == {name: e.nbytes for name, e in entries.items()}
        if len(files) > 1:
            noted = json.loads((directory / WEIGHTS_INDEX).read_text())
            assert noted["metadata"]["total_size"] == sum(entry.nbytes for entry in entries.values())
            assert set(noted["weight_map"]) == set(entries)
            assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        else:
            assert [file.name for file in files] == [WEIGHTS]
            assert not (directory / WEIGHTS_INDEX).exists()


def _sized(*sizes: int) -> dict[str, TensorEntry]:
    return {f"t{number}": TensorEntry("uint8", (size,), ()) for number, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((), 10, [0]),
        ((4, 6), 10, [2]),
        ((4, 7), 10, [1, 1]),
        ((4, 6, 1), 10, [2, 1]),
        ((20, 1, 1), 10, [1, 2]),
        ((1, 20, 1), 10, [1, 1, 1]),
        ((0, 10, 0), 10, [3]),
    ],
)
def test_only_a_single_tensor_passes_the_limit(sizes: tuple[int, ...], limit: int, expected: list[int]) -> None:
    shards = assign_shards(_sized(*sizes), limit)
    assert [len(shard) for shard in shards] == expected
    assert [name for shard in shards for name in shard] == list(_sized(*sizes))


def test_the_place_of_a_box_is_asked_only_for_runs(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "f", "int16", (4, 3, 5))
    with SafetensorsWriter(tmp_path, {"w": entry}, 1 << 30) as writer:
        fd, start = writer.file_range("w", Box.whole((4, 3, 5)))
        assert os.fstat(fd).st_size == start + 120
        assert writer.file_range("w", Box((2, 0, 0), (2, 3, 5))) == (fd, start + 60)
        assert writer.file_range("w", Box((1, 2, 0), (1, 1, 5))) == (fd, start + 2 * (15 + 10))
        assert writer.file_range("w", Box((1, 2, 3), (1, 1, 2))) == (fd, start + 2 * (15 + 10 + 3))
        for box in (Box((0, 0, 0), (2, 2, 5)), Box((0, 1, 0), (1, 2, 4))):
            with pytest.raises(CheckpointError, match="not one run of bytes"):
                writer.file_range("w", box)


def test_no_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path, _sized(3), 10)
    assert (tmp_path / WEIGHTS).read_bytes() == b"mine"


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_disk_is_found_before_the_work_and_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = _open_files()
    with pytest.raises(OSError, match="No space left"):
        SafetensorsWriter(tmp_path, _sized(3), 10)
    assert _open_files() == before


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_space_will_do(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    (tmp_path / "f").write_bytes(b"abc")
    _write(tmp_path, {"w": entry_of(tmp_path / "f", "uint8", (3,))}, 10)
    assert safetensors.torch.load_file(tmp_path / WEIGHTS)["w"].tolist() == list(b"abc")


def test_an_error_within_closes_the_files(tmp_path: Path) -> None:
    before = _open_files()
    with pytest.raises(KeyError), SafetensorsWriter(tmp_path, _sized(3, 3), 3):
        assert _open_files() == before + 2
        raise KeyError
    assert _open_files() == before


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configs_dtype_is_made_true_wherever_it_stands(key: str) -> None:
    config = {
        key: "float32",
        "hidden_size": 8,
        "text_config": {key: "float32", "layers": [1]},
        "rope_scaling": {"type": "yarn"},
    }
    expected = {
        key: "bfloat16",
        "hidden_size": 8,
        "text_config": {key: "bfloat16", "layers": [1]},
        "rope_scaling": {"type": "yarn"},
    }
    assert with_dtype(config, "bfloat16") == expected
    assert config[key] == "float32"
    assert with_dtype({"hidden_size": 8}, "bfloat16") == {"hidden_size": 8}
