"""Which layout a directory has."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from milepost.errors import CallError, NotFoundError
from milepost.layouts import LAYOUTS, find_layout, open_directory


def test_each_layout_is_told_by_its_files(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for directory, name in ((fsdp_checkpoints / "w2", "fsdp"), (tmp_path, "huggingface")):
        for backend in ("auto", name):
            layout = find_layout(directory, backend)
            assert layout is not None
            assert layout.name == name
            assert open_directory(directory, backend).layout == name


def test_another_backend_than_the_files_have_finds_nothing(fsdp_checkpoints: Path) -> None:
    assert find_layout(fsdp_checkpoints / "w2", "huggingface") is None
    with pytest.raises(NotFoundError, match="w2: holds no checkpoint of backend huggingface"):
        open_directory(fsdp_checkpoints / "w2", "huggingface")


def test_an_unknown_backend_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CallError, match="--backend hf: choose from auto, fsdp, deepspeed, "):
        find_layout(tmp_path, "hf")


def test_a_directory_that_is_empty_or_none(tmp_path: Path) -> None:
    assert find_layout(tmp_path) is None
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        open_directory(tmp_path)
    with pytest.raises(NotFoundError, match="no such directory"):
        open_directory(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="no such directory"):
        open_directory(tmp_path / "file")


def test_names_of_layouts_are_distinct() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_a_layout_is_listed_under_its_own_name() -> None:
    assert [layout.name for layout in LAYOUTS] == [layout.itself.name for layout in LAYOUTS]  # type: ignore[attr-defined]
