from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from diary import event, killed_run, resume, save, start, step, survived_run
from html_page import SVG, numbers_of, of_class

from milepost.checkpoint.diary.history import history_of
from milepost.report.timeline import timeline

# `killed_run` is busy from 0 to 60, 80 to 120 and 140 to 180 s: 140 s. The gaps of 20 s are more than a tenth of it, so
# both are folded to 44 units, and the other 904 - 88 = 816 units from x = 84 on are 816 / 140 = 5.82857 a second.
SECOND = 816 / 140
SECOND_SESSION = 84 + 60 * SECOND + 44
THIRD_SESSION = SECOND_SESSION + 40 * SECOND + 44


def drawn(events: list[dict[str, Any]]) -> ElementTree.Element:
    return ElementTree.fromstring(timeline(history_of(events)))


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name) or "nan")


def words(svg: ElementTree.Element) -> str:
    return " | ".join(svg.itertext())


def test_a_kill_stands_at_its_last_sign_of_life() -> None:
    (kill,) = of_class(drawn(killed_run()), "kill")
    (line,) = of_class(kill, "mark")
    assert line.get("x1") == line.get("x2") == "433.71"  # 84 + 60 * 5.82857
    (cross,) = of_class(kill, "symbol")
    assert numbers_of(cross.get("d") or "")[:2] == [433.7, 57]
    assert words(kill).startswith("killed after step 5, 1 step lost; last sign of life 2027-01-15 08:01:00 UTC")


def test_resumes_stand_where_they_happened() -> None:
    marks = [line for group in of_class(drawn(killed_run()), "resume") for line in of_class(group, "mark")]
    # at 86 and 150 s: 6 s into the second session, 10 s into the third
    assert [line.get("x1") for line in marks] == ["512.69", "813.14"]
    assert [round(SECOND_SESSION + 6 * SECOND, 2), round(THIRD_SESSION + 10 * SECOND, 2)] == [512.69, 813.14]


def test_a_resume_says_from_where_and_on_how_many() -> None:
    said = [group.findtext(f"{SVG}text") for group in of_class(drawn(killed_run()), "resume")]
    assert said == ["resumes from step 4", "resumes from step 6 on 1 rank"]


def test_bars_tell_length_and_world_size() -> None:
    bars = of_class(drawn(killed_run()), "session")
    assert [(number(bar, "x"), number(bar, "width")) for bar in bars] == [
        (84, 349.71), (477.71, 233.14), (754.86, 233.14),
    ]  # fmt: skip
    # 46 for the largest world size, 2; 18 + (46 - 18) / 2 for one rank
    assert [number(bar, "height") for bar in bars] == [46, 46, 32]


def test_lost_work_is_hatched_from_the_beginning_of_the_lost_step() -> None:
    (lost,) = of_class(drawn(killed_run()), "lost")
    # step 5 took the 10 s before 60: 84 + 50 * 5.82857
    assert (lost.get("x"), lost.get("width")) == ("375.43", "58.29")


def test_saves_and_validations_have_their_places() -> None:
    svg = drawn(killed_run())
    saves = [group.find(f"{SVG}rect") for group in of_class(svg, "save", "durable")]
    assert [round(number(box, "x") - 84, 2) for box in saves[:2] if box is not None] == [180.69, 297.26]  # 31 s, 51 s
    assert "step 2 saved in 1.0 s, 2.0 MB, 2027-01-15 08:00:32 UTC" in words(svg)
    diamonds = [numbers_of(mark.get("d") or "")[0] for mark in of_class(svg, "validation")]
    assert diamonds == [round(84 + 53 * SECOND, 1), round(THIRD_SESSION + 35 * SECOND, 1)]
    assert "validation after step 4: val/exact_match 0.25" in words(svg)


def test_saves_that_failed_or_never_ended_look_different() -> None:
    svg = drawn([
        start(0), event(10, "save_requested", step=1), event(20, "save_failed", step=1, error="<no space>"),
        event(50, "save_requested", step=2), step(100, 3),
    ])  # fmt: skip
    assert len(of_class(svg, "save", "failed")) == len(of_class(svg, "save", "open")) == 1
    assert "save of step 1 failed: <no space>" in words(svg)
    assert "save of step 2 begun, end not recorded" in words(svg)


def test_a_fresh_first_start_is_no_resume_but_starting_over_is() -> None:
    svg = drawn([start(0), resume(1, None), step(9, 1), start(20), resume(21, None, mode="disable"), step(30, 1)])
    assert [group.findtext(f"{SVG}text") for group in of_class(svg, "resume")] == ["starts over"]


def test_a_week_of_silence_is_folded_and_said() -> None:
    svg = drawn([start(0), step(100, 1), start(700_000), step(700_100, 2)])
    assert "nothing ran for 8 d 2 h" in words(svg)  # 699,900 s
    assert [number(bar, "width") for bar in of_class(svg, "session")] == [430, 430]  # (904 - 44) / 2


