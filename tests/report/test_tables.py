from __future__ import annotations

from pathlib import Path
from typing import Any

from diary import commit_step, event, killed_run, made_run, resume, start, step, write_events
from html_page import Page

from milepost.checkpoint.diary.history import history_of, read_history
from milepost.checkpoint.diary.status import steps_on_disk
from milepost.report.tables import headline, starts_table, steps_table


def facts(events: list[dict[str, Any]], run_dir: Path) -> list[str]:
    page = Page(headline(history_of(events), steps_on_disk(run_dir)))
    return [data for _, data in page.words]


def rows(table: str) -> list[str]:
    """The text of each row of the table's body."""
    found = table.split("<tbody>")[1].split("</tr>")[:-1]
    return [" ".join(data for _, data in Page(f"{row}</tr>").words) for row in found]


def test_what_a_researcher_wants_to_know_first(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    assert facts(killed_run(), run) == [
        "Mean reward, first to last step", "0.1 → 0.8", "best 0.8 at step 8",
        "Steps done", "8", "1 step trained more than once",
        "Newest whole step", "step 8", "whole, 1.5 kB",
        "World size", "2 → 1", "ranks, fsdp2",
        "Kills", "1", "1 step lost, 2 resumes",
        "Time trained", "1 min 20 s", "lost 40 s: 30 s down, 10 s done again",
        "Goodput", "50%", "of 2 min 40 s was training",
    ]  # fmt: skip


def test_before_the_first_step(tmp_path: Path) -> None:
    found = facts([start(0), resume(1, None)], tmp_path)
    assert found[:6] == [
        "Steps done", "0", "no step has been finished yet", "Newest whole step", "none", "nothing saved yet",
    ]  # fmt: skip


def test_starts_tell_origin_parts_and_end() -> None:
    found = rows(starts_table(history_of(killed_run())))
    assert found[0].startswith("1 2027-01-15 08:00:00 UTC 2 fresh start fresh  actor/weights 1-5 killed, 1 step lost")
    assert "step 4 restored  actor/weights 5-6 done" in found[1]
    assert (
        "step 6 saved by 2 ranks restored  actor/weights fresh  actor/RNG: saved by 2 ranks, now 1 7-8 done" in found[2]
    )


def test_what_a_start_passed_over_or_stopped_on_is_there() -> None:
    skipped = [{"folder": "global_step_6", "why": "incomplete"}]
    found = rows(starts_table(history_of([
        start(0), resume(1, 4, skipped=skipped, notes=["look out"]), step(2, 5),
        event(3, "stop", reason="error", error="no GPU"),
    ])))  # fmt: skip
    assert "step 4 not global_step_6: incomplete look out" in found[0]
    assert "5 stopped on an error no GPU" in found[0]


def test_only_the_newest_hundred_starts_are_listed() -> None:
    table = starts_table(history_of([start(number) for number in range(130)]))
    assert table.count("<tr>") == 101
    assert "30 older starts not shown." in table
    assert rows(table)[-1].startswith("130 ")


def test_a_session_of_very_many_steps_costs_nothing() -> None:
    table = starts_table(history_of([start(0), step(1, 1), step(2, 10**14)]))
    assert f"1-{10**14}" in table


def test_steps_on_disk_newest_first(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    (run / "global_step_6/actor/model.pt").unlink()
    found = rows(steps_table(read_history(run), steps_on_disk(run)))
    assert found[0] == "8 global_step_8 committed actor, critic 1 1.5 kB 2027-01-15 08:00:00 UTC 1.0 s 0.8"
    assert found[1].startswith("6 global_step_6 incomplete ") and "actor/model.pt is missing" in found[1]


def test_the_reward_of_a_step_is_that_of_the_work_it_holds(tmp_path: Path) -> None:
    run = write_events(tmp_path, killed_run())
    commit_step(run, 5)
    assert rows(steps_table(read_history(run), steps_on_disk(run)))[0].endswith(" 0.5")  # not the lost 0.9


def test_old_steps_are_only_counted(tmp_path: Path) -> None:
    for number in range(1, 31):
        commit_step(tmp_path, number)
    table = steps_table(history_of([]), steps_on_disk(tmp_path))
    assert table.count("<tr>") == 11
    assert "Older, not looked into: steps 1-20." in table
