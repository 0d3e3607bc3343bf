"""Casts against torch, bit for bit.

NaNs are compared as NaNs: torch writes 0xFFFF for a bfloat16 in its vectorised loops and 0x7FC0 elsewhere, and keeps or
quiets the payload of a float16 depending on the loop.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.cast import cast_bits, cast_dtype
from milepost.errors import CallError
from milepost.index import Bits, bits_dtype, itemsize

FLOATS = ("float64", "float32", "float16", "bfloat16")
_CARRIERS = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _torch_cast(bits: Bits, source: str, target: str) -> Bits:
    values = torch.from_numpy(bits.copy()).view(getattr(torch, source)).to(getattr(torch, target))
    result: Bits = values.view(_CARRIERS[itemsize(target)]).numpy()
    return result


def _is_nan(bits: Bits, dtype: str) -> Bits:
    return torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).isnan().numpy()


def _assert_as_torch(bits: Bits, source: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = cast_bits(bits, source, target)
    expected = _torch_cast(bits, source, target)
    nan = _is_nan(bits, source)
    assert np.array_equal(_is_nan(got, target), nan)
    wrong = np.flatnonzero((got != expected) & ~nan)
    assert not wrong.size, [(hex(bits[i]), hex(got[i]), hex(expected[i])) for i in wrong[:5]]


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_random_bit_patterns(source: str, target: str) -> None:
    size = itemsize(source)
    bits = np.frombuffer(np.random.default_rng(1).bytes(300_000 * size), bits_dtype(source))
    _assert_as_torch(bits, source, target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_pattern(source: str, target: str) -> None:
    _assert_as_torch(np.arange(1 << 16, dtype=np.uint16), source, target)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_every_tie_of_float32_and_its_neighbours(target: str) -> None:
    # Halfway between two neighbours of the narrow type, and one unit of float32 to either side: normal values,
    # subnormals, the edge of overflow, and infinity.
    narrow = np.arange(1 << 16, dtype=np.uint16)
    half = 1 << (15 if target == "bfloat16" else 12)
    wide = _torch_cast(narrow, target, "float32").astype(np.int64)
    bits = np.concatenate([wide + half + step for step in (-1, 0, 1)] + [wide - 1, wide + 1])
    _assert_as_torch((bits & 0xFFFFFFFF).astype(np.uint32), "float32", target)


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_float64_is_rounded_by_way_of_float32(target: str) -> None:
    # A value a little above a tie of the narrow type, so little that float32 rounds it onto the tie.
    narrow = np.arange(1 << 16, dtype=np.uint16)
    kind = "bfloat16" if target == "bfloat16" else "float16"
    ties = _torch_cast(narrow, kind, "float64").view(np.float64)
    steps = np.ldexp(np.abs(ties), -8 if kind == "bfloat16" else -11)
    with np.errstate(all="ignore"):
        values = np.concatenate([ties, ties + steps, (ties + steps) * (1 + 2.0**-40), (ties + steps) * (1 - 2.0**-40)])
    _assert_as_torch(values.view(np.uint64), "float64", target)


@pytest.mark.parametrize(
    ("source", "target", "given_bits", "expected"),
    [
        ("float32", "bfloat16", 0x3F808000, 0x3F80),  # a tie to even, down
        ("float32", "bfloat16", 0x3F818000, 0x3F82),  # a tie to even, up
        ("float32", "bfloat16", 0x3F808001, 0x3F81),
        ("float32", "bfloat16", 0x7F7FFFFF, 0x7F80),  # the largest float32 overflows to infinity
        ("float32", "bfloat16", 0xFF800000, 0xFF80),  # -infinity
        ("float32", "bfloat16", 0x80000001, 0x8000),  # a subnormal to -0
        ("float32", "bfloat16", 0x7FC00000, 0xFFFF),  # NaN
        ("float32", "bfloat16", 0x7F800001, 0xFFFF),  # a signalling NaN, that rounding alone would make infinity
        ("float32", "float16", 0x477FEFFF, 0x7BFF),  # 65519.996: the largest finite float16
        ("float32", "float16", 0x477FF000, 0x7C00),  # 65520: infinity
        ("float32", "float16", 0x33000000, 0x0000),  # 2**-25: a tie to zero
        ("float32", "float16", 0x33000001, 0x0001),
        ("bfloat16", "float32", 0xC2F7, 0xC2F70000),
        ("float16", "bfloat16", 0x0001, 0x3380),  # 2**-24, a subnormal only in float16
        ("float64", "bfloat16", 0x3FF0100000000001, 0x3F80),  # 1 + 2**-8 + 2**-52: float32 makes it a tie
        ("float32", "float64", 0x3F800001, 0x3FF0000020000000),
    ],
)
def test_by_hand(source: str, target: str, given_bits: int, expected: int) -> None:
    got = cast_bits(np.array([given_bits], bits_dtype(source)), source, target)
    assert got.dtype == bits_dtype(target)
    assert hex(got[0]) == hex(expected)


@given(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_shapes_and_views_stay(shape: list[int], source: str, target: str) -> None:
    values = np.random.default_rng(2).standard_normal([2, *shape]).astype(np.float32)
    bits = cast_bits(values.view(np.uint32), "float32", source)[1].T  # a view with strides of its own
    before = bits.copy()
    got = cast_bits(bits, source, target)
    assert got.shape == bits.shape
    assert np.array_equal(got.ravel(), _torch_cast(np.ascontiguousarray(bits).ravel(), source, target))
    assert np.array_equal(bits, before)


def test_longer_than_a_block() -> None:
    bits = np.random.default_rng(3).standard_normal((3, 200_001)).astype(np.float32).view(np.uint32)
    got = cast_bits(bits, "float32", "bfloat16")
    assert np.array_equal(got.ravel(), _torch_cast(bits.ravel(), "float32", "bfloat16"))


@pytest.mark.parametrize(("source", "target"), [("int64", "bfloat16"), ("float32", "int8"), ("float8_e5m2", "float32")])
def test_no_cast_but_between_floats(source: str, target: str) -> None:
    with pytest.raises(CallError, match=f"from {source} to {target}"):
        cast_bits(np.zeros(1, bits_dtype(source)), source, target)


@pytest.mark.parametrize(
    ("name", "dtype", "option", "expected"),
    [
        ("w", "float32", "keep", "float32"),
        ("w", "float32", "bf16", "bfloat16"),
        ("w", "bfloat16", "fp32", "float32"),
        ("w", "float64", "fp16", "float16"),
        ("counts", "int64", "bf16", "int64"),
        ("mask", "bool", "bf16", "bool"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "float32", "bf16", "float32"),
        ("decoder.layers.0.mlp.router.expert_bias", "float32", "bf16", "float32"),
    ],
)
def test_what_an_option_makes_of_a_tensor(name: str, dtype: str, option: str, expected: str) -> None:
    assert cast_dtype(name, dtype, option) == expected


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(CallError, match=r"--dtype half: choose from keep, bf16, fp16, fp32"):
        cast_dtype("w", "float32", "half")
