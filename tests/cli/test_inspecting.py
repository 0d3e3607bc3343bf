"""inspect of a step, and the warning where the step around a role is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_engine import Run

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
