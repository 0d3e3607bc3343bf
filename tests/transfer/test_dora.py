"""m * (W + U) / |W + U|: against plain arithmetic, in any window, to the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from milepost.errors import MismatchError
from milepost.index import Box, TensorEntry
from milepost.layouts.huggingface import read_safetensors
from milepost.transfer import dora
from milepost.transfer.dora import Dora
from milepost.transfer.execute import OpenFiles
from milepost.transfer.lowrank import LowRank, Scaled, Stacked


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorEntry]:
    """A weight of [19, 13] and what DoRA has of it; norms are made 4 rows at a time from blocks of 4 x 5."""
    monkeypatch.setattr(dora, "_BAND", 4)
    monkeypatch.setattr(dora, "_BLOCK", 20)
    generator = np.random.default_rng(2)
    shapes = {"w": (19, 13), "rows": (19, 3), "columns": (3, 13), "m0": (19,), "m1": (13,), "zero": (19, 13)}
    values = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values["zero"][6] = 0
    values["none"] = np.zeros((19, 3), np.float32)
    save_file(values, tmp_path / "f.safetensors")
    return dict(read_safetensors(tmp_path / "f.safetensors"))


def changed(update: Dora, weight: np.ndarray, box: Box) -> np.ndarray:
    values = weight[box.slices()].copy()
    with OpenFiles() as files:
        update.apply(values, box, files)
    return values


@pytest.mark.parametrize("dim", [0, 1])
def test_every_window_gives_the_same_bits_and_the_right_values(entries: dict[str, TensorEntry], dim: int) -> None:
    added = LowRank(entries["rows"], entries["columns"], 0.25)
    weight = entries["w"].numpy()

    def fresh() -> Dora:
        return Dora("w", entries["w"], added, entries[f"m{dim}"], dim)

    whole = changed(fresh(), weight, Box.whole(weight.shape))
    exact = weight + 0.25 * (entries["rows"].numpy().astype(np.float64) @ entries["columns"].numpy())
    exact /= np.linalg.norm(exact, axis=1 - dim, keepdims=True)
    exact *= np.expand_dims(entries[f"m{dim}"].numpy(), 1 - dim)
    assert np.abs(whole - exact).max() < 1e-6
    kept = fresh()
    for top in range(19):
        for left in range(13):
            box = Box((top, left), (min(5, 19 - top), min(3, 13 - left)))
            assert np.array_equal(changed(kept, weight, box), whole[box.slices()])
    one = Box((7, 9), (1, 1))
    assert np.array_equal(changed(fresh(), weight, one), whole[one.slices()])


def test_a_row_of_zeros_has_no_direction(entries: dict[str, TensorEntry]) -> None:
    update = Dora("up.weight", entries["zero"], LowRank(entries["none"], entries["columns"], 1), entries["m0"], 0)
    with pytest.raises(MismatchError, match=r"up\.weight: row 6 .* is zero"):
        changed(update, entries["zero"].numpy(), Box((5, 0), (1, 2)))


def test_stacks_and_biases(entries: dict[str, TensorEntry]) -> None:
    parts = tuple(LowRank(entries["rows"], entries["columns"], scale) for scale in (0.0, 1.0, 2.0))
    product = entries["rows"].numpy() @ entries["columns"].numpy()
    values = np.zeros((2, 19, 4), np.float32)
    bias = np.ones(5, np.float32)
    with OpenFiles() as files:
        Stacked(parts).apply(values, Box((1, 0, 3), values.shape), files)
        Scaled(entries["m0"], 0.5).apply(bias, Box((4,), (5,)), files)
    assert np.allclose(values, np.stack([product[:, 3:7], 2 * product[:, 3:7]]), atol=1e-5)
    assert np.array_equal(bias, 1 + np.float32(0.5) * entries["m0"].numpy()[4:9])
