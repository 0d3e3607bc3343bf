from __future__ import annotations

import json
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from diary import commit_step, event, killed_run, made_run, resume, save, start, step, write_events
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.checkpoint.diary.events import EVENTS
from milepost.errors import NotFoundError, WriteError
from milepost.report import render_report, write_report

ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(1)><!--'&amp;</title></style></svg>"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3", "p", "div", "dl", "dt", "dd",
    "b", "span", "i", "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td",
    "ul", "li",
    "svg", "desc", "defs", "pattern", "path", "rect", "line", "text", "g", "circle",
}  # fmt: skip


def is_offline(page: Page) -> None:
    """Nothing is loaded and nothing is run."""
    assert set(page.tags) <= TAGS
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "style", "srcset", "action"}
    assert not [name for name in names if name.startswith("on")]
    source = page.source.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "http" not in source and "@import" not in source
    assert re.findall(r"url\((.*?)\)", source) == ["#lost-work"]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_the_page_of_a_killed_run(tmp_path: Path) -> None:
    page = Page(render_report(made_run(tmp_path / "run")))
    is_offline(page)
    assert page.text("h1") == "run"
    assert page.text("h2") == "Timeline Where the time went Curves Starts and resumes Steps on disk"
    assert page.text("h3") == "Reward, mean Validation: val/exact_match Time of a step Time of a save"
    assert len(page.drawings()) == 6
    assert "Begun 2027-01-15 08:00:00 UTC · done 2027-01-15 08:03:00 UTC · run r1" in page.text()
    for words in ("Red dashes", "Green:", "Dashed values", "Hatched"):
        assert words in page.text()


def test_every_name_in_a_page_is_there_once(tmp_path: Path) -> None:
    page = Page(render_report(made_run(tmp_path / "run")))
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names)) == 2 * 6 + 1
    told = {
        name for attribute, value in page.attributes if attribute == "aria-labelledby" for name in str(value).split()
    }
    assert told == set(names) - {"lost-work"}


def test_what_is_not_there_is_not_explained(tmp_path: Path) -> None:
    text = Page(render_report(write_events(tmp_path, [start(0), resume(1, None), step(2, 1)]))).text()
    for words in ("Red dashes", "Green:", "Dashed values", "Hatched", "Diamonds"):
        assert words not in text


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    run = tmp_path / ATTACK.replace("/", "|")
    skipped = [{"folder": ATTACK, "why": ATTACK}]
    parts = [{"name": ATTACK, "state": state, "why": why} for state in ("restored", ATTACK) for why in ("", ATTACK)]
    write_events(run, [
        start(0, run_id=ATTACK, host=ATTACK, engine=ATTACK, version=ATTACK),
        resume(1, 3, parts=parts, skipped=skipped, folder=ATTACK, notes=[ATTACK]),
        step(2, 4, **{ATTACK: 1.0}),
        event(3, "validation", step=4, metrics={ATTACK: 1.0}),
        event(4, "save_failed", step=4, error=ATTACK),
        event(5, "stop", reason=ATTACK, error=ATTACK),
    ])  # fmt: skip
    commit_step(run, 4, roles={ATTACK: "fsdp"})
    (commit_step(run, 5) / "actor/model.pt").unlink()
    page = Page(render_report(run))
    is_offline(page)
    page.drawings()
    assert page.text().count("<script>alert(1)</script>") >= 14
    assert page.text("title").startswith('"><script>')


def test_the_same_run_gives_the_same_page_wherever_and_whenever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run")
    first = render_report(run)
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        changed.setattr(time, "time", lambda: 2e9)
        second = render_report(run)
    time.tzset()
    assert second == first


@pytest.mark.parametrize("content", [None, "", "torn {"])
def test_a_run_without_events_shows_its_steps(tmp_path: Path, content: str | None) -> None:
    commit_step(tmp_path / "run", 3)
    if content is not None:
        (tmp_path / "run" / EVENTS).write_text(content)
    page = Page(render_report(tmp_path / "run"))
    assert page.drawings() == []
    assert "No events recorded" in page.text() and "global_step_3" in page.text()


