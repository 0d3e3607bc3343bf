"""inspect of a step, and the warning where the step around a role is not whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import Run, halve, make_foreign, trained

from milepost.checkpoint.manifest import read_manifest
from milepost.checkpoint.retention import Retention
from milepost.cli.app import run


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A committed step of an actor and a critic."""
    session = Run(tmp_path)
    session.manager.resume()
    return session.manager.save(1)


def test_a_step_shows_its_roles(step: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(step)]) == 0
    shown = capfd.readouterr().out
    assert f"step {step}: committed" in shown
    assert "actor: layout fsdp, world size 1" in shown and "critic: layout fsdp, world size 1" in shown
    assert run(["inspect", str(step), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["kind"], facts["step"], facts["state"], list(facts["roles"])) == (
        "step", 1, "committed", ["actor", "critic"],
    )  # fmt: skip


def test_a_role_of_a_damaged_step_is_told_of(step: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (step / "critic" / "model_world_size_1_rank_0.pt").unlink()
    run(["merge", str(step / "actor"), str(step.parent / "out"), "--dry-run"])
    assert "beware: global_step_1 is incomplete" in capfd.readouterr().err


def test_a_run_shows_what_each_step_is_and_whether_it_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    session = trained(tmp_path, 10, 20, 30, 40, retention=Retention(keep_last=4, keep_best="reward"))
    session.manager.close()
    make_foreign(tmp_path / "global_step_10")
    halve(tmp_path / "global_step_20/actor/model_world_size_1_rank_0.pt")
    (tmp_path / "global_step_50").mkdir()
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["kind"], found["format"], found["tracker"], found["retention"]["keep_last"]) == ("run", 1, 40, 4)
    rows = {step["step"]: step for step in found["steps"]}
    assert {number: row["state"] for number, row in rows.items()} == {
        10: "foreign", 20: "damaged", 30: "committed", 40: "committed", 50: "incomplete",
    }  # fmt: skip
    assert "model_world_size_1_rank_0.pt has" in rows[20]["why"]
    assert rows[40]["kept_why"] == "one of the last 4; the best by reward (4)"
    assert (rows[40]["world_size"], rows[40]["layouts"], rows[40]["metrics"]) == (1, ["fsdp", "fsdp"], {"reward": 4.0})
    assert 0 <= rows[40]["age"] < 300 and rows[40]["bytes"] == read_manifest(tmp_path / "global_step_40").nbytes
    assert run(["inspect", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "keeps the last 4, the best by reward (max), what is pinned" in shown
    assert "  40  committed" in shown and "holds no manifest.json and no role's files" in shown


def test_thousands_of_steps_are_listed_and_no_weights_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Run(tmp_path)
    session.manager.resume()
    session.manager.save(2_000)
    saved = read_manifest(tmp_path / "global_step_2000")
    for number in range(2_000):
        folder = tmp_path / f"global_step_{number}"
        folder.mkdir()
        (folder / "manifest.json").write_text(replace(saved, step=number).to_json())
    opened: list[Path] = []
    real = Path.open

    def watched(path: Path, *arguments: object, **more: object) -> object:
        opened.append(path)
        return real(path, *arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", watched)
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    # Small files of the newest are read whole, whatever is in them.
    older = {path.suffix for path in opened if path.parent.parent.name != "global_step_2000"}
    assert older <= {".json", ".jsonl", ".txt"}
    assert len(json.loads(capfd.readouterr().out)["steps"]) == 2_001
