"""Reading models: what is not a usable tokenizer is said before anything is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from milepost.errors import CallError
from milepost.trainer.base_model import build_base_model
from milepost.trainer.models import load_tokenizer
from milepost.trainer.schema import TaskConfig, WarmStartConfig


def test_a_model_without_tokenizer_files_is_refused_by_name(tmp_path: Path) -> None:
    build_base_model(tmp_path / "model", TaskConfig(), WarmStartConfig(steps=1))
    assert load_tokenizer(tmp_path / "model").pad_token_id == 0
    shutil.copytree(tmp_path / "model", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CallError, match=r"bare: its tokenizer knows no text.*tokenizer_path"):
        load_tokenizer(tmp_path / "bare")
