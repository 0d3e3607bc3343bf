from __future__ import annotations

import pytest

from milepost.checkpoint.retention import keep_last


@pytest.mark.parametrize(
    ("steps", "count", "deleted"),
    [
        ([], 1, []),
        ([5], 1, []),
        ([1, 2], 1, [1]),
        ([1, 2, 3], 5, []),
        ([10, 9, 8], 2, [8]),
        (range(9000, 10001, 100), 10, [9000]),  # 10000 is the newest, though "10000" sorts before "9000"
    ],
)
def test_the_newest_by_number_stay(steps: list[int], count: int, deleted: list[int]) -> None:
    assert keep_last(steps, count) == deleted


def test_a_damaged_step_uses_no_budget_and_goes_once_older_than_all_kept() -> None:
    damaged = {3, 5}
    assert keep_last([1, 2, 3, 4, 5, 6], 2, lambda step: step not in damaged) == [1, 2, 3]
    assert keep_last([3, 5, 6], 2, lambda step: step not in damaged) == []


def test_no_more_steps_are_looked_into_than_needed() -> None:
    seen: list[int] = []

    def is_whole(step: int) -> bool:
        seen.append(step)
        return True

    assert len(keep_last(range(10_000), 3, is_whole)) == 9_997
    assert seen == [9999, 9998, 9997]


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the newest"):
        keep_last([1], 0)
