"""A Hugging Face Trainer that milepost records: three and three steps are six, and a start takes only what is whole."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import recorded_trainers
from ranks import run_ranks

import milepost
from milepost.checkpoint.files import StepFiles
from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.steps import judge, scan
from milepost.errors import WriteError
from milepost.integrations.transformers import CheckpointCallback

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def two(base: Path) -> list[dict[str, Any]]:
    return run_ranks(recorded_trainers.on_two, 2, base)


@pytest.fixture(scope="module")
def one(two: list[dict[str, Any]], base: Path) -> dict[str, Any]:
    return run_ranks(recorded_trainers.on_one, 1, base)[0]


def check_three_and_three(lives: dict[str, Any]) -> None:
    straight, second = lives["straight"], lives["second"]
    assert second["from"] == 3
    assert [step for step, _, _ in second["logs"]] == [1, 2, 3, 4, 5, 6]  # the Trainer's own log goes on too
    assert second["logs"] == straight["logs"]
    assert second["weights"].keys() == straight["weights"].keys()
    assert all(torch.equal(value, straight["weights"][name]) for name, value in second["weights"].items())
    assert len(straight["moments"]) > 0
    assert all(map(torch.equal, second["moments"], straight["moments"]))
    assert torch.equal(second["draw"], straight["draw"])
    assert second["epoch"] == straight["epoch"]
    assert not torch.equal(lives["first"]["draw"], straight["draw"])


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_three_and_three_steps_are_six_on_two_ranks(engine: str, two: list[dict[str, Any]]) -> None:
    for said in two:
        check_three_and_three(said[engine])


def test_three_and_three_steps_are_six_in_one_process(one: dict[str, Any]) -> None:
    check_three_and_three(one["plain"])


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_steps_are_committed_and_the_last_two_stay(engine: str, base: Path, two: list[dict[str, Any]]) -> None:
    root = base / engine / "straight"
    assert [step.step for step in scan(root)] == ([5, 6] if engine == "ddp" else [3, 6])
    assert not list((base / engine / "out").iterdir())  # nothing lies on the disk twice
    for step in scan(root):
        manifest = read_manifest(step.path)
        assert judge(step.path).state == "committed"
        assert check_files(step.path, manifest, deep=True) == ()
        assert (manifest.world_size, manifest.step) == (2, step.step)
        assert manifest.roles == {"trainer": "huggingface" if engine == "ddp" else "deepspeed"}
        on_disk = {path.relative_to(step.path).as_posix() for path in step.path.rglob("*") if path.is_file()}
        assert {record.path for record in manifest.files} == on_disk - {"manifest.json"}
        assert {"trainer/rng_state_0.pth", "trainer/rng_state_1.pth", "trainer/trainer_state.json"} <= on_disk


def test_a_recorded_step_is_read_like_any_other(base: Path, two: list[dict[str, Any]], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for engine in ("ddp", "zero3"):
        milepost.merge(base / engine / "straight", tmp_path / engine)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / engine)
        held = two[0][engine]["straight"]["weights"]
        assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


def test_the_diary_tells_the_run(base: Path, two: list[dict[str, Any]]) -> None:
    events = [json.loads(line) for line in (base / "ddp" / "run" / "events.jsonl").read_text().splitlines()]
    told = [(event["event"], event.get("step", event.get("from_step"))) for event in events]
    saved = [[("step", n), ("save_requested", n), ("save_durable", n)] for n in range(1, 7)]
    assert told[:11] == [("start", None), ("resume", None), *saved[0], *saved[1], *saved[2]]
    assert told[11:23] == [("stop", 3), ("start", None), ("resume", 3), *saved[3], *saved[4], *saved[5]]
    assert told[23] == ("stop", 6)
    steps = [event for event in events if event["event"] == "step"]
    assert all(event["metrics"]["loss"] > 0 and event["seconds"] > 0 for event in steps)
    assert two[0]["ddp"]["second"]["lines"] == [
        f"resumed from {base}/ddp/run/global_step_3: step 3, on 2 ranks",
        "  trainer    restored: weights, optimizer, learning-rate schedule, RNG, state of the Trainer and position in "
        "the data",
        "  next       step 4",
    ]


def test_a_damaged_step_is_passed_over(base: Path, one: dict[str, Any]) -> None:
    again, straight = one["damaged"], one["plain"]["straight"]
    assert again["from"] == 5
    assert any(
        "not taken   global_step_6: damaged" in line or "global_step_6: damaged" in line for line in again["lines"]
    )
    assert again["logs"] == straight["logs"]
    assert all(torch.equal(value, straight["weights"][name]) for name, value in again["weights"].items())


def test_what_a_kill_leaves_of_the_trainers_folder_goes(one: dict[str, Any]) -> None:
    assert one["nothing left"] == (
        "CallError",
        "nothing to train: step 6 was the last of 6; for more raise max_steps or num_train_epochs",
    )
    assert one["twin"] is False
    assert one["kept"] == []


def test_a_start_that_would_lose_steps_is_refused(base: Path, one: dict[str, Any]) -> None:
    kind, text = one["forgotten"]
    assert kind == "CallError"
    assert text.startswith(f"{base}/plain/run holds steps already: train with resume_from_checkpoint=")
    kind, text = one["not given"]
    assert kind == "CallError"
    assert text.startswith("the Trainer begins at step 0, but resume() chose step 6: give what it returned")
    assert one["weights only"][0] == "CallError"
    assert [step.step for step in scan(base / "plain" / "run")] == [1]  # begun anew
    aside = [path.name for path in (base / "plain" / "run").glob("set_aside_*/*")]
    assert sorted(aside) == ["global_step_5", "global_step_6", "global_step_6"]  # the damaged one, and those of after


def test_another_number_of_ranks(base: Path, one: dict[str, Any]) -> None:
    """The Trainer's own files of DDP do not depend on it, save for the RNG; DeepSpeed's do."""
    assert one["ddp on one"]["from"] == 6
    assert [step for step, _, _ in one["ddp on one"]["logs"]] == [1, 2, 3, 4, 5, 6, 7]
    assert "             fresh: RNG (saved by 2 ranks, now 1)" in one["ddp on one"]["lines"]
    kind, text = one["zero3 on one"]
    assert kind == "MismatchError"
    assert "was saved by 2 ranks under DeepSpeed, which goes on with no other number; start 2 ranks" in text


def test_what_the_trainer_needs_later_stays(base: Path, one: dict[str, Any]) -> None:
    assert one["best"] == (None, ["checkpoint-1", "checkpoint-2"])
    theirs = base / "plain" / "out" / "checkpoint-2" / "optimizer.pt"
    ours = base / "best" / "global_step_2" / "trainer" / "optimizer.pt"
    assert theirs.read_bytes() == ours.read_bytes()
    assert not theirs.samefile(ours)  # the Trainer may write into its own


def test_a_commit_that_fails_leaves_the_trainers_folder(tmp_path: Path) -> None:
    args = SimpleNamespace(output_dir=str(tmp_path / "out"), load_best_model_at_end=False, push_to_hub=False)
    record = CheckpointCallback(tmp_path / "root")
    assert record.resume() is None
    (tmp_path / "root" / "events.jsonl").unlink()
    (tmp_path / "root").rmdir()
    (tmp_path / "root").touch()
    folder = tmp_path / "out" / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(WriteError, match="step 1 was not saved"):
        record.on_save(args, SimpleNamespace(global_step=1), None)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_files_of_another_file_system_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    files = StepFiles(tmp_path / "step" / "role", tmp_path / "step")
    files.adopt(tmp_path / "source", "linked")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    files.adopt(tmp_path / "source", "below/copied")
    assert [(record.path, record.size) for record in files.records] == [("role/linked", 5), ("role/below/copied", 5)]
    assert files.records[0].xxh3_128 == files.records[1].xxh3_128
    assert (tmp_path / "step/role/linked").samefile(tmp_path / "source")
    assert not (tmp_path / "step/role/below/copied").samefile(tmp_path / "source")
    with pytest.raises(WriteError, match="gone: No such file"):
        files.adopt(tmp_path / "nothing", "gone")
