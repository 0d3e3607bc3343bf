"""Fixtures of more than one room."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest
from ranks import run_ranks
from tiny import tiny_qwen2
from wrapped import make_wrapped
from zoo import make_zoo


@pytest.fixture(scope="session")
def fsdp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every checkpoint of `checkpoints.WORLD_SIZES`. Read only; copy what a test changes."""
    root = tmp_path_factory.mktemp("fsdp")
    run_ranks(checkpoints.write_all, 4, str(root))
    return root


@pytest.fixture(scope="session")
def dcp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of `dcp_checkpoints.write_all`, and the model `base` that they were trained from. Read only."""
    import dcp_checkpoints as writer

    root = tmp_path_factory.mktemp("dcp")
    base = tiny_qwen2(root / "base")
    run_ranks(writer.write_all, 3, str(base), str(root))
    writer.add_configs(base, root)
    return root


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, sharded by FSDP2 over two ranks, beside what transformers saved of them; see `zoo.make_zoo`."""
    return make_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, policy and value in one state dict, nested configs; see `wrapped.make_wrapped`. Read only."""
    return make_wrapped(tmp_path_factory.mktemp("wrapped"))
