from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest
from diary import event, killed_run, resume, save, start, step
from html_page import SVG, numbers_of, of_class

from milepost.checkpoint.diary.history import history_of
from milepost.report.curves import Panel, draw_panel, marks_of, panels


def drawn(events: list[dict[str, Any]], title: str, width: float = 400, height: float = 190) -> ElementTree.Element:
    history = history_of(events)
    main, others, _ = panels(history)
    panel = next(panel for panel in main + others if panel.title == title)
    return ElementTree.fromstring(draw_panel("p", panel, marks_of(history), width, height))


def titles(events: list[dict[str, Any]]) -> list[str]:
    main, others, _ = panels(history_of(events))
    return [panel.title for panel in main + others]


def panel_of(events: list[dict[str, Any]], title: str) -> Panel:
    main, others, _ = panels(history_of(events))
    return next(panel for panel in main + others if panel.title == title)


REWARD = "Reward, mean"


def test_values_lie_where_they_belong() -> None:
    svg = drawn(killed_run(), REWARD, 1000, 260)
    # Steps 1 to 8 over x 50 to 990. Kept rewards 0.1 to 0.8 and a lost 0.9: the axis goes from 0, as 0.1 is near it,
    # to 0.9 + (0.9 - 0.1) / 16 = 0.95, over y 234 up to 10.
    #   step 1: x 50                      0.1: y 234 - 224 * 0.1 / 0.95 = 210.42
    #   step 8: x 990                     0.8: y 234 - 224 * 0.8 / 0.95 =  45.37
    #   step 4: x 50 + 940 * 3/7 = 452.9  0.4: y 139.68
    (line,) = of_class(svg, "line")
    places = numbers_of(line.get("d") or "")
    assert len(places) == 16
    assert places[:2] == [50, 210.4]
    assert places[6:8] == [452.9, 139.7]
    assert places[-2:] == [990, 45.4]
    dots = [(dot.get("cx"), dot.get("cy"), dot.findtext(f"{SVG}title")) for dot in of_class(svg, "dot")]
    assert dots[0] == ("50", "210.42", "step 1: 0.1")
    assert dots[-1] == ("990", "45.37", "step 8: 0.8")


def test_a_lost_step_is_drawn_from_the_kept_one_before_it() -> None:
    (lost,) = of_class(drawn(killed_run(), REWARD, 1000, 260), "lost-line")
    # step 4, as above, and step 5: x 50 + 940 * 4/7 = 587.14, 0.9: y 234 - 224 * 0.9 / 0.95 = 21.79
    assert numbers_of(lost.get("d") or "") == [452.9, 139.7, 587.1, 21.8]


def test_kills_and_resumes_are_marked_at_their_steps() -> None:
    svg = drawn(killed_run(), REWARD, 1000, 260)
    (kill,), (resumes,) = of_class(svg, "kill", "at"), of_class(svg, "resume", "at")
    # killed after step 5: x 587.14; resumed from 4 and 6: x 452.86 and 50 + 940 * 5/7 = 721.43
    assert (kill.get("d") or "").startswith("M587 234V10")
    assert [part.split(" ")[0] for part in (resumes.get("d") or "").split("M")[1::2]] == ["453", "721"]
    assert kill.findtext(f"{SVG}title") == "killed after step 5"
    assert resumes.findtext(f"{SVG}title") == "resumed from step 4, 6"


def test_a_mark_is_inside_even_where_the_steps_before_it_are_not_recorded() -> None:
    svg = drawn([start(0), resume(1, 6), step(9, 7), step(19, 8)], REWARD)
    # steps 6 to 8 over x 50 to 390
    assert (of_class(svg, "resume", "at")[0].get("d") or "").startswith("M50 ")


def test_curves_exist_for_what_is_recorded_and_nothing_else() -> None:
    assert titles([start(0)]) == []
    assert titles([event(0, "step", step=1, seconds=2.0)]) == ["Time of a step"]
    recorded = {"actor/entropy": 1, "critic/vf_loss": 2, "mine/x": 3, "actor/kl_loss": 4}
    events = [step(0, 1, **recorded), *save(1, 1), event(2, "validation", step=1, metrics={"val/acc": 1})]
    assert titles(events) == [
        REWARD, "Validation: val/acc", "KL to the reference policy", "Entropy", "Value loss", "Time of a step",
        "Time of a save", "mine/x",
    ]  # fmt: skip


def test_a_value_under_two_names_is_drawn_once_and_two_values_are_both_drawn() -> None:
    names = {"critic/score/mean": 1, "timing_s/step": 1, "critic/rewards/mean": 1}
    assert titles([step(0, 1, **names)]) == [REWARD, "Time of a step", "critic/rewards/mean"]
    panel = panel_of([step(0, 1, **{"actor/kl_loss": 1, "actor/reward_kl_penalty": 2})], "KL to the reference policy")
    assert [(curve.label, curve.kept) for curve in panel.curves] == [
        ("in the reward", ((1, 2),)),
        ("in the loss", ((1, 1),)),
    ]


def test_actor_and_critic_share_a_panel_of_their_unit() -> None:
    panel = panel_of([step(0, 1, **{"actor/lr": 1e-3, "critic/lr": 1e-2})], "Learning rate")
    assert [curve.label for curve in panel.curves] == ["actor", "critic"]


