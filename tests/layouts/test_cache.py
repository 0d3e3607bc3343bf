"""A kept index: the same index as the files', or none at all."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from milepost.index import TensorIndex
from milepost.layouts import cache, open_directory
from milepost.layouts.cache import IndexCache
from milepost.layouts.fsdp import rank_file

HEAD = 17 + 16 + 8


@pytest.fixture
def role(fsdp_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of 3 ranks, with moments, and a cache that keeps indexes of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE", 1)
    shutil.copytree(fsdp_checkpoints / "w3", tmp_path / "actor")
    monkeypatch.setattr(cache, "_SETTLED", 0.0)
    return tmp_path / "actor"


def _kept(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "milepost" / "index").iterdir()
    return path


def _picture(index: TensorIndex) -> Any:
    return [
        (name, entry.dtype, entry.shape, entry.alias_of, sorted(map(str, entry.chunks)))
        for name, entry in index.items()
    ]


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each opening that reads the files themselves."""
    from milepost.layouts import fsdp

    read, calls = fsdp._read, []

    def counting(*args: Any) -> Any:
        calls.append(1)
        return read(*args)

    monkeypatch.setattr(fsdp, "_read", counting)
    return calls


def test_a_kept_index_is_the_index(role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _reads(monkeypatch)
    first = open_directory(role)
    assert len(calls) == 1
    again = open_directory(role)
    assert len(calls) == 1
    assert _picture(again) == _picture(first)
    assert any(name.startswith("optim/") for name in again)
    assert (again.files, again.world_size, again.unread) == (first.files, first.world_size, first.unread)
    assert again.objects["param_groups"] == first.objects["param_groups"]
    assert all((again[name].bits() == first[name].bits()).all() for name in first)
    assert _kept(tmp_path).stat().st_mode & 0o077 == 0
    assert not list(role.parent.glob("actor/*.tmp"))


def _touch(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))


def _replace_with_the_same_dates(path: Path) -> None:
    """Another file of the same size and time of change, as rsync -t or cp -p makes it."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("change", [_touch, _replace_with_the_same_dates])
@pytest.mark.parametrize("file", [rank_file("model", 3, 0), rank_file("model", 3, 2), rank_file("optim", 3, 1)])
def test_a_file_that_has_changed_is_read_again(
    change: Callable[[Path], None], file: str, role: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _reads(monkeypatch)
    open_directory(role)
    change(role / file)
    open_directory(role)
    assert len(calls) == 2
    open_directory(role)
    assert len(calls) == 2  # kept anew, in the place of the old one


def test_a_file_that_changes_while_it_is_read_leaves_no_index(role: Path, tmp_path: Path) -> None:
    files = [role / rank_file("model", 3, rank) for rank in range(3)]
    found = open_directory(role)
    _kept(tmp_path).unlink()
    kept = IndexCache([*files, *(role / rank_file("optim", 3, rank) for rank in range(3))])
    _touch(files[1])
    kept.write(found.entries, {})
    assert not list((tmp_path / "cache" / "milepost" / "index").iterdir())


def test_files_that_are_seconds_old_are_not_trusted_yet(
    role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_SETTLED", 1000.0)
    open_directory(role)
    assert not (tmp_path / "cache").exists()


def test_small_checkpoints_are_not_kept(role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = sum(len(entry.chunks) for entry in open_directory(role).entries.values())
    _kept(tmp_path).unlink()
    monkeypatch.setattr(cache, "LARGE", parts + 1)
    open_directory(role)
    assert not list((tmp_path / "cache" / "milepost" / "index").iterdir())
    assert cache.LARGE < 200_000


def test_a_damaged_index_is_as_none_at_all(role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _reads(monkeypatch)
    expected = _picture(open_directory(role))
    path = _kept(tmp_path)
    whole = path.read_bytes()
    step = len(whole) // 25
    spoilt = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (*range(45), *range(45, len(whole), step))
    ]
    for number, data in enumerate([b"", whole[:10], whole[:HEAD], whole[:-1], whole + b"\0", *spoilt], start=1):
        path.write_bytes(data)
        assert _picture(open_directory(role)) == expected
        assert len(calls) == number + 1
    assert path.read_bytes() == whole


def _forged(whole: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The index with its JSON changed and its digest put right."""
    length = struct.unpack("<Q", whole[33:41])[0]
    header = json.loads(whole[HEAD : HEAD + length])
    change(header)
    text = json.dumps(header).encode()
    rest = struct.pack("<Q", len(text)) + text + whole[HEAD + length :]
    return whole[:17] + xxhash.xxh3_128_digest(rest) + rest


