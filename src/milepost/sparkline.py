"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_FLAT = "▄"
_GAP = " "


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw `values` as a row of block characters, lowest value `▁`, highest `█`.

    More values than `width` are resampled: each character is the mean of its run of neighbours. Fewer values give one
    character each. NaN and infinities are left out of the means; a run of nothing else is a space. A constant curve is
    drawn at half height.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'

    Raises ValueError when `width` is not positive.
    """
    if width < 1:
        raise ValueError(f"width must be positive, not {width}")
    count = min(width, len(values))
    means = [
        _finite_mean(values[index * len(values) // count : (index + 1) * len(values) // count])
        for index in range(count)
    ]
    drawn = [mean for mean in means if mean is not None]
    if not drawn:
        return _GAP * count
    low, high = min(drawn), max(drawn)
    return "".join(_GAP if mean is None else _block(mean, low, high) for mean in means)


def _finite_mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    # Divided before adding: the mean of representable numbers is then representable too.
    return sum(value / len(finite) for value in finite) if finite else None


def _block(value: float, low: float, high: float) -> str:
    if low == high:
        return _FLAT
    # Halved, so that the span of the whole float range stays finite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]