def test_labels_that_would_collide_are_left_to_the_hover_text() -> None:
    events = [start(0), step(1000, 1)]
    for at in range(1001, 1011):
        events += [start(at, attempt=1), resume(at + 0.5, 1)]
    resumes = of_class(drawn([*events, step(2000, 2)]), "resume")
    assert len(resumes) >= 2
    labels = [group.findtext(f"{SVG}text") for group in resumes]
    assert labels[0] == "resumes from step 1" and None in labels
    assert all(group.findtext(f"{SVG}title") for group in resumes)


def test_five_thousand_saves_are_thinned_to_what_can_be_seen() -> None:
    events = [start(0), *(line for n in range(5000) for line in save(2 * n, n))]
    assert 500 < len(of_class(drawn(events), "save")) <= 905


def test_no_sessions_no_drawing() -> None:
    assert timeline(history_of([])) == ""


def test_a_label_stands_beside_its_line_and_inside_the_drawing() -> None:
    svg = drawn(killed_run())
    (kill,), (first, second) = of_class(svg, "kill"), of_class(svg, "resume")
    places = [(label.get("x"), label.get("text-anchor")) for mark in (kill, first) for label in of_class(mark, "said")]
    # 5 left of 433.71 and 5 right of 512.69
    assert places == [("428.71", "end"), ("517.69", "start")]
    # 29 letters of 11 * 0.56 * 1.2 and a margin of 5 are 219.37 wide: at 813.14 they would pass the edge at 1000
    (label,) = of_class(second, "said")
    assert (label.get("x"), label.get("text-anchor")) == ("780.63", "start")


def test_labels_are_drawn_after_the_lines_that_pass_their_row() -> None:
    svg = drawn(killed_run())
    groups = [element.get("class") for element in svg.iter() if element.get("class") in ("kill", "resume")]
    assert groups == ["kill", "resume", "resume"]


def test_very_many_kills_leave_the_rest_in_sight() -> None:
    events = [start(0), step(1, 1)]
    for number in range(2, 42):
        events += [start(10 * number), resume(10 * number + 1, number - 1), step(10 * number + 9, number)]
    kills = of_class(drawn(events), "kill")
    assert len(kills) == 40
    assert of_class(drawn(events), "said") == []
    assert {(line.get("y1"), line.get("y2")) for kill in kills for line in of_class(kill, "mark")} == {("32", "44")}
    assert all(kill.findtext(f"{SVG}title") for kill in kills)


# `survived_run`: sessions 0-139, 160-195, 210-248 and 255-273 s are 230 s; the gap of 21 s is less than a tenth of it,
# so nothing is folded, and 904 units are 273 s.
UNIT = 904 / 273


def test_how_a_session_ended_stands_at_its_end() -> None:
    svg = drawn(survived_run())
    stops = of_class(svg, "stop")
    # The kill between them has the row to itself: its label is the longer one, and comes first.
    assert [stop.findtext(f"{SVG}text") for stop in stops] == [None, "machines came"]
    places = [number(line, "x1") for stop in stops for line in of_class(stop, "mark")]
    assert places == [round(84 + at * UNIT, 2) for at in (139, 248)]
    assert words(stops[0]).startswith("stopped on SIGTERM, saved step 7, requeue; 2027-01-15 08:02:19 UTC")
    (kill,) = of_class(svg, "kill")
    assert kill.findtext(f"{SVG}text") == "killed after step 9, 2 steps lost"
    before = drawn([line for line in survived_run() if line["time"] < survived_run()[0]["time"] + 160])
    assert [stop.findtext(f"{SVG}text") for stop in of_class(before, "stop")] == ["SIGTERM, saved step 7"]


def test_an_error_that_ended_a_session_is_a_fault() -> None:
    (fault,) = of_class(drawn([start(0), event(9, "stop", reason="error", error="no GPU")]), "fault")
    assert words(fault).startswith("stopped on an error: no GPU; ")


def test_a_save_in_the_background_shows_what_training_waited_for() -> None:
    saves = of_class(drawn(survived_run()), "save")
    (slow,) = [group for group in saves if "step 4" in words(group)]
    behind, stood = slow.findall(f"{SVG}rect")
    assert behind.get("class") == "behind"
    assert number(behind, "x") == number(stood, "x") == round(84 + 104.1 * UNIT, 2)
    assert number(behind, "width") == round(13.9 * UNIT, 2) and number(stood, "width") == 2
    assert "in 14 s, of which training waited 0.40 s" in words(slow)
    assert sum("failed" in (group.get("class") or "") for group in saves) == 1


def test_a_stall_covers_the_time_it_took() -> None:
    (stall,) = of_class(drawn(survived_run()), "stall")
    (box,) = stall.findall(f"{SVG}rect")
    assert (number(box, "x"), number(box, "width")) == (round(84 + 45 * UNIT, 2), round(50 * UNIT, 2))
    assert words(stall).startswith("stall: step 4, gen took 50 s; told by ranks 0-1, ")


def test_a_stall_that_did_not_end_lasts_as_long_as_its_session() -> None:
    svg = drawn([start(0), event(40, "stall", step=1, phase="gen", limit=30.0), event(50, "stop", reason="done")])
    (box,) = of_class(svg, "stall")[0].findall(f"{SVG}rect")
    assert number(box, "width") == round(40 * 904 / 50, 2)
