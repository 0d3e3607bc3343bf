"""Runs of other trainers that save torch DCP folders: found, named, checked and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import milepost
from milepost.checkpoint.locate import foreign_steps, locate
from milepost.checkpoint.verify import verify
from milepost.cli.app import run as run_command
from milepost.errors import IncompleteError, NotFoundError
from milepost.jobs.prepare import ModelOptions

FOUND = {
    "trainer": ("trainer/checkpoint-7", "", "accelerate or HF Trainer"),
    "trainer/checkpoint-7": ("trainer/checkpoint-7", "", "accelerate or HF Trainer"),
    "trainer/checkpoint-7/pytorch_model_fsdp_0": (
        "trainer/checkpoint-7/pytorch_model_fsdp_0",
        "pytorch_model_fsdp_0",
        "of model",
    ),
    "titan": ("titan/checkpoint/step-7", "", "torchtitan"),
    "titan/checkpoint": ("titan/checkpoint/step-7", "", "torchtitan"),
    "nemo": ("nemo/step_7/policy", "policy", "NeMo-RL"),
    "nemo/step_7": ("nemo/step_7/policy", "policy", "NeMo-RL"),
    "nemo/step_7/policy": ("nemo/step_7/policy", "policy", "NeMo-RL"),
}


@pytest.mark.parametrize("given", FOUND)
def test_any_folder_of_a_run_leads_to_its_role(dcp_checkpoints: Path, given: str) -> None:
    directory, role, words = FOUND[given]
    found = locate(dcp_checkpoints / given)
    assert (found.directory, found.role, found.step, found.layout.name) == (dcp_checkpoints / directory, role, 7, "dcp")
    assert words in found.notes[-1]


def test_a_path_that_is_named_from_inside(dcp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dcp_checkpoints / "nemo" / "step_7" / "policy")
    assert (locate(Path()).role, locate(Path()).step) == ("policy", 7)


def _run(dcp_checkpoints: Path, tmp_path: Path) -> Path:
    """A run of HF Trainer with steps 9 and 100 beside 7."""
    run = Path(shutil.copytree(dcp_checkpoints / "trainer", tmp_path / "run"))
    for step in (9, 100):
        shutil.copytree(run / "checkpoint-7", run / f"checkpoint-{step}")
    return run


def test_the_newest_step_that_is_whole(dcp_checkpoints: Path, tmp_path: Path) -> None:
    run = _run(dcp_checkpoints, tmp_path)
    (run / "checkpoint-tmp").mkdir()
    (run / "checkpoint-200").mkdir()
    assert [step.step for step in foreign_steps(run)] == [7, 9, 100]
    assert locate(run).step == 100
    (run / "checkpoint-100" / "optimizer_0" / ".metadata").unlink()
    found = locate(run)
    assert found.step == 9
    assert found.notes[0].startswith("passed over checkpoint-100: ")
    assert "optimizer_0: its .metadata is missing" in found.notes[0]
    assert found.notes[1] == "took checkpoint-9, the newest of 3 steps that is whole"
    for step in (7, 9):
        next((run / f"checkpoint-{step}" / "pytorch_model_fsdp_0").glob("*.distcp")).unlink()
    with pytest.raises(IncompleteError, match=r"no step here is whole \(checkpoint-100: "):
        locate(run)
    with pytest.raises(NotFoundError, match="holds no checkpoint of backend fsdp"):
        locate(run, backend="fsdp")


def test_verify_names_step_file_and_record(dcp_checkpoints: Path, tmp_path: Path) -> None:
    run = _run(dcp_checkpoints, tmp_path)
    verdict = verify(run, deep=True)
    assert (verdict.ok, verdict.kind, verdict.files) == (True, "run", 3 * 8)
    index = locate(run / "checkpoint-9").layout.open(run / "checkpoint-9")
    source = index["optim/lm_head.weight/exp_avg"].chunks[0].source
    with Path(source.file).open("r+b") as file:
        file.seek(source.start())
        byte = file.read(1)[0]
        file.seek(source.start())
        file.write(bytes([byte ^ 1]))
    assert verify(run).ok
    (problem,) = verify(run, deep=True).problems
    assert problem.startswith(f"checkpoint-9: {Path(source.file).name}, bytes ")
    assert problem.endswith("1 of its records were altered (data/0): the CRC-32 differs")


def test_verify_finds_a_header_that_was_lost(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dcp_checkpoints / "app", tmp_path / "app"))
    path = folder / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    for deep in (False, True):
        problems = verify(folder, deep=deep).problems
        assert problems
        assert all("__0_0.distcp" in problem for problem in problems)


def test_moments_alone_are_no_fault(dcp_checkpoints: Path) -> None:
    assert verify(dcp_checkpoints / "trainer/checkpoint-7/optimizer_0", deep=True).ok


@pytest.mark.parametrize("run", ["trainer", "titan", "nemo", "accelerate_fsdp1"])
def test_merge_writes_what_accelerates_merger_writes(dcp_checkpoints: Path, run: str, tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    same_weights = "accelerate_fsdp1" if run == "accelerate_fsdp1" else "trainer/checkpoint-7"
    merge_fsdp_weights(str(dcp_checkpoints / same_weights / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    has_config = run in ("trainer", "accelerate_fsdp1")
    options = ModelOptions(hf_model_path=None if has_config else dcp_checkpoints / "base")
    milepost.merge(dcp_checkpoints / run, tmp_path / "ours", model=options)
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert sorted(ours) == sorted(theirs)
    assert all(ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in ours)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert milepost.test(dcp_checkpoints / run, tmp_path / "ours", model=options).ok


def test_a_config_above_counts_only_if_it_is_a_models(dcp_checkpoints: Path, tmp_path: Path) -> None:
    run = _run(dcp_checkpoints, tmp_path)
    (run / "config.json").write_text(json.dumps({"learning_rate": 1}))
    with pytest.raises(NotFoundError, match="--hf_model_path"):
        milepost.merge(run, tmp_path / "out")


def test_the_command_line_says_what_it_found(
    dcp_checkpoints: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run_command(["merge", str(dcp_checkpoints / "trainer"), str(tmp_path / "out"), "--backend", "dcp"])
    said = capfd.readouterr().err.replace("\n", "")
    assert status == 0
    assert "is a folder of accelerate or HF Trainer: weights in pytorch_model_fsdp_0" in said
    assert f"found dcp checkpoint {dcp_checkpoints}/trainer/checkpoint-7, step 7" in said
