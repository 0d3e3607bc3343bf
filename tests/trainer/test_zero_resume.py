"""Whole runs under DeepSpeed ZeRO-3: going on after a stop is bitwise as if there had been none, and going on under
FSDP2, or from it, is the same but for rounding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from whole_runs import exit_statuses, measured, stopping_reward, train

pytest.importorskip("deepspeed")

from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.checkpoint.verify import verify
from milepost.layouts import open_directory
from milepost.trainer.base_model import build_base_model
from milepost.trainer.schema import TaskConfig, WarmStartConfig

ZERO, FSDP = "actor_rollout_ref.actor.strategy=deepspeed", "actor_rollout_ref.actor.strategy=fsdp2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps at one go, and each of the last two from the saved second one, in other processes; what of it is under
    ZeRO-3 and what under FSDP2 is in the names. The attention drops out: training draws random numbers too. What
    ZeRO-3 does with FSDP2's step ends with a SIGTERM to one rank, in the rollout after its first step."""
    root = tmp_path_factory.mktemp("runs")
    size = WarmStartConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        steps=0,
    )
    build_base_model(root / "model", TaskConfig(), size)
    config = json.loads((root / "model/config.json").read_text())
    (root / "model/config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    (root / "reward.py").write_text("def variety(prompt, response, ground_truth): return len(set(response)) / 4\n")
    (root / "stopping.py").write_text(stopping_reward(root / "zero from fsdp", 3))
    settings = [
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
        "data.max_response_length=4",
        f"reward.path={root / 'reward.py'}:variety",
        f"actor_rollout_ref.model.path={root / 'model'}",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "critic.fsdp_config.dtype=fp32",
        "actor_rollout_ref.actor.deepspeed_config.dtype=fp32",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
        *(
            f"{role}.optim.{setting}"
            for role in ("actor_rollout_ref.actor", "critic")
            for setting in ("lr=1e-3", "total_training_steps=4", "lr_scheduler_type=cosine", "lr_warmup_steps=2")
        ),
    ]

    ends: dict[str, Any] = {}

    def run(
        name: str, steps: int, engine: str, came_from: str | None = None, *, stopped: bool = False
    ) -> list[dict[str, Any]]:
        mine = [f"trainer.default_local_dir={root / name}", f"trainer.total_training_steps={steps}", engine]
        if came_from is not None:
            step = root / came_from / "global_step_2"
            mine += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}"]
        if stopped:
            ends[name] = exit_statuses(2, [*settings, *mine, f"reward.path={root / 'stopping.py'}:variety"])
        else:
            run_ranks(train, 2, [*settings, *mine])
        return read_events(root / name / EVENTS)

    return {
        "root": root,
        "ends": ends,
        "zero": run("zero", 4, ZERO),
        "zero again": run("zero again", 4, ZERO, "zero"),
        "fsdp": run("fsdp", 3, FSDP),
        "zero from fsdp": run("zero from fsdp", 99, ZERO, "fsdp", stopped=True),
        "fsdp from zero": run("fsdp from zero", 3, FSDP, "zero"),
    }


def test_what_a_resumed_run_measures_is_bitwise_what_the_uninterrupted_one_did(runs: dict[str, Any]) -> None:
    straight, again = measured(runs["zero"]), measured(runs["zero again"])
    assert list(straight) == [1, 2, 3, 4] and list(again) == [3, 4]
    assert again == {step: straight[step] for step in (3, 4)}
    for name in ("actor/lr", "critic/lr", "actor/pg_loss", "critic/vf_loss", "actor/kl_loss", "critic/score/mean"):
        assert len({metrics[name] for metrics in straight.values()}) >= 3, name


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_resumed_run_ends_with_bitwise_the_same_state(runs: dict[str, Any], role: str) -> None:
    straight, again = (open_directory(runs["root"] / name / "global_step_4" / role) for name in ("zero", "zero again"))
    assert straight.layout == "deepspeed" and list(straight) == list(again)
    assert sum(name.startswith("optim/") for name in straight) > 60
    for name in straight:
        np.testing.assert_array_equal(straight[name].bits(), again[name].bits(), err_msg=name)
    for part in ("scheduler", "param_groups"):
        assert straight.objects[part] == again.objects[part]
    assert straight.objects["scheduler"]["last_epoch"] == 4
    for rank in (0, 1):
        assert straight.objects["rng"][rank]["cpu"].tobytes() == again.objects["rng"][rank]["cpu"].tobytes()
    # And so do the files: what pads the flat tensors too is the same.
    for one, other in zip(
        *(sorted((runs["root"] / name / "global_step_4" / role).rglob("*.pt")) for name in ("zero", "zero again")),
        strict=True,
    ):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("resumed", "straight"), [("zero from fsdp", "fsdp"), ("fsdp from zero", "zero")])
def test_the_step_after_a_change_of_engine_is_the_same_but_for_rounding(
    runs: dict[str, Any], resumed: str, straight: str
) -> None:
    ours, theirs = measured(runs[resumed])[3], measured(runs[straight])[3]
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
    (event,) = [event for event in runs[resumed] if event["event"] == "resume"]
    assert event["from_step"] == 2
    assert {part["state"] for part in event["parts"]} == {"restored"} and len(event["parts"]) == 10


def test_a_step_under_deepspeed_is_committed_whole(runs: dict[str, Any]) -> None:
    from milepost.checkpoint.steps import judge

    step = runs["root"] / "zero/global_step_4"
    assert judge(step, ("actor", "critic")).state == "committed"
    (step / "critic/latest").unlink()
    assert judge(step).state == "incomplete"


def test_a_signal_to_one_rank_stops_all_with_the_same_step_saved(runs: dict[str, Any]) -> None:
    assert runs["ends"] == {"zero from fsdp": [75, 75]}
    (stop,) = [event for event in runs["zero from fsdp"] if event["event"] == "stop"]
    assert (stop["reason"], stop["signal"], stop["step"], stop["saved"]) == ("signal", "SIGTERM", 3, True)
    assert not verify(runs["root"] / "zero from fsdp/global_step_3", deep=True).problems
