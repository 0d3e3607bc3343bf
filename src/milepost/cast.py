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

BLOCK = 1 << 18
"""Elements that are cast at a time: with what a cast needs beside them they stay in a core's cache."""


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


class Cast:
    """One cast, with the memory that it needs, which is used again block after block: to touch fresh memory costs more
    than to cast. One a thread.

    Raises CallError where there is no cast between the two types.
    """

    def __init__(self, source: str, target: str, block: int = BLOCK) -> None:
        for side, steps in ((source, _TO_FLOAT32), (target, _FROM_FLOAT32)):
            if side != "float32" and side not in steps:
                raise CallError(f"no cast from {source} to {target}")
        self._widen = _TO_FLOAT32.get(source)
        self._narrow = _FROM_FLOAT32[target](block) if target in _FROM_FLOAT32 else None
        self._wide = np.empty(block if self._widen and self._narrow else 0, np.uint32)

    def __call__(self, bits: Bits, out: Bits) -> None:
        """Cast at most `block` elements, both sides flat. `bits` stay as they are."""
        if self._widen and self._narrow:
            wide = self._wide[: bits.size]
            self._widen(bits, wide)
            self._narrow(wide, out)
        else:
            (self._widen or self._narrow or _copy)(bits, out)


def cast_bits(bits: Bits, source: str, target: str) -> Bits:
    """Bit patterns of type `source` as bit patterns of type `target`, rounded to nearest even.

    As in torch: through float32 where neither side is float32. Every NaN becomes 0xFFFF in bfloat16, which is what
    torch's vectorised loops write.
    """
    if source == target:
        return bits
    flat = np.ascontiguousarray(bits).reshape(-1)
    out = np.empty(flat.size, bits_dtype(target))
    cast = Cast(source, target, min(BLOCK, flat.size))
    with no_warnings():
        for start in range(0, flat.size, BLOCK):
            block = slice(start, start + BLOCK)
            cast(flat[block], out[block])
    return out.reshape(bits.shape)


def no_warnings() -> np.errstate:
    """The context for a `Cast`: overflow to infinity and signalling NaNs are values like others, nothing to warn of."""
    return np.errstate(over="ignore", invalid="ignore")


def _bfloat16_to_float32(bits: Bits, out: Bits) -> None:
    out[...] = bits
    out <<= np.uint32(16)


def _float16_to_float32(bits: Bits, out: Bits) -> None:
    out.view(np.float32)[...] = bits.view(np.float16)


def _float64_to_float32(bits: Bits, out: Bits) -> None:
    out.view(np.float32)[...] = bits.view(np.float64)


class _ToBfloat16:
    """float32 to bfloat16 in the fewest passes over memory that numpy allows.

    Rounding adds half a unit of the last kept bit, 0x8000, and takes the upper half: to nearest, ties away from zero.
    A tie is where the sum's lower half is 0; there the last bit is cleared, which makes it the even one.
    """

    def __init__(self, block: int) -> None:
        self._sums = np.empty(block + 1, np.uint32)
        self._lower = np.empty(block, np.uint16)
        self._ties = np.empty(block, np.bool_)

    def __call__(self, bits: Bits, out: Bits) -> None:
        size = bits.size
        sums, lower, ties = self._sums[:size], self._lower[:size], self._ties[:size]
        np.add(bits, np.uint32(0x8000), out=sums)
        # Narrowing keeps an element's lower half. Read two bytes further on, that is the upper half of the sum: several
        # times as fast as shifting, or as taking every second element.
        out[...] = np.ndarray(size, np.uint32, self._sums, 2)
        lower[...] = sums
        np.equal(lower, 0, out=ties)
        (places,) = ties.nonzero()
        if places.size > size >> 5:  # values that were 16 bits wide before
            np.copyto(lower, ties)
            out &= np.invert(lower, out=lower)
        else:
            out[places] &= np.uint16(0xFFFE)
        values = bits.view(np.float32)
        if size and np.isnan(values.max()):
            out[np.isnan(values)] = 0xFFFF


def _float32_to_float16(bits: Bits, out: Bits) -> None:
    out.view(np.float16)[...] = bits.view(np.float32)


def _float32_to_float64(bits: Bits, out: Bits) -> None:
    out.view(np.float64)[...] = bits.view(np.float32)


def _copy(bits: Bits, out: Bits) -> None:
    out[...] = bits


_Step = Callable[[Bits, Bits], None]
_TO_FLOAT32: Mapping[str, _Step] = MappingProxyType(
    {
        "bfloat16": _bfloat16_to_float32,
        "float16": _float16_to_float32,
        "float64": _float64_to_float32,
    }
)
_FROM_FLOAT32: Mapping[str, Callable[[int], _Step]] = MappingProxyType(
    {
        "bfloat16": _ToBfloat16,
        "float16": lambda _: _float32_to_float16,
        "float64": lambda _: _float32_to_float64,
    }
)
"""Given the size of a block: the step, with its memory."""
