"""The real verl and milepost on each other's checkpoints: merge, resume, and what verl is known to get wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interop import sides, theirs
from interop.ours import OurRun
from interop.sides import SAVED_STEP, Facts
from interop.theirs import TheirRun
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_engine import Counter
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

import milepost
from milepost.checkpoint.comm import SingleProcess
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.steps import judge, list_steps
from milepost.checkpoint.verify import verify
from milepost.errors import DamagedError, MismatchError, NotFoundError
from milepost.jobs.prepare import ModelOptions

# Looked for, not imported: that takes seconds, and verl changes the process that it is imported into.
pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed; make test installs it")

BOTH = ("actor", "critic")


# verl's merger reads what milepost saved


@dataclass(frozen=True)
class Merges:
    """Where milepost merged the actor (bf16) and the critic of its run, and verl's merger the actor; and what verl's
    `test` said of the critic."""

    actor: Path
    critic: Path
    actor_by_verl: Path
    verdict: str


@pytest.fixture(scope="module")
def merges(our_run: OurRun, tmp_path_factory: pytest.TempPathFactory) -> Merges:
    root = tmp_path_factory.mktemp("merges")
    milepost.merge(our_run.root, root / "critic", role="critic")
    processes = [
        _verl_merger("merge", our_run.step_dir / "actor", "--target_dir", root / "actor_by_verl"),
        _verl_merger("test", our_run.step_dir / "critic", "--test_hf_dir", root / "critic"),
    ]
    try:
        milepost.merge(our_run.root, root / "actor", role="actor", dtype="bf16")
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
    return Merges(root / "actor", root / "critic", root / "actor_by_verl", said[1])


def _verl_merger(operation: str, role: Path, *options: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "verl.model_merger", operation, "--backend", "fsdp", "--local_dir", role, *options]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_verls_merger_makes_of_our_checkpoint_what_milepost_makes_of_it(merges: Merges, our_run: OurRun) -> None:
    ours, by_verl = (load_file(folder / "model.safetensors") for folder in (merges.actor, merges.actor_by_verl))
    sides.assert_same_tensors(ours, by_verl)
    expected = {name: tensor.bfloat16() for name, tensor in sides.weights_of(our_run.saved["actor"]).items()}
    sides.assert_same_tensors(ours, expected)
    assert milepost.test(our_run.step_dir, merges.actor_by_verl, dtype="bf16").ok


def test_what_travels_with_the_weights_is_what_verl_sends_along(merges: Merges) -> None:
    ours, by_verl = (
        {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config")}
        for folder in (merges.actor, merges.actor_by_verl)
    )
    for name in ours:
        # transformers notes its version, and writes out what is unset.
        own, other = (
            {key: value for key, value in side[name].items() if value is not None and key != "transformers_version"}
            for side in (ours, by_verl)
        )
        assert own == other, name
    assert ours["config"]["dtype"] == "bfloat16"
    assert ours["generation_config"]["eos_token_id"] == [1, 2]
    tokens = [AutoTokenizer.from_pretrained(folder)("17+5=") for folder in (merges.actor, merges.actor_by_verl)]
    assert tokens[0]["input_ids"] == tokens[1]["input_ids"] and len(tokens[0]["input_ids"]) == 5


def test_verls_test_accepts_milepost_s_merge_of_a_critic(merges: Merges) -> None:
    assert "FSDP checks passed" in merges.verdict


@pytest.mark.parametrize("role", BOTH)
def test_a_role_is_the_same_files_from_either(role: str, our_run: OurRun, their_run: TheirRun) -> None:
    ours, by_verl = (run.step_dir / role for run in (our_run, their_run))
    names = [{path.relative_to(r).as_posix() for path in r.rglob("*") if path.is_file()} for r in (ours, by_verl)]
    generation = {"huggingface/generation_config.json"}  # verl's critic lacks it: a token classifier does not generate
    export = {"huggingface/model.safetensors"} if role == "actor" else set()
    assert names[0] - generation == names[1] - generation - export
    assert json.loads((ours / "fsdp_config.json").read_text()) == json.loads((by_verl / "fsdp_config.json").read_text())


# milepost reads what verl saved


def test_a_step_that_verl_saved_is_foreign_and_whole(their_run: TheirRun, tmp_path: Path) -> None:
    (state,) = list_steps(their_run.root)
    assert (state.step, state.state, state.why) == (SAVED_STEP, "foreign", "")
    assert judge(their_run.step_dir, BOTH).good
    verdict = verify(their_run.root, deep=True)
    assert verdict.ok and verdict.files >= 12, verdict.problems

    step = shutil.copytree(their_run.step_dir, tmp_path / their_run.step_dir.name)
    (step / "data.pt").unlink()
    assert judge(step, BOTH).state == "incomplete"  # verl writes it last, so it was killed before
    (step / "data.pt").touch()
    (step / "critic" / "optim_world_size_2_rank_1.pt").unlink()
    found = judge(step, BOTH)
    assert found.state == "incomplete" and "critic: optim files of rank 1 of 2 are missing" in found.why


@pytest.mark.parametrize("role", BOTH)
def test_merging_what_verl_saved_gives_the_gathered_weights(role: str, their_run: TheirRun, tmp_path: Path) -> None:
    milepost.merge(their_run.root, tmp_path / "out", role=role)
    saved = sides.weights_of(their_run.verl.resumed[role])
    sides.assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), saved)
    auto_class = AutoModelForCausalLM if role == "actor" else AutoModelForTokenClassification
    model, info = auto_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    # verl's config.json of a critic names the class of the language model that it was made from.
    assert model.config.architectures == [type(model).__name__]
    if role == "critic":
        assert model.config.num_labels == 1


def test_verls_own_export_is_equal_to_the_shards_beside_it(their_run: TheirRun, tmp_path: Path) -> None:
    export = their_run.step_dir / "actor" / "huggingface"
    report = milepost.test(their_run.step_dir, export)
    assert report.ok and report.tensors == len(sides.weights_of(their_run.verl.resumed["actor"]))
    # Change one value of the export, and it is another model.
    other = shutil.copytree(export, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    (difference,) = milepost.test(their_run.step_dir, other).differences
    assert (difference.kind, difference.elements) == ("value", 1)


def test_a_run_of_verls_supervised_trainer_is_one_model_a_step(their_run: TheirRun, tmp_path: Path) -> None:
    step = tmp_path / "run" / their_run.step_dir.name
    shutil.copytree(their_run.step_dir / "actor", step)  # its export in huggingface/ included
    (step / "data_0.pt").touch()
    assert [state.state for state in list_steps(step.parent)] == ["foreign"]
    checkpoint = milepost.open(step.parent)
    assert (checkpoint.layout, checkpoint.role, checkpoint.step) == ("fsdp", "", SAVED_STEP)
    milepost.merge(step.parent, tmp_path / "out")
    saved = sides.weights_of(their_run.verl.resumed["actor"])
    sides.assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), saved)
    with pytest.raises(NotFoundError, match="no role critic; it holds one model without roles"):
        milepost.merge(step.parent, tmp_path / "critic", role="critic")
    assert verify(step.parent).files == 6
    (step / "model_world_size_2_rank_1.pt").unlink()
    assert [state.state for state in list_steps(step.parent)] == ["incomplete"]
    assert not verify(step.parent).ok


# Resume across, same number of ranks


def test_milepost_resumes_what_verl_saved_and_goes_on_as_verl_does(their_run: TheirRun) -> None:
    verl, ours = their_run.verl, their_run.milepost
    sides.assert_same(ours.resumed, verl.resumed)
    assert ours.resumed["actor"]["last_epoch"] == SAVED_STEP
    sides.assert_same(ours.went_on, verl.went_on)
    assert ours.draws == verl.draws and ours.draws[0] != ours.draws[1]
    assert their_run.lines == [
        f"resumed from {their_run.step_dir}: step {SAVED_STEP}, on 2 ranks",
        "  actor      restored: weights, optimizer, learning-rate schedule, RNG",
        "  critic     restored: weights, optimizer, learning-rate schedule, RNG",
        f"  next       step {SAVED_STEP + 1}",
    ]


def test_verl_resumes_what_milepost_saved_and_goes_on_as_milepost_does(our_run: OurRun, their_run: TheirRun) -> None:
    assert their_run.found == str(our_run.step_dir)
    sides.assert_same(their_run.verl_on_ours.resumed, our_run.saved)
    sides.assert_same(their_run.verl_on_ours.went_on, our_run.went_on)
    assert their_run.verl_on_ours.draws == our_run.draws and our_run.draws[0] != our_run.draws[1]


def test_the_steps_that_are_compared_do_change_the_model(our_run: OurRun, their_run: TheirRun) -> None:
    for before, after in ((our_run.saved, our_run.went_on), (their_run.verl.resumed, their_run.verl.went_on)):
        for role in BOTH:
            assert after[role]["lr"] < before[role]["lr"] < sides.LR
            for name, tensor in before[role]["tensors"].items():
                assert not torch.equal(tensor, after[role]["tensors"][name]), name


# Resume what verl saved on another number of ranks, which verl itself cannot


def _resume_elsewhere(base: Path, root: Path, lost: Path) -> Any:
    outcomes: list[tuple[dict[str, Facts], list[str], list[float]] | None] = []
    for size, folder in ((3, root), (1, root), (1, lost)):
        mesh = sides.mesh_of(size)
        outcome = None
        if dist.get_rank() < size:
            roles = sides.engines(base, mesh, theirs.OTHER)
            comm = SingleProcess() if size == 1 else None
            manager = CheckpointManager(folder, roles, parts={"data": Counter()}, comm=comm, keep_last=1)
            assert manager.resume() == SAVED_STEP
            outcome = sides.facts(roles), manager.report.lines(), sides.draws()
            if folder == lost:
                sides.train(roles, SAVED_STEP + 1)
                manager.save(SAVED_STEP + 1)
            manager.close()
        outcomes.append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def elsewhere(their_run: TheirRun) -> list[Any]:
    """rank -> for three ranks, for one, and for one where the tracker is lost: state, lines, random numbers."""
    return run_ranks(_resume_elsewhere, 3, their_run.base, their_run.root, _lost(their_run))


def _lost(their_run: TheirRun) -> Path:
    return their_run.root.parent / "faults" / "lost"


def test_on_three_ranks_and_on_one_nothing_of_verls_state_is_another(elsewhere: list[Any], their_run: TheirRun) -> None:
    for outcome in (*(rank[0] for rank in elsewhere), elsewhere[0][1]):
        sides.assert_same(outcome[0], their_run.verl.resumed)
    assert elsewhere[0][0][1] == [
        f"resumed from {their_run.step_dir}: step {SAVED_STEP}, on 3 ranks (saved by 2)",
        "  actor      restored: weights, optimizer, learning-rate schedule",
        *_fresh_rng(3),
        "  critic     restored: weights, optimizer, learning-rate schedule",
        *_fresh_rng(3),
        "  data       fresh (the checkpoint has none)",
        f"  next       step {SAVED_STEP + 1}",
    ]
    streams = [tuple(rank[0][2]) for rank in elsewhere]
    assert len(set(streams)) == 3


def test_a_run_that_moves_over_to_milepost_keeps_what_verl_saved(
    elsewhere: list[Any], their_run: TheirRun, tmp_path: Path
) -> None:
    run = _lost(their_run)  # keep_last is 1: verl's step is not milepost's to delete
    assert [(s.step, s.state) for s in list_steps(run)] == [(SAVED_STEP, "foreign"), (SAVED_STEP + 1, "committed")]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(SAVED_STEP + 1)
    milepost.merge(their_run.step_dir, tmp_path / "verls")
    assert milepost.test(run / their_run.step_dir.name, tmp_path / "verls").ok
    assert not milepost.test(run, tmp_path / "verls").ok


def _fresh_rng(ranks: int) -> list[str]:
    return [
        f"             fresh: RNG (saved by 2 ranks, now {ranks}; each rank has a fresh stream of its own, "
        f"derived from seed 5 and step {SAVED_STEP})"
    ]


# What verl is known to get wrong. Where an assertion on verl fails, verl has mended it: drop it here and in the README.


def test_a_plain_tensor_that_sorts_first_hides_no_rank(their_run: TheirRun, tmp_path: Path) -> None:
    assert their_run.faults["plain_first"] == [17, 16]  # rank 0's part of 33 rows, passed off as the whole
    role = their_run.root.parent / "faults" / "plain_first" / "actor"
    with pytest.raises(MismatchError, match="a_scale"):  # a Qwen2 has none
        milepost.merge(role, tmp_path / "out")
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "of_my_own", "tie_word_embeddings": true}')
    milepost.merge(role, tmp_path / "out", model=ModelOptions(hf_model_path=config))
    saved = sides.weights_of(their_run.verl.resumed["actor"])
    assert saved["model.embed_tokens.weight"].shape == (33, 16)
    sides.assert_same_tensors(
        load_file(tmp_path / "out" / "model.safetensors"), {**saved, "a_scale": torch.tensor(3.5)}
    )


def test_a_copy_of_another_ranks_file_is_refused(their_run: TheirRun, tmp_path: Path) -> None:
    assert their_run.faults["copied"] == [34, 16]  # rank 0's rows twice
    role = their_run.root.parent / "faults" / "copied" / "actor"
    with pytest.raises(DamagedError, match=r"rank_1\.pt: was written by rank 0; it is a copy of another rank's file"):
        milepost.merge(role, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_names_a_missing_step_does_not_begin_anew(elsewhere: list[Any], their_run: TheirRun) -> None:
    assert their_run.faults["lost"] is None  # verl trains from scratch
    resumed, lines, _ = elsewhere[0][2]
    sides.assert_same(resumed, their_run.verl.resumed)
    tracker = _lost(their_run) / "latest_checkpointed_iteration.txt"
    assert (
        f"  note       {tracker} names step 20, which is not there; step {SAVED_STEP} is the newest that is whole"
        in lines
    )
