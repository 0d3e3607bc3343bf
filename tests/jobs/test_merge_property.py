"""merge(shard(x)) == x, bit for bit: over meshes, placements, orders of cutting, shapes, element types and strides."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import milepost

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)
Cuts = dict[int, tuple[int, ...]]
"""Tensor dimension -> mesh dimensions that cut it, in the order in which they do."""


@st.composite
def _values(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of a random type, NaNs among them, with its dimensions in any order in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape) * dtype.itemsize
    seed = draw(st.integers(0, 1 << 30))
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)
    order = draw(st.permutations(range(len(shape))))
    turned = flat.reshape([shape[d] for d in order])
    return turned.permute([order.index(d) for d in range(len(shape))])


@st.composite
def _sharded(draw: st.DrawFn, mesh: tuple[int, ...]) -> tuple[torch.Tensor, tuple[Placement, ...], Cuts]:
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    along = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    cuts = {
        d: tuple(draw(st.permutations([m for m, dim in enumerate(along) if dim == d]))) for d in set(along) - {None}
    }
    placements: list[Placement] = []
    for m, dim in enumerate(along):
        if dim is None:
            placements.append(Replicate())
            continue
        # Later mesh dimensions that cut before this one: what a split factor counts.
        before = [other for other in cuts[dim][: cuts[dim].index(m)] if other > m]
        factor = math.prod(mesh[other] for other in before)
        placements.append(Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor))
    return draw(_values(shape)), tuple(placements), cuts


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return mesh, {f"w{i}": draw(_sharded(mesh)) for i in range(3)}


def _part(whole: torch.Tensor, cuts: Cuts, mesh: tuple[int, ...], place: tuple[int, ...]) -> torch.Tensor:
    """What a rank holds: one `torch.chunk` after the other, in order."""
    for dim, mesh_dims in cuts.items():
        for m in mesh_dims:
            chunks = whole.chunk(mesh[m], dim) if whole.shape[dim] else (whole,)
            whole = chunks[place[m]] if place[m] < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def _merged(role: Path) -> dict[str, torch.Tensor]:
    (role / "huggingface").mkdir()
    (role / "huggingface" / "config.json").write_text(json.dumps({"model_type": "none that is known"}))
    milepost.merge(role, role / "out")
    return load_file(role / "out" / "model.safetensors")


def _assert_bitwise(merged: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert (merged[name].dtype, merged[name].shape) == (value.dtype, value.shape)
        one, other = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (merged[name], value))
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)), name


@given(_cases())
@settings(max_examples=50, deadline=None)
def test_what_dtensors_were_cut_into_is_merged(case: Any) -> None:
    mesh, tensors = case
    places = list(itertools.product(*map(range, mesh)))
    role = Path(tempfile.mkdtemp())

    def state(rank: int) -> dict[str, Any]:
        of = pretend.mesh(mesh)
        return {
            name: pretend.dtensor(_part(whole, cuts, mesh, places[rank]), of, placements, whole)
            for name, (whole, placements, cuts) in tensors.items()
        }

    try:
        pretend.save_ranks(role, len(places), state)
        _assert_bitwise(_merged(role), {name: whole for name, (whole, _, _) in tensors.items()})
    finally:
        shutil.rmtree(role)


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple).flatmap(_values))
@settings(max_examples=25, deadline=None)
def test_what_fsdp1_cuts_into_sharded_tensors_is_merged(world_size: int, whole: torch.Tensor) -> None:
    role = Path(tempfile.mkdtemp())
    try:
        pretend.save_ranks(role, world_size, lambda rank: {"w": pretend.sharded_tensor(whole)})
        _assert_bitwise(_merged(role), {"w": whole})
    finally:
        shutil.rmtree(role)