def test_more_other_metrics_than_a_page_can_hold_are_counted() -> None:
    main, others, left_out = panels(history_of([step(0, 1, **{f"m/{number}": 1.0 for number in range(50)})]))
    assert (len(main), len(others), left_out) == (2, 30, 20)


def test_a_value_that_is_no_number_breaks_the_line_and_is_marked() -> None:
    svg = drawn([step(0, 1), step(1, 2), step(2, 3, reward=math.nan), step(3, 4), step(4, 5)], REWARD)
    (line,) = of_class(svg, "line")
    assert (line.get("d") or "").count("M") == 2
    (mark,) = of_class(svg, "nan")
    assert mark.findtext(f"{SVG}title") == "step 3: not a number"
    # step 3 of 1 to 5 is the middle of x 50 to 390: 220, less half a cross
    assert numbers_of(mark.get("d") or "")[0] == 217
    assert "nan" not in ElementTree.tostring(svg, encoding="unicode").replace('class="nan"', "")


@pytest.mark.parametrize("count", [1, 5, 400])
def test_a_metric_that_never_was_a_number_draws_no_line(count: int) -> None:
    svg = drawn([event(n, "step", step=n, metrics={"x": None}) for n in range(1, count + 1)], "x")
    assert of_class(svg, "line") == of_class(svg, "band") == []
    assert of_class(svg, "nan")
    assert svg.findtext(f"{SVG}desc") == "no value is a number."


def test_one_step_stands_in_the_middle() -> None:
    svg = drawn([step(0, 7)], REWARD)
    (dot,) = of_class(svg, "dot")
    # x 50 to 390; one value in the middle of its axis, y 164 up to 10
    assert (dot.get("cx"), dot.get("cy")) == ("220", "87")
    assert "7" in [text.text for text in of_class(svg, "tick")]


def test_many_steps_are_drawn_as_means_with_a_band_that_holds_every_value() -> None:
    rewards = {333: 0.0, 777: 1.0}
    svg = drawn([step(n, n, reward=rewards.get(n, 0.5)) for n in range(1, 1001)], REWARD)
    (line,), (band,) = of_class(svg, "line"), of_class(svg, "band")
    assert len(numbers_of(line.get("d") or "")) == 2 * 240
    heights = numbers_of(band.get("d") or "")[1::2]
    # The axis goes from 0 to 1 + 1/16, over y 164 up to 10.
    assert min(heights) == pytest.approx(164 - 154 * 1 / (1 + 1 / 16), abs=0.06)
    assert max(heights) == 164


def test_many_lost_steps_are_thinned() -> None:
    first = [step(n, n, reward=(n * 7919 % 1000) / 1000) for n in range(1, 2001)]
    svg = drawn(
        [start(0), *first, start(3000), resume(3001, None), *[step(3001 + n, n, reward=0.5) for n in range(1, 2001)]],
        REWARD,
    )
    (dots,) = of_class(svg, "lost-dots")
    assert 100 < (dots.get("d") or "").count("h0") <= 300


def test_a_wide_range_of_positive_values_is_drawn_by_logarithm() -> None:
    values = [0.02, 0.03, 0.02, 40.0]
    svg = drawn([step(n, n, reward=value) for n, value in enumerate(values, 1)], REWARD)
    assert [text.text for text in of_class(svg, "note")] == ["log scale"]
    labels = [text.text for text in of_class(svg, "tick")]
    assert {"0.01", "0.1", "1", "10"} <= set(labels)


@pytest.mark.parametrize(
    "values",
    [
        (0.0, 0.0), (-5.0, -5.0), (5e-324, 1e-323), (0.0, 5e-324), (1.7e308, -1.7e308), (1.7e308, 1.7e308),
        (1.0, 1.0 + 2.3e-16), (1e-300, 1e300), (1e-290, 1e-290), (1e300, 1e300), (math.inf, 1.0),
    ],
)  # fmt: skip
def test_extreme_values_still_give_places(values: tuple[float, ...]) -> None:
    svg = drawn([step(n, n, reward=value) for n, value in enumerate(values, 1)], REWARD)
    for dot in of_class(svg, "dot"):
        assert 10 <= float(dot.get("cy") or "nan") <= 164
    assert all(math.isfinite(float(line.get("y1") or "nan")) for line in of_class(svg, "grid"))


@pytest.mark.parametrize("number", [0, -3, 10**15 - 1])
def test_any_step_number_has_a_place(number: int) -> None:
    (dot,) = of_class(drawn([step(0, number, reward=1.0)], REWARD), "dot")
    assert dot.get("cx") == "220"


def test_what_a_panel_shows_is_also_said_in_words() -> None:
    assert drawn(killed_run(), REWARD).findtext(f"{SVG}desc") == (
        "0.1 at step 1, 0.8 at step 8; lowest 0.1 at step 1, highest 0.8 at step 8. "
        "values of steps lost and done again are dashed."
    )


def test_very_many_kills_are_short_ticks_that_leave_the_curve_in_sight() -> None:
    events = [start(0), step(1, 1)]
    for number in range(2, 42):
        events += [start(10 * number), resume(10 * number + 1, number - 1), step(10 * number + 2, number)]
    kills = (of_class(drawn(events, REWARD), "kill", "at")[0].get("d") or "").split("M")[1:]
    # 40 kills after steps 1 to 40; y 164 is the axis, and 10 the top
    assert len(kills) == 2 * 40
    assert kills[0] == "50 164V156"
