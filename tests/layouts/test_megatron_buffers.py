"""Flat buffers of Megatron by hand; those that it makes itself are in `tests/engines/test_megatron_optimizers.py`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import DamagedError
from milepost.index import TensorIndex
from milepost.layouts import open_directory
from milepost.layouts.megatron.buffers import layout


@pytest.mark.parametrize(
    ("sizes", "alone", "alignment", "bucket", "starts", "end"),
    [
        # last first, each at a multiple of 64
        ([100, 64, 3], [0, 0, 0], 64, None, [128, 64, 0], 228),
        ([100, 64, 3], [0, 0, 0], 1, None, [67, 3, 0], 167),
        # a full bucket ends with its last parameter, and the next begins there: what padded it is not in the file
        ([100, 64, 3], [0, 0, 0], 64, 70, [128, 64, 0], 228),
        ([100, 70, 3], [0, 0, 0], 64, 70, [134, 64, 0], 234),
        # one that takes a bucket of its own ends the one before, with the padding up to where it would have begun
        ([100, 64, 3], [1, 0, 0], 64, None, [128, 64, 0], 228),
        ([100, 70, 3], [1, 0, 0], 64, None, [192, 64, 0], 292),
        # and the one after it begins anew
        ([100, 70, 3], [0, 1, 0], 64, None, [134, 64, 0], 234),
        ([100, 70, 3], [0, 0, 1], 64, None, [131, 3, 0], 231),
        ([], [], 64, None, [], 0),
    ],
)
def test_layout(
    sizes: list[int], alone: list[int], alignment: int, bucket: int | None, starts: list[int], end: int
) -> None:
    assert layout(sizes, [bool(own) for own in alone], alignment, bucket) == (starts, end)


WEIGHTS = {"embedding.word_embeddings.weight": torch.ones(4, 2), "decoder.final_layernorm.weight": torch.ones(2)}
FLAT = {"numel_unpadded": 72, **dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), torch.ones(72))}
TYPES = (torch.float32, torch.float32)


def _open(directory: Path, state: Any, weights: Mapping[str, torch.Tensor] = WEIGHTS, **arguments: int) -> TensorIndex:
    folder = directory / "mp_rank_00"
    folder.mkdir()
    groups = [{"lr": 0.5, "step": 3}]
    content = {"model": weights, "optimizer": {"optimizer": {"param_groups": groups}}, "args": Namespace(**arguments)}
    torch.save(content, folder / "model_optim_rng.pt")
    torch.save(state, folder / "distrib_optim.pt")
    return open_directory(directory)


def test_a_buffer_by_hand(tmp_path: Path) -> None:
    """The norm's two numbers first, the embedding's eight from 64 on."""
    moment = torch.arange(72, dtype=torch.float32)
    index = _open(tmp_path, {"buckets_coalesced": True, 0: {TYPES: {**FLAT, "exp_avg": moment}}})
    assert index["optim/decoder.final_layernorm.weight/exp_avg"].numpy().tolist() == [0, 1]
    embedding = index["optim/embedding.word_embeddings.weight/exp_avg"].numpy()
    assert embedding.tolist() == [[64, 65], [66, 67], [68, 69], [70, 71]]
    assert index["optim/decoder.final_layernorm.weight/step"].numpy() == 3
    assert index.unread == ()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({0: {torch.float32: {"param": [torch.ones(72)]}}}, "before February 2024"),
        ({"buckets_coalesced": True, 0: {TYPES: {**FLAT, "param": torch.zeros(72)}}}, "in no order"),
        ({"buckets_coalesced": True, 0: {TYPES: FLAT}, 1: {TYPES: FLAT}}, "has 2 buffers"),
    ],
)
def test_what_cannot_be_told_leaves_a_reason(tmp_path: Path, state: Any, words: str) -> None:
    index = _open(tmp_path, state)
    assert set(index) == set(WEIGHTS)
    assert words in index.unread[0] and "distrib_optim.pt" in index.unread[0]


def test_two_places_that_fit_alike_are_not_chosen_between(tmp_path: Path) -> None:
    """A norm of zeros, of 8 elements as the output layer has: it lies at 8 where output layer and embedding have
    buckets of their own, and at 64 where a bucket ends with the 9th element. There are zeros at both."""
    weights = {**WEIGHTS, "decoder.final_layernorm.weight": torch.zeros(8), "output_layer.weight": torch.ones(4, 2)}
    flat = torch.cat([torch.ones(8), torch.zeros(64), torch.ones(8)])
    buffer = {"numel_unpadded": 80, **dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), flat)}
    index = _open(tmp_path, {"buckets_coalesced": True, 0: {TYPES: buffer}}, weights, ddp_bucket_size=9)
    assert set(index) == set(weights)
    assert "several orders of the parameters" in index.unread[0] and "distrib_optim.pt" in index.unread[0]


@pytest.mark.parametrize(
    "state",
    [
        [3],
        {"buckets_coalesced": True, 0: 5},
        {"buckets_coalesced": True, 0: {TYPES: 5}},
        {"buckets_coalesced": True, 0: {TYPES: {**FLAT, "numel_unpadded": 71}}},
        {"buckets_coalesced": True, 0: {TYPES: {**FLAT, "param": torch.ones(72, dtype=torch.float64)}}},
        {"buckets_coalesced": True, 0: {TYPES: {**FLAT, "exp_avg": None}}},
    ],
)
def test_a_file_that_megatron_does_not_write_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(DamagedError, match=r"distrib_optim\.pt"):
        _open(tmp_path, state)
