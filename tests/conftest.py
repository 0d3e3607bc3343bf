"""Fixtures of more than one room."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest
from ranks import run_ranks
from zoo import make_zoo


@pytest.fixture(scope="session")
def fsdp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every checkpoint of `checkpoints.WORLD_SIZES`. Read only; copy what a test changes."""
    root = tmp_path_factory.mktemp("fsdp")
    run_ranks(checkpoints.write_all, 4, str(root))
    return root


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, sharded by FSDP2 over two ranks, beside what transformers saved of them; see `zoo.make_zoo`."""
    return make_zoo(tmp_path_factory.mktemp("zoo"))
