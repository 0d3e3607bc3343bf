"""Whole runs of the real loop in real processes: going on after a stop is as if there had been none."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from whole_runs import measured, train

from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.checkpoint.steps import list_steps
from milepost.layouts import open_directory
from milepost.trainer.base_model import build_base_model
from milepost.trainer.logging import TENSORBOARD_DIR
from milepost.trainer.schema import TaskConfig, WarmStartConfig

QUICK = [
    "trainer.logger=[]",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_epochs=1",
]


def run(directory: Path, ranks: int, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Train to `steps` in fresh processes; the events of this session."""
    before = len(read_events(directory / EVENTS))
    mine = [f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={steps}"]
    run_ranks(train, ranks, [*QUICK, *overrides, *mine])
    return read_events(directory / EVENTS)[before:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained Qwen2 whose attention drops out: its training draws random numbers too."""
    directory = tmp_path_factory.mktemp("model") / "base"
    size = WarmStartConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        steps=0,
    )
    build_base_model(directory, TaskConfig(), size)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return directory


# On the same number of ranks, bit for bit


@pytest.fixture(scope="module")
def halves(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six steps at one go, and three and three in other processes; validated, with sampling, at other steps. The folder
    of the first three is lost: the others go on from what was uploaded."""
    root = tmp_path_factory.mktemp("halves")
    (root / "reward.py").write_text("def variety(prompt, response, ground_truth): return len(set(response)) / 4\n")
    settings = [
        f"reward.path={root / 'reward.py'}:variety",
        f"actor_rollout_ref.model.path={model}",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=20",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        *(
            f"{role}.optim.{setting}"
            for role in ("actor_rollout_ref.actor", "critic")
            for setting in ("total_training_steps=6", "lr_scheduler_type=cosine", "lr_warmup_steps=2")
        ),
    ]
    behind = [
        "trainer.save_freq=3",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        "trainer.logger=[tensorboard]",
    ]
    straight = run(root / "straight", 2, 6, *settings, *behind, "trainer.test_freq=2")
    settings += [f"trainer.remote_dir=file://{root / 'there'}", "trainer.test_freq=3"]
    first = run(root / "parts", 2, 3, *settings)
    (root / "parts").rename(root / "lost")
    second = run(root / "parts", 2, 6, *settings)
    return {"straight": straight, "first": first, "second": second, "root": root, "settings": settings}


def test_what_a_resumed_run_measures_is_bitwise_what_the_uninterrupted_one_did(halves: dict[str, Any]) -> None:
    straight, second = measured(halves["straight"]), measured(halves["second"])
    assert list(straight) == [1, 2, 3, 4, 5, 6] and list(second) == [4, 5, 6]
    assert measured(halves["first"]) == {step: straight[step] for step in (1, 2, 3)}
    assert second == {step: straight[step] for step in (4, 5, 6)}
    # The comparison sees something: rates, losses and the KL coefficient are others at each step.
    for name in ("actor/lr", "critic/lr", "actor/pg_loss", "critic/vf_loss", "actor/kl_loss", "critic/score/mean"):
        assert len({metrics[name] for metrics in straight.values()}) >= 3, name
    assert straight[4]["actor/reward_kl_penalty_coeff"] != straight[5]["actor/reward_kl_penalty_coeff"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_resumed_run_ends_with_bitwise_the_same_state(halves: dict[str, Any], role: str) -> None:
    straight, parts = (open_directory(halves["root"] / name / "global_step_6" / role) for name in ("straight", "parts"))
    assert list(straight) == list(parts)
    assert sum(name.startswith("optim/") for name in straight) > 60
    for name in straight:
        np.testing.assert_array_equal(straight[name].bits(), parts[name].bits(), err_msg=name)
    assert straight.objects["scheduler"] == parts.objects["scheduler"]
    assert straight.objects["scheduler"]["last_epoch"] == 6
    assert straight.objects["param_groups"] == parts.objects["param_groups"]
    assert flat(straight.objects["rng"]) == flat(parts.objects["rng"])
    assert straight.objects["rng"][0]["cpu"].tobytes() != straight.objects["rng"][1]["cpu"].tobytes()
    begun = open_directory(halves["root"] / "parts" / "global_step_3" / role)
    assert any(begun[name].bits().tobytes() != parts[name].bits().tobytes() for name in begun)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_step_saved_while_training_goes_on_is_bitwise_the_one_that_training_waited_for(
    halves: dict[str, Any], role: str
) -> None:
    behind, waited = (open_directory(halves["root"] / name / "global_step_3" / role) for name in ("straight", "lost"))
    assert list(behind) == list(waited)
    for name in behind:
        np.testing.assert_array_equal(behind[name].bits(), waited[name].bits(), err_msg=name)
    for name in ("scheduler", "param_groups"):
        assert behind.objects[name] == waited.objects[name]
    assert flat(behind.objects["rng"]) == flat(waited.objects["rng"])
    durable = {event["step"]: event for event in halves["straight"] if event["event"] == "save_durable"}
    assert durable[3]["stall"] < durable[3]["seconds"]
    assert durable[6]["stall"] == durable[6]["seconds"]


def flat(value: Any) -> Any:
    """Arrays as bytes, so that == compares all of it."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


def test_the_small_state_of_a_resumed_run_is_the_same(halves: dict[str, Any]) -> None:
    states = [
        json.loads((halves["root"] / name / "global_step_6/trainer_state.json").read_text())
        for name in ("straight", "parts")
    ]
    assert states[0]["parts"] == states[1]["parts"]
    assert states[0]["parts"]["data"]["offset"] == 60
    assert any(name.startswith("val/test_score/") for name in states[0]["metrics"])  # what keep_best may go by
    (resumed,) = [event for event in halves["second"] if event["event"] == "resume"]
    assert resumed["from_step"] == 3 and resumed["next_step"] == 4
    assert any(note.startswith("step 3 was fetched from file://") for note in resumed["notes"])
    assert [state.step for state in list_steps(halves["root"] / "there") if state.good] == [3, 6]
    assert {part["state"] for part in resumed["parts"]} == {"restored"} and len(resumed["parts"]) == 10


def test_tensorboard_has_bytes_seconds_and_stall_of_each_save_at_its_step(halves: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(halves["root"] / "straight" / TENSORBOARD_DIR))
    curves.Reload()
    shown = {
        name: {point.step: point.value for point in curves.Scalars(f"milepost/{name}")}
        for name in ("saved_bytes", "write_s", "stall_s")
    }
    durable = {event["step"]: event for event in halves["straight"] if event["event"] == "save_durable"}
    assert sorted(durable) == [3, 6]
    assert shown["saved_bytes"] == {step: event["bytes"] for step, event in durable.items()}
    for step, event in durable.items():
        assert shown["write_s"][step] == pytest.approx(event["seconds"])
        assert event["stall"] <= shown["stall_s"][step] * 1.000001  # float32; and a call around it is in it
    assert list(shown["stall_s"]) == [3, 6]


# A step that is named by its URL


@pytest.fixture(scope="module")
def named(halves: dict[str, Any]) -> dict[str, Any]:
    """On another machine: from the older one of the two steps that were uploaded; and from the newer one, of which a
    byte has changed. Each has copies of the steps where it uploads its own too."""
    root = halves["root"]
    for name in ("good", "bad"):
        shutil.copytree(root / "there", root / name)

    def begin(there: str, step: int, steps: int) -> list[dict[str, Any]]:
        url = f"file://{root / there}"
        settings = [f"trainer.remote_dir={url}", "trainer.resume_mode=resume_path"]
        settings.append(f"trainer.resume_from_path={url}/global_step_{step}")
        return run(root / f"from {there}", 1, steps, *halves["settings"], *settings)

    events = begin("good", 3, 4)
    weights = next((root / "bad/global_step_6/actor").glob("model_*"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(AssertionError) as refused:
        begin("bad", 6, 8)
    return {"events": events, "root": root, "refused": str(refused.value), "file": weights.name}


def test_a_step_that_lies_only_at_a_url_is_fetched_and_gone_on_from(named: dict[str, Any]) -> None:
    (resumed,) = [event for event in named["events"] if event["event"] == "resume"]
    assert (resumed["mode"], resumed["from_step"], resumed["next_step"]) == ("resume_path", 3, 4)
    assert {part["state"] for part in resumed["parts"] if "RNG" not in part["name"]} == {"restored"}
    assert [event["prompts"] for event in named["events"] if event["event"] == "step"] == [[30, 40]]
    # Step 6 is of a history that this run does not go on with: a start that takes the newest must not find it.
    assert list_steps(named["root"] / "good")[-1].step == 4
    assert list((named["root"] / "good").glob("*/global_step_6"))


def test_a_step_named_by_its_url_is_taken_or_none_is(named: dict[str, Any]) -> None:
    assert "DamagedError" in named["refused"] and named["file"] in named["refused"]
    assert (named["root"] / "bad/global_step_3").exists()  # to which it might have fallen back
    events = read_events(named["root"] / "from bad" / EVENTS)
    assert not [event for event in events if event["event"] in ("resume", "step")]
    assert not list((named["root"] / "from bad").glob("global_step_*"))


# On other numbers of ranks


REWARD = """
import os
def seen(prompt, response, ground_truth, **extra):
    with open(os.path.join({folder!r}, str(os.getpid())), "a") as file:
        file.write(prompt + "\\n")
    return 0.5
"""


@pytest.fixture(scope="module")
def elastic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """20 prompts, 6 a step, 10 steps: three epochs, on 2, then 3, then 1 and once more 1 rank."""
    root = tmp_path_factory.mktemp("elastic")
    (root / "seen").mkdir()
    prompts = [{"prompt": f"{number:02d}+1=", "ground_truth": str(number + 1)} for number in range(20)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "reward.py").write_text(REWARD.format(folder=str(root / "seen")))
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files=[{root / 'prompts.jsonl'}]",
        f"reward.path={root / 'reward.py'}:seen",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "trainer.save_freq=3",
    ]
    sessions = [run(root / "run", ranks, steps, *settings) for ranks, steps in ((2, 4), (3, 7), (1, 10), (1, 10))]
    lines = [line for path in (root / "seen").iterdir() for line in path.read_text().split()]
    return {"root": root, "sessions": sessions, "seen": Counter(lines)}


def test_every_prompt_comes_once_an_epoch_on_any_number_of_ranks(elastic: dict[str, Any]) -> None:
    assert elastic["seen"] == {f"{number:02d}+1=": 3 for number in range(20)}
    epochs = [
        event["metrics"]["training/epoch"] for s in elastic["sessions"] for event in s if event["event"] == "step"
    ]
    assert epochs == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_last_step_is_saved_once_whatever_save_freq_is(elastic: dict[str, Any]) -> None:
    saved = [[event["step"] for event in s if event["event"] == "save_durable"] for s in elastic["sessions"]]
    assert saved == [[3, 4], [6, 7], [9, 10], []]
    folders = sorted(
        int(path.name.removeprefix("global_step_")) for path in (elastic["root"] / "run").glob("global_step_*")
    )
    assert folders == [3, 4, 6, 7, 9, 10]


def test_each_start_says_what_it_restored_and_what_is_new(elastic: dict[str, Any]) -> None:
    resumes = [event for s in elastic["sessions"] for event in s if event["event"] == "resume"]
    assert [(event["from_step"], event["next_step"]) for event in resumes] == [(None, 1), (4, 5), (7, 8), (10, 11)]
    assert [(event["saved_world_size"], event["world_size"]) for event in resumes] == [
        (None, 2),
        (2, 3),
        (3, 1),
        (1, 1),
    ]
    for event in resumes[1:3]:
        states = {part["name"]: part["state"] for part in event["parts"]}
        fresh = {name for name, state in states.items() if state != "restored"}
        assert fresh == {"actor/RNG", "critic/RNG"}
        (why,) = {part["why"] for part in event["parts"] if part["state"] == "fresh"}
        assert f"saved by {event['saved_world_size']} ranks, now {event['world_size']}" in why
    assert all(s[-1]["event"] == "stop" and s[-1]["reason"] == "done" for s in elastic["sessions"])
    assert elastic["sessions"][-1][-1]["step"] == 10


# The training itself


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The defaults, cut short, on two ranks."""
    return run(
        tmp_path_factory.mktemp("learnt"),
        2,
        8,
        "trainer.val_before_train=true",
        "trainer.test_freq=100",  # so after the last step
        "actor_rollout_ref.actor.ppo_epochs=2",
    )


def test_ppo_improves_the_held_out_answers_of_the_embedded_task(learnt: list[dict[str, Any]]) -> None:
    before, after = (
        next(value for name, value in event["metrics"].items() if name.startswith("val/exact_match/"))
        for event in learnt
        if event["event"] == "validation"
    )
    assert before < 0.5
    assert after > before + 0.3
    rewards = [event["reward"] for event in learnt if event["event"] == "step"]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


VERL_NAMES = [
    *(f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "grad_norm", "lr")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "grad_norm", "lr")),
    *(f"critic/{name}/mean" for name in ("score", "rewards", "advantages", "returns", "values")),
    *(f"timing_s/{name}" for name in ("gen", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")),
    *("response_length/mean", "prompt_length/mean", "timing_s/step", "perf/throughput"),
    *("training/global_step", "training/epoch"),
]


def test_metrics_have_verls_names(learnt: list[dict[str, Any]]) -> None:
    (first,) = [event["metrics"] for event in learnt if event["event"] == "step" and event["step"] == 1]
    assert not [name for name in VERL_NAMES if name not in first]
    assert all(torch.tensor(value).isfinite() for value in first.values())
    assert first["prompt_length/mean"] > 3 and 1 <= first["response_length/mean"] <= 4
    # Prompts and responses of all ranks, each counted once.
    tokens = 256 * (first["prompt_length/mean"] + first["response_length/mean"])
    assert first["perf/total_num_tokens"] == pytest.approx(tokens)
    assert first["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)
