"""Whole runs under Megatron: going on after a stop is bitwise as if there had been none, and going on in another layout
or under another engine is the same but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from whole_runs import exit_statuses, measured, stopping_reward, train

pytest.importorskip("megatron.core")
pytest.importorskip("deepspeed")

import milepost
from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.checkpoint.verify import verify
from milepost.layouts import open_directory
from milepost.trainer.base_model import build_base_model
from milepost.trainer.schema import TaskConfig, WarmStartConfig

CUT = "actor_rollout_ref.actor.megatron"
MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
TP2, PP2 = [MEGATRON, f"{CUT}.tensor_model_parallel_size=2"], [MEGATRON, f"{CUT}.pipeline_model_parallel_size=2"]
UNEVEN = f"{CUT}.override_transformer_config.num_layers_in_first_pipeline_stage=1"
SEQUENCES = f"{CUT}.sequence_parallel=true"
SHARED = f"{CUT}.use_distributed_optimizer=true"
DIST = "actor_rollout_ref.actor.checkpoint.megatron_format=dist"
ZERO = "actor_rollout_ref.actor.strategy=deepspeed"
GREEDY = "actor_rollout_ref.rollout.do_sample=false"
"""What is drawn depends on which process draws; the likeliest tokens do not."""


def _measured(root: Path) -> dict[int, dict[str, float]]:
    return measured(read_events(root / EVENTS))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps at one go under TP2; the last two again from the saved second one: under TP2, and, where nothing is
    drawn, under uneven PP2 with Megatron's distributed optimizer in dist form, under FSDP2, and on from there under
    FSDP2, ZeRO-3, TP2, and with the distributed optimizer over two data-parallel ranks."""
    root = tmp_path_factory.mktemp("runs")
    size = WarmStartConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3, steps=0)
    build_base_model(root / "model", TaskConfig(), size)
    (root / "reward.py").write_text("def variety(prompt, response, ground_truth): return len(set(response)) / 4\n")
    (root / "stopping.py").write_text(stopping_reward(root / "pp2", 4))
    settings = [
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
        "data.max_response_length=4",
        f"reward.path={root / 'reward.py'}:variety",
        f"actor_rollout_ref.model.path={root / 'model'}",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "critic.fsdp_config.dtype=fp32",
        "actor_rollout_ref.actor.deepspeed_config.dtype=fp32",
        *(f"{role}.optim.lr=1e-3" for role in ("actor_rollout_ref.actor", "critic")),
        *(f"{role}.optim.lr_scheduler_type=cosine" for role in ("actor_rollout_ref.actor", "critic")),
        *(f"{role}.optim.total_training_steps=8" for role in ("actor_rollout_ref.actor", "critic")),
    ]

    def run(name: str, ranks: int, mine: list[str], came_from: str | None = None, step: int = 2) -> None:
        mine = [f"trainer.default_local_dir={root / name}", f"trainer.total_training_steps={step + 2}", *mine]
        if came_from is not None:
            folder = root / came_from / f"global_step_{step}"
            mine += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
        run_ranks(train, ranks, [*settings, *mine])

    run("whole", 2, TP2)
    run("tp2", 2, TP2, "whole")
    # It would go on for long, but for a SIGTERM to its second stage in the rollout of step 5.
    stopping = [
        "trainer.total_training_steps=99",
        "trainer.save_freq=-1",
        f"reward.path={root / 'stopping.py'}:variety",
    ]
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={root / 'whole/global_step_2'}"]
    pp2 = [*PP2, UNEVEN, SHARED, DIST, GREEDY, *stopping, *resumed, f"trainer.default_local_dir={root / 'pp2'}"]
    (root / "pp2-ends").write_text(str(exit_statuses(2, [*settings, *pp2])))
    run("fsdp", 1, [GREEDY], "whole")
    run("fsdp-after-pp2", 1, [GREEDY], "pp2", 4)
    run("tp2-after-fsdp", 2, [*TP2, SEQUENCES, GREEDY], "fsdp", 4)
    run("zero-after-pp2", 2, [ZERO, GREEDY], "pp2", 4)
    run("shared-after-zero", 2, [MEGATRON, SHARED, GREEDY], "zero-after-pp2", 6)
    run("fsdp-after-zero", 1, [GREEDY], "zero-after-pp2", 6)
    return root


def test_going_on_is_bitwise_as_if_there_had_been_no_stop(runs: Path) -> None:
    whole, again = _measured(runs / "whole"), _measured(runs / "tp2")
    assert list(whole) == [1, 2, 3, 4] and list(again) == [3, 4]
    assert again == {step: whole[step] for step in (3, 4)}
    for role in ("actor", "critic"):
        ours, theirs = (open_directory(runs / name / "global_step_4" / role) for name in ("tp2", "whole"))
        assert set(ours) == set(theirs)
        assert all((ours[name].bits() == entry.bits()).all() for name, entry in theirs.items())
        rng, other = ours.objects["rng"], theirs.objects["rng"]
        assert set(rng) == {0, 1} and str(rng) == str(other)


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        ("pp2", "fsdp", (3, 4)),
        ("fsdp-after-pp2", "tp2-after-fsdp", (5, 6)),
        ("zero-after-pp2", "fsdp-after-pp2", (5, 6)),
        ("shared-after-zero", "fsdp-after-zero", (7, 8)),
    ],
)
def test_another_layout_and_another_engine_go_on_the_same(
    runs: Path, one: str, other: str, steps: tuple[int, int]
) -> None:
    ours, theirs = _measured(runs / one), _measured(runs / other)
    assert tuple(ours) == tuple(theirs) == steps
    for step in steps:
        assert set(ours[step]) == set(theirs[step])
        for name, value in theirs[step].items():
            assert ours[step][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (step, name)


@pytest.mark.parametrize("name", ["zero-after-pp2", "shared-after-zero"])
def test_nothing_but_random_states_is_fresh_between_zero_and_megatron(runs: Path, name: str) -> None:
    (resume,) = [e for e in read_events(runs / name / EVENTS) if e["event"] == "resume"]
    states = {part["name"]: part["state"] for part in resume["parts"]}
    assert len(states) == 10
    assert {part for part, state in states.items() if state != "restored"} <= {"actor/RNG", "critic/RNG"}


def test_everything_is_restored_but_random_states_of_another_number_of_ranks(runs: Path) -> None:
    events = [e for e in read_events(runs / "fsdp-after-pp2" / EVENTS) if e["event"] == "resume"]
    (resume,) = events
    states = {part["name"]: part["state"] for part in resume["parts"]}
    assert {name for name, state in states.items() if state != "restored"} == {"actor/RNG", "critic/RNG"}


def test_a_signal_to_one_stage_stops_both_with_the_same_step_saved(runs: Path) -> None:
    assert (runs / "pp2-ends").read_text() == "[75, 75]"
    (stop,) = [event for event in read_events(runs / "pp2" / EVENTS) if event["event"] == "stop"]
    assert (stop["reason"], stop["signal"], stop["step"], stop["saved"]) == ("signal", "SIGTERM", 4, True)


@pytest.mark.parametrize("name", ["whole", "pp2"])
def test_a_step_is_good_and_merges(runs: Path, name: str, tmp_path: Path) -> None:
    step = runs / name / "global_step_4"
    assert not verify(step, deep=True).problems
    for role, head in (("actor", "Qwen2ForCausalLM"), ("critic", "Qwen2ForTokenClassification")):
        milepost.merge(step / role, tmp_path / role)
        assert head in (tmp_path / role / "config.json").read_text()
