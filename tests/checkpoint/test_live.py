from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from milepost.checkpoint.live import LiveSink
from milepost.engines.base import LiveTensor
from milepost.index import DTYPES, Box, ByteSource, Chunk, TensorEntry, TensorIndex, bits_dtype, contiguous_strides
from milepost.transfer import execute, plan


def on_disk(path: Path, dtype: str, shape: tuple[int, ...]) -> tuple[TensorIndex, np.ndarray]:
    """A tensor `x` of random bits in a file, and the bits."""
    size = int(np.prod(shape))
    raw = np.random.default_rng(0).integers(0, 256, size * DTYPES[dtype].itemsize, np.uint8)
    if dtype == "bool":
        raw &= 1
    path.write_bytes(raw.tobytes())
    box = Box.whole(shape)
    entry = TensorEntry(dtype, shape, (Chunk(box, ByteSource(str(path), 0, contiguous_strides(shape))),))
    return TensorIndex({"x": entry}, "fsdp"), raw.view(bits_dtype(dtype)).reshape(shape)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"<u{size}").reshape(tensor.shape)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", [(5, 3), (7,), ()])
def test_every_element_type_arrives_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    index, bits = on_disk(tmp_path / "x", dtype, shape)
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    sink = LiveSink({"x": LiveTensor("x", shape, dtype, ((Box.whole(shape), tensor),))})
    execute(plan(index, sink.wanted(), 16), sink)
    assert np.array_equal(bits_of(tensor), bits)


def test_each_box_goes_to_its_own_view(tmp_path: Path) -> None:
    """Two boxes, one of them a strided view of a parameter that wants gradients; windows of one row."""
    index, bits = on_disk(tmp_path / "x", "float32", (6, 4))
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    rows, columns = torch.zeros(2, 4), parameter.t()[:, :3]
    boxes = ((Box((0, 0), (2, 4)), rows), (Box((0, 1), (6, 3)), columns))
    sink = LiveSink({"x": LiveTensor("x", (6, 4), "float32", boxes)})
    execute(plan(index, sink.wanted(), 12), sink)
    assert np.array_equal(bits_of(rows), bits[:2])
    assert np.array_equal(bits_of(columns), bits[:, 1:4])
    assert not parameter.t()[:, 3:].any()


def test_a_rank_that_owns_nothing_reads_nothing(tmp_path: Path) -> None:
    index, _ = on_disk(tmp_path / "x", "float32", (6, 4))
    (tmp_path / "x").unlink()
    sink = LiveSink({"x": LiveTensor("x", (6, 4), "float32", ())})
    execute(plan(index, sink.wanted(), 12), sink)
