"""Changing the element type on the way, bit for bit as torch does it, with numpy alone.

A NaN stays one, but which of its bit patterns it becomes is not fixed: torch's own answer differs from loop to loop
(0xFFFF or 0x7FC0 for a bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import numpy as np

from milepost.errors import CallError
from milepost.index import DTYPES, Bits, bits_dtype

CASTS: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
"""Names of `--dtype` and the element types they stand for; `keep` stands for no change."""

KEPT_IN_FLOAT32: tuple[str, ...] = ("*e_score_correction_bias", "*expert_bias")
"""Tensors that architectures define in float32 whatever the model's dtype is: routing biases."""

_BLOCK = 1 << 16  # elements; with its temporaries it stays in a core's cache


def cast_dtype(name: str, dtype: str, option: str) -> str:
    """The element type that tensor `name` of type `dtype` gets under `--dtype option`.

    Integers, booleans and the tensors that are float32 by design keep theirs.
    """
    if option == "keep":
        return dtype
    if option not in CASTS:
        raise CallError(f"--dtype {option}: choose from keep, {', '.join(CASTS)}")
    if not DTYPES[dtype].floating or any(fnmatchcase(name, pattern) for pattern in KEPT_IN_FLOAT32):
        return dtype
    return CASTS[option]


def cast_bits(bits: Bits, source: str, target: str) -> Bits:
    """Bit patterns of type `source` as bit patterns of type `target`, rounded to nearest even.

    As in torch: through float32 where neither side is float32. Every NaN becomes 0xFFFF in bfloat16, which is what
    torch's vectorised loops write.
    """
    if source == target:
        return bits
    widen = _TO_FLOAT32.get(source)
    narrow = _FROM_FLOAT32.get(target)
    if widen is None or narrow is None:
        raise CallError(f"no cast from {source} to {target}")
    flat = np.ascontiguousarray(bits).reshape(-1)
    out = np.empty(flat.size, bits_dtype(target))
    # Overflow to infinity and signalling NaNs are values like others here, nothing to warn of.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            narrow(widen(flat[block]), out[block])
    return out.reshape(bits.shape)


def _bfloat16_to_float32(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)


def _float16_to_float32(bits: Bits) -> Bits:
    return bits.view(np.float16).astype(np.float32).view(np.uint32)


def _float64_to_float32(bits: Bits) -> Bits:
    return bits.view(np.float64).astype(np.float32).view(np.uint32)


def _float32_to_bfloat16(bits: Bits, out: Bits) -> None:
    # Round to nearest even on the integer: add 0x7FFF, and one more where the last kept bit is odd.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    out[:] = rounded
    values = bits.view(np.float32)
    if values.size and np.isnan(values.max()):
        out[np.isnan(values)] = 0xFFFF


def _float32_to_float16(bits: Bits, out: Bits) -> None:
    out[:] = bits.view(np.float32).astype(np.float16).view(np.uint16)


def _float32_to_float64(bits: Bits, out: Bits) -> None:
    out[:] = bits.view(np.float32).astype(np.float64).view(np.uint64)


def _copy(bits: Bits, out: Bits) -> None:
    out[:] = bits


_TO_FLOAT32: Mapping[str, Callable[[Bits], Bits]] = MappingProxyType(
    {
        "float32": lambda bits: bits,
        "bfloat16": _bfloat16_to_float32,
        "float16": _float16_to_float32,
        "float64": _float64_to_float32,
    }
)
_FROM_FLOAT32: Mapping[str, Callable[[Bits, Bits], None]] = MappingProxyType(
    {
        "float32": _copy,
        "bfloat16": _float32_to_bfloat16,
        "float16": _float32_to_float16,
        "float64": _float32_to_float64,
    }
)