def _entry(**new: Any) -> Callable[[dict[str, Any]], None]:
    fields = ("name", "dtype", "shape", "alias", "grid", "where")

    def change(header: dict[str, Any]) -> None:
        for field, value in new.items():
            header["entries"][0][fields.index(field)] = value

    return change


def _where(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header["entries"][0][5][position] = value

    return change


def _grid(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header["grids"][0][position] = value

    return change


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no dictionary of grids": lambda header: header.update(grids=3),
    "no entries": lambda header: header.pop("entries"),
    "no facts": lambda header: header.pop("facts"),
    "states of others": lambda header: header.update(states=[[0, 0, 0, 0, 0]]),
    "name": _entry(name=7),
    "element type": _entry(dtype="object"),
    "shape": _entry(shape=[1, 1]),
    "negative shape": _entry(shape=[-1, 4]),
    "shape of texts": _entry(shape=["4"]),
    "alias of nothing": _entry(alias="nothing"),
    "no grid of that number": _where(0, 99),
    "objects for offsets": _where(1, "|O"),
    "floats for offsets": _where(1, "<f8"),
    "other numbers": _where(1, "<i8"),
    "offsets that are not there": _where(2, 1 << 40),
    "offsets before the numbers": _where(2, -4),
    "unit": _where(3, 1 << 30),
    "unit of nothing": _where(3, 0),
    "cuts that fall": _grid(0, [[0, 9, 3], [0, 1]]),
    "cuts of another shape": _grid(0, [[0, 1, 2, 3], [0, 1]]),
    "files that are not there": _grid(1, [7, 8, 9]),
    "files counted from the end": _grid(1, [-1, -1, -1]),
    "cells of no file": _grid(2, [[0], [1], [5]]),
    "strides that go back": _grid(3, [[[-1, 1]]]),
    "strides out of the file": _grid(3, [[[1 << 40, 1]]]),
    "chunks out of the file": _entry(grid=False, where=[[[0, 0], [1, 1], 0, 1 << 40, [1, 1]]]),
    "chunks that are no tiling": _entry(grid=False, where=[[[0, 0], [1, 1], 0, 0, [1, 1]]]),
    "chunks of a file before the first": _entry(grid=False, where=[[[0, 0], [1, 1], -1, 0, [1, 1]]]),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_index_is_as_none_at_all(
    forgery: Callable[[dict[str, Any]], None], role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _reads(monkeypatch)
    expected = _picture(open_directory(role))
    path = _kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(_forged(whole, lambda header: None))
    open_directory(role)
    assert len(calls) == 1  # forged to say what it said, it still counts
    path.write_bytes(_forged(whole, forgery))
    assert _picture(open_directory(role)) == expected
    assert len(calls) == 2


def test_an_index_that_others_may_write_does_not_count(
    role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _reads(monkeypatch)
    open_directory(role)
    _kept(tmp_path).chmod(0o666)
    open_directory(role)
    assert len(calls) == 2
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    open_directory(role)
    assert len(calls) == 3


def test_no_place_for_a_cache_is_no_error(role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_directory(role)) == len(open_directory(role))


def test_the_oldest_make_room(role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_directory(role)
    first = _kept(tmp_path)
    size = first.stat().st_size
    os.utime(first, (1, 1))
    for number, room in enumerate((3 * size, 2 * size + 2 * size // 3)):
        monkeypatch.setattr(cache, "ROOM", room)
        shutil.copytree(role, tmp_path / f"other{number}")
        open_directory(tmp_path / f"other{number}")
        assert first.exists() == (number == 0)
    assert len(list(first.parent.iterdir())) == 2
