"""W + scale * rows @ columns: against plain arithmetic, in any window, to the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.edits import concat, narrow
from milepost.index import Box
from milepost.layouts.huggingface import read_safetensors
from milepost.transfer import lowrank
from milepost.transfer.execute import OpenFiles
from milepost.transfer.lowrank import LowRank


@pytest.fixture
def update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LowRank:
    """An update of [19, 19] with rank 3 in tiles of 2 x 8, two side by side at a time and eight one
    below the other; its rows lie in two pieces."""
    monkeypatch.setattr(lowrank, "_TILE_ROWS", 2)
    monkeypatch.setattr(lowrank, "_TILE_PRODUCTS", 2 * 8 * 3)
    monkeypatch.setattr(lowrank, "_FACTOR_ELEMENTS", 3 * 8 * 2)
    generator = np.random.default_rng(1)
    factors = {"rows": generator.normal(size=(19, 3)), "columns": generator.normal(size=(3, 19))}
    save_file({name: value.astype(np.float32) for name, value in factors.items()}, tmp_path / "f.safetensors")
    entries = read_safetensors(tmp_path / "f.safetensors")
    rows = concat([narrow(entries["rows"], 0, 0, 3), narrow(entries["rows"], 0, 3, 16)], 0)
    return LowRank(rows, entries["columns"], 0.25)


def added(update: LowRank, box: Box) -> np.ndarray:
    values = np.ones(box.sizes, np.float32)
    with OpenFiles() as files:
        update.apply(values, box, files)
    return values


def test_every_window_gives_the_same_bits_and_the_right_values(update: LowRank) -> None:
    whole = added(update, Box((0, 0), (19, 19)))
    exact = 1 + 0.25 * (update.rows.numpy().astype(np.float64) @ update.columns.numpy().astype(np.float64))
    assert np.abs(whole - exact).max() < 1e-6
    for top in range(19):
        for left in range(19):
            for height, width in ((1, 1), (3, 5), (19 - top, 19 - left)):
                box = Box((top, left), (min(height, 19 - top), min(width, 19 - left)))
                assert np.array_equal(added(update, box), whole[box.slices()])


def test_tiles_lie_on_one_grid_whatever_is_asked_for() -> None:
    assert list(lowrank.grid(5, 9, 11, 4)) == [(4, 8), (8, 11)]
    assert list(lowrank.grid(4, 8, 11, 4)) == [(4, 8)]
    assert list(lowrank.grid(0, 11, 11, 4)) == [(0, 4), (4, 8), (8, 11)]
