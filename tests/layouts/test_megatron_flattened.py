"""Moments that Megatron before 0.16 flattened: parts of weights by hand, in dist checkpoints and as runs of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from milepost.index import Box, ByteSource, Chunk, TensorEntry
from milepost.layouts import open_directory
from milepost.layouts.dcp.metadata import read_contents
from milepost.layouts.megatron.flattened import unflattened

NAME = "decoder.layers.mlp.linear_fc2.weight"


def _flattened(whole: torch.Tensor) -> torch.Tensor:
    """[2, 3, 4], of which two tensor-parallel ranks hold [3, 2] side by side of each of two layers, as [2, 1, 2, 6]:
    layers, parts along each dimension, elements."""
    parts = [whole[layer, :, 2 * rank : 2 * rank + 2].reshape(-1) for layer in range(2) for rank in range(2)]
    return torch.stack(parts).view(2, 1, 2, 6)


def _save(
    directory: Path, master: torch.Tensor, weight: torch.Tensor, moment: torch.Tensor, *, apart: bool = False
) -> None:
    """apart: weights and optimizer in a folder each, as verl since 0.9 has them."""
    moments = {
        f"optimizer.state.fp32_param.{NAME}": _flattened(master),
        f"optimizer.state.exp_avg.{NAME}": _flattened(moment),
    }
    numbers = {"optimizer": {"optimizer": {"param_groups": [{"lr": 0.5, "step": 7}]}}}
    if apart:
        _save_dist(directory / "model" / "dist_ckpt", {NAME: weight}, {"iteration": 3})
        _save_dist(directory / "optimizer" / "dist_ckpt", moments, numbers)
    else:
        _save_dist(directory, {NAME: weight, **moments}, numbers)


def _save_dist(directory: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save(common, directory / "common.pt")


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def master() -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_put_where_they_belong(tmp_path: Path, master: torch.Tensor, dtype: torch.dtype) -> None:
    moment = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    _save(tmp_path, master, master.to(dtype), moment)
    index = open_directory(tmp_path)
    np.testing.assert_array_equal(index[f"optim/{NAME}/exp_avg"].numpy(), moment.numpy())
    np.testing.assert_array_equal(index[f"optim/{NAME}/param"].numpy(), master.numpy())
    assert index[f"optim/{NAME}/step"].numpy() == 7 and index.unread == ()


def test_an_optimizer_in_a_folder_of_its_own_is_put_together_too(tmp_path: Path, master: torch.Tensor) -> None:
    moment = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    _save(tmp_path, master, master.to(torch.bfloat16), moment, apart=True)
    index = open_directory(tmp_path)
    np.testing.assert_array_equal(index[f"optim/{NAME}/exp_avg"].numpy(), moment.numpy())
    np.testing.assert_array_equal(index[f"optim/{NAME}/param"].numpy(), master.numpy())
    assert index[f"optim/{NAME}/step"].numpy() == 7 and index.unread == ()
    assert index.objects["param_groups"] == [{"lr": 0.5, "step": 7}]
    assert index.objects["common"]["iteration"] == 3


@pytest.mark.parametrize("apart", [False, True])
def test_copies_that_are_not_the_weights_leave_a_reason(tmp_path: Path, master: torch.Tensor, apart: bool) -> None:
    """A mutant: the parts in another order."""
    _save(tmp_path, master.flip(0), master.to(torch.bfloat16), master, apart=apart)
    index = open_directory(tmp_path)
    assert list(index) == [NAME]
    assert "2 tensors of optimizer state whose shapes or values are not those of their weights" in index.unread[0]


def test_copies_that_are_damaged_stop_no_weights(tmp_path: Path, master: torch.Tensor) -> None:
    _save(tmp_path, master, master.to(torch.bfloat16), master)
    span = read_contents(tmp_path).tensors[f"optimizer.state.fp32_param.{NAME}"].spans[0]
    with span.file.open("r+b") as file:
        file.seek(span.start)
        file.write(bytes(span.length))
    index = open_directory(tmp_path)
    assert list(index) == [NAME] and index[NAME].read().equal(master.to(torch.bfloat16))
    assert "2 tensors of optimizer state cannot be read: " in index.unread[0] and "__0_0.distcp" in index.unread[0]


def _entry(path: Path, values: torch.Tensor, chunks: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> TensorEntry:
    """Values in a file, as chunks: offsets, sizes, and the element at which each begins."""
    path.write_bytes(values.numpy().tobytes())
    made = tuple(Chunk(Box(o, s), ByteSource(str(path), 4 * at, (6, 6, 6, 1)[-len(s) :])) for o, s, at in chunks)
    return TensorEntry("float32", tuple(values.shape), made)


def test_ranks_hold_runs_of_a_part(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    (tmp_path / "weight").write_bytes(whole.numpy().tobytes())
    weight = TensorEntry(
        "float32", (3, 4), (Chunk(Box((0, 0), (3, 4)), ByteSource(str(tmp_path / "weight"), 0, (4, 1))),)
    )
    flat = torch.stack([whole[:, :2].reshape(-1), whole[:, 2:].reshape(-1)]).view(1, 2, 6)
    runs = [((0, 0, 0), (1, 1, 3), 0), ((0, 0, 3), (1, 1, 3), 3), ((0, 1, 0), (1, 1, 5), 6), ((0, 1, 5), (1, 1, 1), 11)]
    found = unflattened({"param": _entry(tmp_path / "flat", flat, runs)}, weight)
    assert found is not None
    np.testing.assert_array_equal(found["param"].numpy(), whole.numpy())
    assert found["param"].chunks[1].box == Box((1, 0), (1, 1))  # the first run ends inside the second row of its part
    assert unflattened({"param": _entry(tmp_path / "flat", flat, runs[:-1])}, weight) is None  # a run is missing
    assert unflattened({"exp_avg": _entry(tmp_path / "flat", flat, runs)}, weight) is None  # nothing proves it
    assert unflattened({"param": _entry(tmp_path / "flat", flat.view(2, 1, 6), [])}, weight) is None  # other parts
