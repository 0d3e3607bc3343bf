"""Which steps stay: the policies as tables, and that no more of the disk is looked at than needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from milepost.checkpoint.retention import (
    AnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    Pinned,
    Policy,
    Retention,
    decide,
    exports_to_drop,
)
from milepost.errors import ConfigError


@dataclass(frozen=True)
class Plain:
    """A step as plain facts."""

    step: int
    own: bool = True
    whole: bool = True
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_export: bool = False


def measured(**values: float) -> list[Plain]:
    """Steps `s1`, `s2`, ... with these rewards."""
    return [Plain(int(name[1:]), metrics={"r": value}) for name, value in values.items()]


def going(steps: list[Plain], policy: Policy | None) -> list[int]:
    return [decision.step for decision in decide(steps, policy) if not decision.kept]


@pytest.mark.parametrize(
    ("numbers", "policy", "gone"),
    [
        ([], KeepLast(1), []),
        ([5], KeepLast(1), []),
        ([1, 2], KeepLast(1), [1]),
        ([1, 2, 3], KeepLast(5), []),
        ([10, 9, 8], KeepLast(2), [8]),
        (range(9000, 10001, 100), KeepLast(10), [9000]),  # 10000 is the newest, though "10000" sorts before "9000"
        (range(1, 11), KeepEvery(4), [1, 2, 3, 5, 6, 7, 9]),  # 10 is the newest
        (range(1, 11), AnyOf((KeepLast(2), KeepEvery(4))), [1, 2, 3, 5, 6, 7]),
        (range(1, 4), AnyOf(()), [1, 2]),
        (range(1, 4), None, []),
    ],
)
def test_steps_that_go(numbers: range | list[int], policy: Policy | None, gone: list[int]) -> None:
    assert going([Plain(number) for number in numbers], policy) == gone


@pytest.mark.parametrize(
    ("steps", "policy", "gone"),
    [
        (measured(s1=0.1, s2=0.9, s3=0.5, s4=0.2), KeepBest("r"), [1, 3]),
        (measured(s1=0.1, s2=0.9, s3=0.5, s4=0.2), KeepBest("r", 2), [1]),
        (measured(s1=0.1, s2=0.9, s3=0.5, s4=0.2), KeepBest("r", mode="min"), [2, 3]),
        (measured(s1=0.5, s2=0.5, s3=0.5, s4=0.1), KeepBest("r"), [1, 2]),  # equal: the newer
        (measured(s1=math.nan, s2=0.2, s3=math.inf, s4=0.1), KeepBest("r"), [1, 3]),
        ([*measured(s1=0.9), Plain(2), Plain(3)], KeepBest("r"), [2]),  # 2 has no value
        ([Plain(1), Plain(2)], KeepBest("misspelled"), []),  # nothing can be judged
    ],
)
def test_the_best_by_a_metric(steps: list[Plain], policy: Policy, gone: list[int]) -> None:
    assert going(steps, policy) == gone


def test_a_damaged_step_is_none_of_the_best() -> None:
    steps = [Plain(1, metrics={"r": 1}, whole=False), Plain(2, metrics={"r": 0.5}), Plain(3, metrics={"r": 0.1})]
    assert going(steps, KeepBest("r")) == [1]


def test_a_damaged_step_uses_no_budget_and_goes_once_older_than_all_kept() -> None:
    def steps(*numbers: int) -> list[Plain]:
        return [Plain(number, whole=number not in (3, 5)) for number in numbers]

    assert going(steps(1, 2, 3, 4, 5, 6), KeepLast(2)) == [1, 2, 3]
    assert going(steps(3, 5, 6), KeepLast(2)) == []
    assert going(steps(3, 5), KeepEvery(10)) == []  # none is whole: none goes
    assert going(steps(3, 4, 5), KeepEvery(10)) == [3]  # 4 is the newest whole one, 5 is newer


def test_what_is_not_ours_or_pinned_stays_and_each_says_why() -> None:
    steps = [Plain(1, own=False), Plain(2, pinned=True), Plain(3), Plain(4), Plain(5), Plain(6, own=False)]
    policy = Retention(keep_last=1, keep_every=4).policy
    assert [(d.step, d.kept, d.why) for d in decide(steps, policy)] == [
        (1, True, "not written by milepost, which deletes only its own"),
        (2, True, "pinned"),
        (3, False, "nothing keeps it"),
        (4, True, "a multiple of 4"),
        (5, True, "the last"),
        (6, True, "not written by milepost, which deletes only its own"),
    ]
    both = decide([Plain(4)], Retention(keep_last=2, keep_every=4).policy)
    assert both[0].why == "one of the last 2; a multiple of 4"


def test_steps_of_others_use_no_budget() -> None:
    steps = [Plain(1), Plain(2), *(Plain(number, own=False) for number in (3, 4, 5))]
    assert going(steps, KeepLast(2)) == []


@pytest.mark.parametrize(("count", "dropped"), [(None, ()), (0, (1, 3)), (1, (1, 3)), (2, (1,)), (9, ())])
def test_exports_have_a_budget_of_their_own(count: int | None, dropped: tuple[int, ...]) -> None:
    steps = [
        Plain(1, has_export=True),
        Plain(2, has_export=True, pinned=True),
        Plain(3, has_export=True),
        Plain(4, has_export=True, own=False),
        Plain(5),
        Plain(6, has_export=True),
    ]
    assert exports_to_drop(steps, count) == (dropped if count else dropped and (*dropped, 6))


def test_no_more_steps_are_looked_into_than_needed() -> None:
    seen: list[int] = []

    class Watched(Plain):
        @property
        def whole(self) -> bool:  # type: ignore[override]
            seen.append(self.step)
            return True

        def __init__(self, step: int) -> None:
            object.__setattr__(self, "step", step)
            object.__setattr__(self, "own", True)
            object.__setattr__(self, "pinned", False)

    assert len(going([Watched(number) for number in range(10_000)], Retention(keep_last=3).policy)) == 9_997
    assert sorted(set(seen)) == [9997, 9998, 9999]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0}, {"keep_every": 0}, {"keep_best": "r", "keep_best_count": 0},
        {"keep_best": "r", "keep_best_mode": "most"}, {"keep_exports": -1},
    ],
)  # fmt: skip
def test_keeping_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{list(wrong)[-1]}="):
        Retention(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("aimless", [{"keep_best_count": 2}, {"keep_best_mode": "min"}])
def test_what_is_said_of_the_best_needs_a_metric(aimless: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without keep_best"):
        Retention(keep_last=3, **aimless)
    assert Retention(keep_best="r", **aimless).keep_best == "r"
    assert Retention(keep_last=3, keep_best_count=1, keep_best_mode="max").keep_last == 3


def test_the_diary_has_what_a_run_keeps() -> None:
    kept = Retention(keep_last=3, keep_every=100, keep_best="val/r", keep_exports=2)
    assert Retention.from_json(kept.as_json()) == kept
    assert str(kept) == (
        "the last 3, every multiple of 100, the best by val/r (max), what is pinned; exports of the last 2"
    )
    assert str(Retention()) == "all steps" and Retention().keeps_all and Retention().policy is None
    assert Retention.from_json({"keep_last": 0}) is None and Retention.from_json("x") is None
    assert Pinned().keeps([Plain(1), Plain(2, pinned=True)]) == {2: "pinned"}