def test_an_empty_run_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    page = Page(render_report(tmp_path))
    assert "None yet." in page.text() and page.drawings() == []


def test_one_step_is_a_page_too(tmp_path: Path) -> None:
    page = Page(render_report(write_events(tmp_path, [step(0, 1)])))
    assert len(page.drawings()) == 4  # the timeline, where the time went, the reward, the time of a step


def test_values_that_are_no_numbers_are_said_so(tmp_path: Path) -> None:
    events = [event(0, "step", step=1, reward=None, metrics={"actor/pg_loss": None})]
    page = Page(render_report(write_events(tmp_path, events)))
    assert page.text("span").count("not a number") == 2
    assert not re.search(r"\b(nan|inf)\b", page.source.replace('class="nan"', "").replace(".nan ", ""))


def test_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NotFoundError):
            render_report(path)


def test_five_thousand_steps_make_a_small_page_quickly(tmp_path: Path) -> None:
    metrics = [f"group{index % 5}/metric{index}" for index in range(40)]
    events, at = [start(0), resume(1, None)], 1.0
    # Saved every 5 steps, and every 500 killed 3 steps after a save.
    for number in range(1, 5001):
        at += 10
        values = {name: number**0.5 + index for index, name in enumerate(metrics)}
        events.append(step(at, number, reward=(number * 7919 % 997) / 997, **values))
        if number % 5 == 0:
            events += save(at + 1, number)
        if number % 500 == 0:
            lost = [step(at + 10 * again, number + again, reward=0.5, **values) for again in (1, 2, 3)]
            kill = event(at + 61, "kill_seen", last_step=number + 3, committed_step=number, lost_steps=3)
            events += [*lost, start(at + 60), kill, resume(at + 62, number)]
            at += 62
    write_events(tmp_path, events)
    begun = time.perf_counter()
    text = render_report(tmp_path)
    assert time.perf_counter() - begun < 10
    assert len(text.encode()) < 1_000_000
    assert len(Page(text).drawings()) == 35  # timeline, shares, reward, two times, 30 of 40 others


def test_the_page_is_written_into_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert write_report(run) == run / "report.html"
    there = tmp_path / "new/deep" / f"{'x' * 240}.html"
    assert write_report(run, there) == there
    assert there.read_text(encoding="utf-8") == render_report(run) == (run / "report.html").read_text(encoding="utf-8")
    assert there.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run / "report.html").write_text("old")
    before = {path.name for path in run.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"report\.html cannot be written: File too large.*--output"):
            write_report(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run / "report.html").read_text() == "old"
    assert {path.name for path in run.iterdir()} == before


@pytest.mark.parametrize("place", ["a/folder", "file/report.html", f"{'x' * 300}.html"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    run = made_run(tmp_path / "run")
    (tmp_path / "a/folder").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="--output") as caught:
        write_report(run, tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a/folder"]


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    with pytest.raises(WriteError, match="is no file"):
        write_report(made_run(tmp_path / "run"), null)
    assert null.is_symlink()


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.floats(), max_size=3),
)  # fmt: skip


@st.composite
def _spoilt_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A true run, some of whose fields hold anything, some of whose lines are gone or stand elsewhere."""
    events = [json.loads(json.dumps(line)) for line in killed_run()]
    for _ in range(draw(st.integers(1, 8))):
        line = draw(st.sampled_from(events))
        line[draw(st.sampled_from([*line]))] = draw(_JUNK)
    keep = draw(st.lists(st.sampled_from(events), max_size=30)) if draw(st.booleans()) else events
    return [dict(line) for line in keep]


@given(_spoilt_runs())
@settings(max_examples=120, deadline=None)
def test_whatever_stands_in_the_events_gives_a_page(events: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        page = Page(render_report(write_events(Path(directory), events)))
    assert set(page.tags) <= TAGS
    for svg in page.drawings():
        for element in svg.iter():
            for name, value in element.attrib.items():
                if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "d"):
                    assert "nan" not in value and "inf" not in value
