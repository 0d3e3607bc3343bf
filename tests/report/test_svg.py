from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.report.svg import (
    Markup,
    Scale,
    clean,
    coordinate,
    joined,
    markup,
    nice_step,
    text_width,
    tick_label,
    time_scale,
)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_through_as_text(text: str) -> None:
    element = ElementTree.fromstring(markup("p", text, title=text))
    # What no page can hold is replaced; XML reads a carriage return as the end of a line, and that in an attribute as
    # a space.
    kept = clean(text).replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&#x27;", "'")
    kept = kept.replace("&amp;", "&")
    assert list(element) == []
    assert (element.text or "") == kept.replace("\r\n", "\n").replace("\r", "\n")
    assert len(element.get("title") or "") == len(kept.replace("\r\n", "\n"))
    kept.encode()


def test_what_is_markup_already_is_not_escaped_again() -> None:
    assert markup("p", markup("b", "1 < 2"), "&", None) == "<p><b>1 &lt; 2</b>&amp;</p>"
    assert joined(["<", Markup("<br>")]) == "&lt;<br>"


def test_attributes_are_escaped_and_renamed() -> None:
    assert markup("g", class_='a"b', text_anchor="end", x=1.50, y=None) == (
        '<g class="a&quot;b" text-anchor="end" x="1.5"></g>'
    )


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\x85", "\ud800", "\ufffe", "\u202e", "\u2066"])
def test_what_no_page_can_hold_or_would_turn_the_text_around_is_replaced(char: str) -> None:
    assert clean(f"a{char}b") == "a\ufffdb"


def test_coordinates_have_at_most_two_decimals() -> None:
    assert [coordinate(value) for value in (1.0, 100.0, 0.126, -0.001, 12.5)] == ["1", "100", "0.13", "0", "12.5"]


def test_width_counts_ideographs_whole_and_marks_not_at_all() -> None:
    assert text_width("abcd", 10) == pytest.approx(22.4)
    assert text_width("学習", 10) == 20
    assert text_width("e\u0301", 10) == text_width("e", 10)
    assert text_width("e\u200d", 10) == text_width("e", 10)


def test_a_scale_is_linear_or_logarithmic() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(1, 1000, 0, 90, logarithmic=True)(10) == pytest.approx(30)
    # The span of the whole range of a double is no number of its own.
    assert Scale(-1.7e308, 1.7e308, 0, 100)(0) == 50


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-3, 7, ["-2", "0", "2", "4", "6"]),
        (0, 5000, ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
        (1e-6, 3e-6, ["1.0e-06", "1.5e-06", "2.0e-06", "2.5e-06", "3.0e-06"]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in Scale(low, high, 0, 1).ticks(5)] == labels


def test_ticks_of_decades() -> None:
    assert [label for _, label in Scale(0.01, 150, 0, 1, logarithmic=True).ticks()] == ["0.01", "0.1", "1", "10", "100"]


@pytest.mark.parametrize(("least", "step"), [(1, 1), (1.1, 2), (2.3, 5), (6, 10), (0.03, 0.05), (0, 1e-300)])
def test_steps_between_ticks_are_one_two_or_five(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step, rel=1e-9, abs=0)


def test_labels_have_the_digits_that_the_step_needs() -> None:
    assert [tick_label(*pair) for pair in ((0.05, 0.05), (1500, 500), (2e-6, 1e-6), (1e-20, 1.0), (2e7, 1e7))] == [
        "0.05", "1,500", "2e-06", "0", "2e+07",
    ]  # fmt: skip


def test_time_without_gaps_is_linear() -> None:
    scale = time_scale([(100, 200), (205, 300)], 0, 400)
    assert [scale(time) for time in (100, 150, 200, 300)] == [0, 100, 200, 400]
    assert scale.folds == []


def test_a_long_gap_is_folded() -> None:
    # 200 s of 100 s busy each, and an hour between: the fold takes 44 of 444, each stretch 200
    scale = time_scale([(0, 100), (3700, 3800)], 0, 444)
    assert [scale(time) for time in (0, 100, 3700, 3800)] == [0, 200, 244, 444]
    assert scale(1900) == 222
    assert scale.folds == [(200, 244, 3600)]


def test_times_outside_are_held_at_the_ends() -> None:
    scale = time_scale([(100, 200)], 10, 20)
    assert (scale(0), scale(1e9)) == (10, 20)


def test_one_moment_has_a_place() -> None:
    assert math.isfinite(time_scale([(5, 5)], 0, 100)(5))


def test_time_ticks_carry_the_date_once_a_day() -> None:
    # 2027-01-15 23:50 UTC is 1_800_057_000
    labels = [label for _, label in time_scale([(1_800_057_000, 1_800_058_200)], 0, 1000).ticks(4)]
    assert labels == ["Jan 15, 23:50", "23:55", "Jan 16, 00:00", "00:05", "00:10"]
