from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_engine import halve, make_foreign, trained

from milepost.checkpoint.steps import (
    TRACKER,
    StepDir,
    judge,
    list_steps,
    newest_good,
    read_tracker,
    scan,
    step_number,
)

ROLES = ("actor", "critic")


def test_steps_are_in_numeric_order_and_other_names_are_none(tmp_path: Path) -> None:
    folders = (
        "global_step_9", "global_step_10", "global_steps_100", "global_step_7_hf", "global_step_", "xglobal_step_3",
        ".global_step_4.00ff00ff.tmp", "set_aside_1",
    )  # fmt: skip
    for name in folders:
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_5").write_text("a file")
    assert scan(tmp_path) == (
        StepDir(9, tmp_path / "global_step_9"),
        StepDir(10, tmp_path / "global_step_10"),
        StepDir(100, tmp_path / "global_steps_100"),
    )
    assert step_number(Path("global_step_7_hf")) is None


def test_no_root_has_no_steps(tmp_path: Path) -> None:
    assert scan(tmp_path / "none") == ()
    assert newest_good(tmp_path / "none").good is None


def test_a_saved_step_is_committed(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    state = judge(tmp_path / "global_step_1", ROLES)
    assert (state.step, state.state, state.why, state.good) == (1, "committed", "", True)


def test_a_missing_file_is_incomplete_and_named(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    (tmp_path / "global_step_1/critic/optim_world_size_1_rank_0.pt").unlink()
    state = judge(tmp_path / "global_step_1")
    assert state.state == "incomplete"
    assert "critic/optim_world_size_1_rank_0.pt is missing" in state.why


def test_a_file_cut_to_half_is_damaged_and_named(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    path = tmp_path / "global_step_1/actor/model_world_size_1_rank_0.pt"
    size = path.stat().st_size
    halve(path)
    state = judge(tmp_path / "global_step_1")
    assert state.state == "damaged"
    assert f"{path} has {size // 2} bytes instead of {size}" in state.why


def test_a_role_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    run = trained(tmp_path / "both", 1)
    trained(tmp_path, 1, roles={"actor": run.actor})
    assert judge(tmp_path / "global_step_1", ("actor",)).good
    state = judge(tmp_path / "global_step_1", ROLES)
    assert state.state == "incomplete"
    assert "critic was not saved" in state.why


def test_a_renamed_step_is_damaged(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_9")
    state = judge(tmp_path / "global_step_9")
    assert (state.state, "is of step 1" in state.why) == ("damaged", True)


def test_a_step_of_another_program_is_judged_by_its_files(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        make_foreign(tmp_path / f"global_step_{number}")
    (tmp_path / "global_step_2/critic/model_world_size_1_rank_0.pt").unlink()
    halve(tmp_path / "global_step_3/actor/optim_world_size_1_rank_0.pt")
    (tmp_path / "global_step_4/data.pt").unlink()
    states = {state.step: state for state in list_steps(tmp_path, roles=ROLES)}
    assert [states[number].state for number in (1, 2, 3, 4)] == ["foreign", "incomplete", "damaged", "incomplete"]
    assert states[1].good
    assert "critic" in states[2].why
    assert "optim_world_size_1_rank_0.pt" in states[3].why
    assert "data.pt" in states[4].why
    # Named by the user, it is taken without the data position, which milepost could not use anyway.
    assert judge(tmp_path / "global_step_4", ROLES, named=True).good


def test_an_empty_folder_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    assert judge(tmp_path / "global_step_3").state == "incomplete"


@pytest.mark.parametrize(("content", "number"), [("20", 20), (" 20\n", 20), ("", None), ("latest", None)])
def test_the_tracker_is_a_number_or_nothing(tmp_path: Path, content: str, number: int | None) -> None:
    (tmp_path / TRACKER).write_text(content)
    assert read_tracker(tmp_path) == number


def test_a_tracker_that_names_a_missing_step_gives_a_warning_and_the_newest_good_step(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    (tmp_path / TRACKER).write_text("20")
    newest = newest_good(tmp_path, ROLES)
    assert newest.good is not None
    assert newest.good.step == 10
    (note,) = newest.notes
    assert "names step 20, which is not there" in note


def test_a_tracker_that_lags_does_not_hide_a_newer_whole_step(tmp_path: Path) -> None:
    trained(tmp_path, 10, 20)
    (tmp_path / TRACKER).write_text("10")
    newest = newest_good(tmp_path, ROLES)
    assert newest.good is not None
    assert newest.good.step == 20
    assert "resume_path" in newest.notes[0]


def test_only_the_newest_few_of_ten_thousand_are_looked_into(tmp_path: Path) -> None:
    run = trained(tmp_path, 20_000)
    for number in range(10_000):
        (tmp_path / f"global_step_{number}").mkdir()
    begun = time.perf_counter()
    newest = newest_good(tmp_path, ROLES)
    run.manager.save(20_001)
    seconds = time.perf_counter() - begun
    assert newest.good is not None
    assert newest.good.step == 20_000
    assert newest.skipped == ()
    assert [state.step for state in list_steps(tmp_path, newest=2)] == [20_000, 20_001]
    assert seconds < 5


def test_steps_are_judged_without_torch(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    code = (
        "import sys; from pathlib import Path; from milepost.checkpoint.steps import newest_good\n"
        "from milepost.checkpoint import manager; from milepost.checkpoint.diary import events\n"
        "assert newest_good(Path(sys.argv[1])).good.step == 1\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
