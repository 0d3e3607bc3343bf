"""Headers that several processes read are those that one reads, and so are their errors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import DamagedError, IncompleteError
from milepost.layouts import open_directory, reading
from milepost.layouts.fsdp import rank_file
from milepost.layouts.headers import Header
from milepost.layouts.join import RankFiles, state_dict
from milepost.layouts.torchfile import TorchFile


def _items(file: TorchFile) -> Any:
    return state_dict(file).items()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every checkpoint is read by processes, whatever its size and though torch is imported here."""
    monkeypatch.setattr(reading, "MANY", 0)
    monkeypatch.setattr(reading, "_may_fork", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    yield
    assert not multiprocessing.active_children()


def _facts(header: Header) -> bytes:
    fields = [getattr(header, name) for name in header.__slots__]
    return pickle.dumps([field.tolist() if hasattr(field, "tolist") else field for field in fields])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", ["w3", "w4"])
def test_processes_read_the_same_headers(
    name: str, fsdp_checkpoints: Path, forking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = int(name[1:])
    files = RankFiles([fsdp_checkpoints / name / rank_file("model", world_size, rank) for rank in range(world_size)])
    forked = list(reading.read_headers(files, _items))
    monkeypatch.setattr(reading, "MANY", 1 << 60)
    alone = list(reading.read_headers(files, _items))
    assert [_facts(header) for header in forked] == [_facts(header) for header in alone]
    assert all(header.names is forked[0].names for header in forked)


def test_the_first_error_in_rank_order_comes_through(fsdp_checkpoints: Path, tmp_path: Path, forking: None) -> None:
    role = tmp_path / "actor"
    shutil.copytree(fsdp_checkpoints / "w3", role)
    for rank in (1, 2):
        shutil.copyfile(role / rank_file("model", 3, 0), role / rank_file("model", 3, rank))
    with pytest.raises(DamagedError, match=r"rank_1\.pt: was written by rank 0; it is a copy"):
        open_directory(role)


def test_what_a_killed_process_left_is_read_all_the_same(
    fsdp_checkpoints: Path, forking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()
    read = reading._read

    def dying(*args: Any) -> Header:
        if os.getpid() != here:
            os._exit(9)
        return read(*args)

    expected = {name: len(entry.chunks) for name, entry in open_directory(fsdp_checkpoints / "w3").items()}
    monkeypatch.setattr(reading, "_read", dying)
    index = open_directory(fsdp_checkpoints / "w3")
    assert {name: len(entry.chunks) for name, entry in index.items()} == expected


def test_a_file_without_tensors_is_told_from_one_with_the_same(tmp_path: Path, forking: None) -> None:
    import torch

    for rank in range(3):
        torch.save({} if rank == 1 else {"w": torch.ones(2)}, tmp_path / rank_file("model", 3, rank))
    with pytest.raises((DamagedError, IncompleteError), match=r"w: not in model_world_size_3_rank_1\.pt"):
        open_directory(tmp_path)


def test_a_process_that_trains_does_not_fork() -> None:
    import torch

    assert torch is not None
    assert not reading._may_fork()
