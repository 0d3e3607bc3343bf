from __future__ import annotations

import math

import pytest

from milepost.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 40, ""),
        ([0, 1, 2, 3, 4, 5, 6, 7], 40, "▁▂▃▄▅▆▇█"),
        ([7, 0], 40, "█▁"),
        ([0, 8, 4], 3, "▁█▅"),  # 4/8 of eight blocks: the fifth
        ([3, 3, 3], 40, "▄▄▄"),
        ([5], 40, "▄"),
        ([0, 2, 4, 6], 2, "▁█"),  # means 1 and 5
        ([0, 0, 10, 10, 0, 0], 3, "▁█▁"),
        ([1, 2, 3, 4, 5], 2, "▁█"),  # runs of two and three values: means 1.5 and 4
        ([0, math.nan, 7], 40, "▁ █"),
        ([0, math.nan, 7, math.inf], 2, "▁█"),  # NaN and inf left out of the means 0 and 7
        ([math.nan, math.nan], 40, "  "),
        ([-1.7e308, 1.7e308], 40, "▁█"),
    ],
)
def test_draws(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_never_wider_than_asked() -> None:
    assert [len(sparkline([float(i) for i in range(n)], 10)) for n in (9, 10, 11, 19, 1000)] == [9, 10, 10, 10, 10]


def test_refuses_no_width() -> None:
    with pytest.raises(ValueError, match="width"):
        sparkline([1.0], 0)
