"""What a training loop sees: save, retention, and every way to begin."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import Counter, Run, TinyEngine, disk_is_at, halve, make_foreign, names, resumed, trained

from milepost.checkpoint.diary.events import EVENTS, EventLog, read_events
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.manifest import check_files, read_manifest
from milepost.checkpoint.resume import Part
from milepost.checkpoint.steps import TRACKER, read_tracker, scan
from milepost.errors import (
    CallError,
    ConfigError,
    DamagedError,
    IncompleteError,
    MilepostError,
    MismatchError,
    NotFoundError,
    WriteError,
)

MODEL = "model_world_size_1_rank_0.pt"
OPTIM = "optim_world_size_1_rank_0.pt"


def numbers(root: Path) -> list[int]:
    return [step.step for step in scan(root)]


def blank(path: Path) -> None:
    """Other bytes, the same size: what no comparison of sizes finds."""
    path.write_bytes(bytes(path.stat().st_size))


def parts(run: Run) -> dict[str, Part]:
    return {part.name: part for part in run.manager.report.parts}


# Saving


def test_a_step_is_saved_whole_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    run = trained(tmp_path, 1, 2)
    step_dir = tmp_path / "global_step_2"
    assert disk_is_at(step_dir, 2)
    manifest = read_manifest(step_dir)
    assert (manifest.step, manifest.world_size, dict(manifest.roles)) == (2, 1, {"actor": "fsdp", "critic": "fsdp"})
    on_disk = {path.relative_to(step_dir).as_posix() for path in step_dir.rglob("*") if path.is_file()}
    assert {record.path for record in manifest.files} == on_disk - {"manifest.json"}
    assert check_files(step_dir, manifest, deep=True) == ()
    assert read_tracker(tmp_path) == 2
    other = resumed(tmp_path)
    assert other.manager.report.step == 2
    assert other.manager.report.next_step == 3
    assert other.is_at(2)
    assert other.actor.schedule == {"last_epoch": 2}
    assert run.is_at(2)


def test_the_last_step_is_there_once(tmp_path: Path) -> None:
    """Steps end at 237 with a save every 50: 237 is saved, and saving it again does nothing."""
    run = Run(tmp_path)
    run.manager.resume()
    for step in range(1, 238):
        run.counter.value = step
        if step % 50 == 0:
            run.train(step)
    run.train(237)
    before = (tmp_path / "global_step_237/manifest.json").stat().st_mtime_ns
    assert run.manager.save(237) == tmp_path / "global_step_237"
    again = resumed(tmp_path)
    assert again.manager.save(237) == tmp_path / "global_step_237"
    assert (tmp_path / "global_step_237/manifest.json").stat().st_mtime_ns == before
    assert numbers(tmp_path) == [50, 100, 150, 200, 237]
    durable = [event["step"] for event in read_events(tmp_path / EVENTS) if event["event"] == "save_durable"]
    assert durable == [50, 100, 150, 200, 237]


def test_steps_only_go_forward(tmp_path: Path) -> None:
    run = trained(tmp_path, 5)
    with pytest.raises(CallError, match="step 4 cannot be saved after step 5"):
        run.manager.save(4)


def test_a_failed_critic_leaves_the_step_before_whole(tmp_path: Path) -> None:
    """keep_last=1, 10 is saved, the critic's save of 20 fails: 10 stays, actor and critic."""
    run = trained(tmp_path, 10, keep_last=1)
    run.reach(20)
    run.critic.fail_on_save = RuntimeError("the critic is out of luck")
    with pytest.raises(MilepostError, match=r"step 20 was not saved: .*global_step_20/critic.*out of luck"):
        run.manager.save(20)
    assert names(tmp_path) == {"global_step_10", TRACKER}
    assert read_tracker(tmp_path) == 10
    assert resumed(tmp_path).is_at(10)
    assert read_events(tmp_path / EVENTS)[-2]["event"] == "kill_seen"
    failed = next(event for event in read_events(tmp_path / EVENTS) if event["event"] == "save_failed")
    assert failed["step"] == 20
    assert "out of luck" in failed["error"]
    run.critic.fail_on_save = None
    run.manager.save(20)
    assert names(tmp_path) == {"global_step_20", TRACKER}


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    class Twice(TinyEngine):
        def save(self, files: Any) -> None:
            super().save(files)
            super().save(files)

    run = Run(tmp_path, roles={"actor": Twice("actor")})
    run.manager.resume()
    said = r"global_step_1/actor/model_world_size_1_rank_0\.pt: a file of that name is there already"
    with pytest.raises(MilepostError, match=said):
        run.manager.save(1)
    assert names(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "run")
    run.manager = CheckpointManager(tmp_path / "file" / "run", {"actor": run.actor})
    run.manager.resume()
    with pytest.raises(CallError, match=r"file/run: a part of the path is a file; choose another place"):
        run.manager.save(1)


def test_weights_in_hugging_face_form_are_part_of_the_commit(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 12, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "tie_word_embeddings": False, "torch_dtype": "float32", "dtype": "float32",
    }  # fmt: skip
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (12, 8),
        f"{layer}self_attn.q_proj.weight": (8, 8), f"{layer}self_attn.q_proj.bias": (8,),
        f"{layer}self_attn.k_proj.weight": (4, 8), f"{layer}self_attn.k_proj.bias": (4,),
        f"{layer}self_attn.v_proj.weight": (4, 8), f"{layer}self_attn.v_proj.bias": (4,),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.gate_proj.weight": (16, 8), f"{layer}mlp.up_proj.weight": (16, 8),
        f"{layer}mlp.down_proj.weight": (8, 16),
        f"{layer}input_layernorm.weight": (8,), f"{layer}post_attention_layernorm.weight": (8,),
        "model.norm.weight": (8,), "lm_head.weight": (12, 8),
    }  # fmt: skip

    class WithCompanions(TinyEngine):
        def save(self, files: Any) -> None:
            super().save(files)
            for name, content in {"config.json": json.dumps(config), "tokenizer.json": "{}"}.items():
                with files.create(f"huggingface/{name}") as file:
                    file.write(content.encode())

    engine = WithCompanions("actor", shapes=shapes)
    run = Run(tmp_path, roles={"actor": engine}, save_contents=("model", "optimizer", "extra", "hf_model"))
    run.manager.resume()
    engine.train(1)
    step_dir = run.manager.save(1)
    from safetensors.torch import load_file

    exported = load_file(step_dir / "actor/huggingface/model.safetensors")
    assert set(exported) == set(shapes)
    assert all(torch.equal(exported[name], engine.weights[name]) for name in shapes)
    manifest = read_manifest(step_dir)
    assert "hf_model" in manifest.contents
    assert {path.name for path in (step_dir / "actor/huggingface").iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    assert "actor/huggingface/model.safetensors" in {record.path for record in manifest.files}
    assert check_files(step_dir, manifest, deep=True) == ()
    assert not list(step_dir.rglob(".*"))


# Retention


def test_retention_survives_a_restart(tmp_path: Path) -> None:
    """keep_last=1: save 1; a new process resumes 1 and saves 2: only 2 is left."""
    trained(tmp_path, 1, keep_last=1)
    resumed(tmp_path, keep_last=1).train(2)
    assert names(tmp_path) == {"global_step_2", TRACKER}


def test_exports_and_steps_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2, 3)
    make_foreign(tmp_path / "global_step_1")
    (tmp_path / "global_step_2_hf").mkdir()
    resumed(tmp_path, keep_last=2).train(4)
    assert names(tmp_path) == {"global_step_1", "global_step_2_hf", "global_step_3", "global_step_4", TRACKER}


def test_a_damaged_step_does_not_use_the_budget(tmp_path: Path) -> None:
    run = trained(tmp_path, 1, 2, keep_last=2)
    halve(tmp_path / "global_step_2/actor" / MODEL)
    run.train(3)
    assert numbers(tmp_path) == [1, 2, 3]
    run.train(4)
    assert numbers(tmp_path) == [3, 4]


def test_nothing_is_deleted_before_the_new_step_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, 1, keep_last=1)
    seen = []
    rename = Path.rename

    def watch(path: Path, target: Path) -> Path:
        if Path(target).name == "global_step_2":
            seen.append(numbers(tmp_path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watch)
    run.train(2)
    assert seen == [[1]]
    assert numbers(tmp_path) == [2]


# Beginning: auto


def test_an_empty_folder_is_a_fresh_start_and_says_so(tmp_path: Path) -> None:
    run = resumed(tmp_path / "p" / "e")
    assert run.manager.report.step is None
    assert run.manager.report.lines() == [
        f"fresh start in {tmp_path}/p/e on 1 rank",
        "  actor      fresh: weights, optimizer, learning-rate schedule, RNG",
        "  critic     fresh: weights, optimizer, learning-rate schedule, RNG",
        "  counter    fresh",
        "  next       step 1",
    ]


def test_the_block_of_a_resume(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    EventLog(tmp_path / EVENTS).write("stop", step=2, reason="done")
    assert resumed(tmp_path).manager.report.lines() == [
        f"resumed from {tmp_path}/global_step_2: step 2, on 1 rank",
        "  actor      restored: weights, optimizer, learning-rate schedule, RNG",
        "  critic     restored: weights, optimizer, learning-rate schedule, RNG",
        "  counter    restored",
        "  next       step 3",
    ]


def test_the_tracker_does_not_make_it_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    (tmp_path / TRACKER).write_text("20")
    run = resumed(tmp_path)
    assert run.is_at(10)
    assert any("names step 20, which is not there" in line for line in run.manager.report.lines())
    run.train(11)
    assert read_tracker(tmp_path) == 11


def test_the_tracker_never_goes_back_while_its_step_is_there(tmp_path: Path) -> None:
    run = trained(tmp_path, 1)
    (tmp_path / "global_step_9").mkdir()
    (tmp_path / TRACKER).write_text("9")
    run.train(2)
    assert read_tracker(tmp_path) == 9


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: halve(step / "actor" / MODEL),
        lambda step: halve(step / "critic" / OPTIM),
        lambda step: (step / "critic" / MODEL).unlink(),
        lambda step: (step / "trainer_state.json").unlink(),
        lambda step: halve(step / "manifest.json"),
        lambda step: (step / "manifest.json").unlink(),
        lambda step: blank(step / "actor" / MODEL),
        lambda step: blank(step / "critic" / "extra_state_world_size_1_rank_0.pt"),
        lambda step: blank(step / "trainer_state.json"),
    ],
)
def test_a_step_that_is_not_whole_is_passed_over_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    trained(tmp_path, 10, 20)
    damage(tmp_path / "global_step_20")
    run = Run(tmp_path)
    loads: list[int] = []
    run.actor.finish_load = lambda: loads.append(1)  # type: ignore[method-assign]
    assert run.manager.resume() == 10
    assert run.is_at(10)
    assert loads == [1]
    (skipped,) = run.manager.report.skipped
    assert skipped.folder == "global_step_20"
    assert any("not taken  global_step_20: " in line for line in run.manager.report.lines())
    # The way back to 20: the bad one is moved aside, not deleted, and 20 is committed anew.
    run.train(11)
    assert numbers(tmp_path) == [10, 11]
    run.train(20)
    assert disk_is_at(tmp_path / "global_step_20", 20)
    (aside,) = tmp_path.glob("set_aside_*")
    assert names(aside) == {"global_step_20"}
    assert resumed(tmp_path).is_at(20)


def test_where_no_step_is_whole_it_does_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 10, 20)
    halve(tmp_path / "global_step_20/actor" / MODEL)
    halve(tmp_path / "global_step_10/actor" / MODEL)
    with pytest.raises(IncompleteError, match=r"global_step_20 is damaged: .*rank_0\.pt has .* resume_mode=disable"):
        resumed(tmp_path)
    run = resumed(tmp_path, "disable")
    assert run.manager.report.step is None


def test_a_tracker_without_any_step_does_not_begin_anew(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("20")
    with pytest.raises(IncompleteError, match="names step 20, but no step lies in"):
        resumed(tmp_path)


def test_litter_of_killed_saves_is_swept_and_nothing_else(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    (tmp_path / ".global_step_2.0123abcd.tmp" / "actor").mkdir(parents=True)
    (tmp_path / ".latest_checkpointed_iteration.0123abcd.tmp").write_text("2")
    (tmp_path / ".global_step_2.backup").mkdir()
    (tmp_path / "global_step_3.tmp").mkdir()
    run = resumed(tmp_path)
    assert names(tmp_path) == {"global_step_1", TRACKER, ".global_step_2.backup", "global_step_3.tmp"}
    assert any("removed .global_step_2.0123abcd.tmp" in line for line in run.manager.report.lines())


# Beginning: by name, or afresh


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    trained(tmp_path, 10)
    with pytest.raises(NotFoundError, match="global_step_11: no such folder"):
        resumed(tmp_path, "resume_path", tmp_path / "global_step_11")
    with pytest.raises(ConfigError, match="resume_from_path"):
        resumed(tmp_path, "resume_path")
    with pytest.raises(NotFoundError, match=r"name one of them, such as .*global_step_10"):
        resumed(tmp_path, "resume_path", tmp_path)
    with pytest.raises(NotFoundError, match=r"one role of a step; name the step, .*global_step_10$"):
        resumed(
            tmp_path, "resume_path", next(path for path in (tmp_path / "global_step_10").iterdir() if path.is_dir())
        )


def test_a_named_step_that_is_not_whole_is_an_error_and_no_other_is_taken(tmp_path: Path) -> None:
    trained(tmp_path, 10, 20)
    halve(tmp_path / "global_step_20/actor" / MODEL)
    with pytest.raises(DamagedError, match=r"global_step_20 cannot be resumed from: .*rank_0\.pt has"):
        resumed(tmp_path, "resume_path", tmp_path / "global_step_20")
    blank(tmp_path / "global_step_10/critic" / MODEL)
    with pytest.raises(DamagedError, match="critic"):
        resumed(tmp_path, "resume_path", tmp_path / "global_step_10")


def test_an_unknown_mode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume_mode=never: choose from auto, disable, resume_path"):
        resumed(tmp_path, "never")


def test_going_back_to_an_older_step_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    trained(tmp_path, 10, 20, 30)
    run = resumed(tmp_path, "resume_path", tmp_path / "global_step_10")
    assert run.is_at(10)
    assert numbers(tmp_path) == [10, 20, 30]
    assert any("moves 2 newer steps" in line for line in run.manager.report.lines())
    run.train(15)
    assert numbers(tmp_path) == [10, 15]
    assert read_tracker(tmp_path) == 15
    (aside,) = tmp_path.glob("set_aside_*")
    assert names(aside) == {"global_step_20", "global_step_30"}
    assert disk_is_at(aside / "global_step_30", 30)
    # What was diverged from is not what the next start takes.
    assert resumed(tmp_path).is_at(15)
    assert resumed(tmp_path, "resume_path", aside / "global_step_30").is_at(30)
    moved = next(event for event in read_events(tmp_path / EVENTS) if event["event"] == "set_aside")
    assert moved["folders"] == ["global_step_20", "global_step_30"]


def test_a_fresh_start_keeps_what_was_there(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    run = resumed(tmp_path, "disable", keep_last=1)
    assert run.manager.report.lines()[0].startswith("fresh start")
    assert numbers(tmp_path) == [1, 2]
    run.reach(1)
    run.counter.value = -1
    run.manager.save(1)
    (aside,) = tmp_path.glob("set_aside_*")
    assert names(aside) == {"global_step_1", "global_step_2"}
    assert disk_is_at(aside / "global_step_2", 2)
    assert resumed(tmp_path).counter.value == -1
    assert read_tracker(tmp_path) == 1


def test_a_step_of_another_run_may_be_the_beginning(tmp_path: Path) -> None:
    trained(tmp_path / "a", 10)
    trained(tmp_path / "b", 4, 12)
    run = resumed(tmp_path / "b", "resume_path", tmp_path / "a/global_step_10")
    assert run.is_at(10)
    run.train(11)
    assert numbers(tmp_path / "b") == [11]
    (aside,) = (tmp_path / "b").glob("set_aside_*")
    assert names(aside) == {"global_step_4", "global_step_12"}


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_a_restarted_run_goes_on_from_its_own_steps(tmp_path: Path, mode: str) -> None:
    trained(tmp_path, 10, 20, run_id="first")
    path = tmp_path / "global_step_10" if mode == "resume_path" else None
    start = 11 if path else 1
    # Killed before its first save, it begins again as it was told.
    resumed(tmp_path, mode, path, run_id="second")
    run = resumed(tmp_path, mode, path, run_id="second", attempt=1)
    assert run.manager.report.next_step == start
    run.train(start)
    run = resumed(tmp_path, mode, path, run_id="second", attempt=2)
    assert run.is_at(start)
    assert any("restart 2 of this run" in line for line in run.manager.report.lines())
    # Its own step is not whole: that is no reason to begin again.
    halve(tmp_path / f"global_step_{start}/actor" / MODEL)
    with pytest.raises(IncompleteError, match=f"global_step_{start} is damaged"):
        resumed(tmp_path, mode, path, run_id="second", attempt=3)
    # A new run that is told the same begins as it is told.
    assert resumed(tmp_path, mode, path, run_id="third").manager.report.next_step == start


def test_saving_into_a_folder_with_steps_needs_a_decision(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(CallError, match="call resume"):
        Run(tmp_path).manager.save(2)
    Run(tmp_path / "new").manager.save(2)
    assert numbers(tmp_path / "new") == [2]


# What fits and what does not


def test_a_checkpoint_without_optimizer_restores_the_weights_and_says_so(tmp_path: Path) -> None:
    bare = TinyEngine("actor", optimizer=False)
    old = Run(tmp_path, roles={"actor": bare})
    old.manager.resume()
    bare.train(3)
    old.manager.save(3)
    run = Run(tmp_path)
    run.manager = CheckpointManager(tmp_path, {"actor": run.actor})
    assert run.manager.resume() == 3
    assert all(torch.equal(tensor, bare.weights[name]) for name, tensor in run.actor.weights.items())
    assert not any(tensor.any() for tensor in run.actor.moments.values())
    assert parts(run)["actor/optimizer"] == Part("actor/optimizer", "fresh", "the checkpoint has none")
    assert "  actor      restored: weights, RNG" in run.manager.report.lines()
    assert "             fresh: optimizer (the checkpoint has none)" in run.manager.report.lines()


def test_a_model_without_optimizer_takes_the_weights(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    run = Run(tmp_path)
    bare = TinyEngine("actor", optimizer=False)
    run.manager = CheckpointManager(tmp_path, {"actor": bare})
    run.manager.resume()
    expected = TinyEngine("actor")
    expected.train(3)
    assert all(torch.equal(tensor, expected.weights[name]) for name, tensor in bare.weights.items())
    assert parts(run)["actor/optimizer"] == Part("actor/optimizer", "skipped", "this run has none")
    assert parts(run)["counter"] == Part("counter", "skipped", "this run has none")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"layer.weight": (5, 3), "layer.bias": (5,)}, r"actor: the checkpoint holds head\.weight.*no place"),
        (
            {"layer.weight": (5, 3), "layer.bias": (5,), "head.weight": (2, 5), "tail.weight": (1,)},
            r"actor: the checkpoint lacks tail\.weight",
        ),
        (
            {"layer.weight": (5, 3), "layer.bias": (5,), "head.weight": (3, 5)},
            r"actor: head\.weight has shape \[2, 5\] in the checkpoint and \[3, 5\] in this model",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_loaded(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    trained(tmp_path, 3)
    run = Run(tmp_path)
    other = TinyEngine("actor", shapes=shapes)
    run.manager = CheckpointManager(tmp_path, {"critic": run.critic, "actor": other})
    with pytest.raises(MismatchError, match=message):
        run.manager.resume()
    assert not any(tensor.any() for engine in (other, run.critic) for tensor in engine.everything().values())


def test_another_element_type_is_cast_and_said(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    run = Run(tmp_path)
    half = TinyEngine("actor", dtype=torch.bfloat16)
    run.manager = CheckpointManager(tmp_path, {"actor": half})
    run.manager.resume()
    expected = TinyEngine("actor")
    expected.train(3)
    assert all(torch.equal(tensor, expected.weights[name].bfloat16()) for name, tensor in half.weights.items())
    assert parts(run)["actor/weights"] == Part("actor/weights", "restored", "3 cast from float32 to bfloat16")


def test_integers_are_not_cast(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    run = Run(tmp_path)
    other = TinyEngine("actor")
    other.weights["layer.bias"] = torch.zeros(5, dtype=torch.int64)
    run.manager = CheckpointManager(tmp_path, {"actor": other})
    with pytest.raises(MismatchError, match=r"layer\.bias is float32 in the checkpoint and int64 in this model"):
        run.manager.resume()


@pytest.mark.parametrize("named_in_model", [("embed", "head"), ("embed",), ("head",)])
def test_a_tied_weight_may_have_either_name_or_both(tmp_path: Path, named_in_model: tuple[str, ...]) -> None:
    saver = TinyEngine("actor", shapes={"embed": (4, 2)}, optimizer=False)
    saver.train(1)
    saver.weights["head"] = saver.weights["embed"]
    old = Run(tmp_path, roles={"actor": saver})
    old.manager.resume()
    old.manager.save(1)
    loader = TinyEngine("actor", shapes={"embed": (4, 2)}, optimizer=False)
    tied = loader.weights.pop("embed")
    loader.weights = dict.fromkeys(named_in_model, tied)
    assert CheckpointManager(tmp_path, {"actor": loader}).resume() == 1
    assert torch.equal(tied, saver.weights["embed"])


def test_a_weight_that_is_tied_only_now_is_found_under_its_other_name(tmp_path: Path) -> None:
    saver = TinyEngine("actor", shapes={"embed": (4, 2)}, optimizer=False)
    saver.train(1)
    old = Run(tmp_path, roles={"actor": saver})
    old.manager.resume()
    old.manager.save(1)
    loader = TinyEngine("actor", shapes={"embed": (4, 2)}, optimizer=False)
    loader.weights["head"] = loader.weights["embed"]
    assert CheckpointManager(tmp_path, {"actor": loader}).resume() == 1
    assert torch.equal(loader.weights["head"], saver.weights["embed"])


def test_a_step_of_another_program_is_resumed_with_its_other_state_fresh(tmp_path: Path) -> None:
    trained(tmp_path, 5)
    make_foreign(tmp_path / "global_step_5")
    (tmp_path / "global_step_5").rename(tmp_path / "global_steps_5")
    run = resumed(tmp_path)
    assert run.actor.is_at(5)
    assert run.critic.is_at(5)
    assert parts(run)["counter"] == Part("counter", "fresh", "the checkpoint has none")
    assert run.manager.save(5) == tmp_path / "global_steps_5"
    run.train(6)
    assert numbers(tmp_path) == [5, 6]


def test_a_part_says_itself_why_it_is_fresh(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    run = resumed(tmp_path, parts={"counter": Counter(complaint="another data set: it starts at 0"), "new": Counter()})
    assert parts(run)["counter"] == Part("counter", "fresh", "another data set: it starts at 0")
    assert parts(run)["new"] == Part("new", "fresh", "the checkpoint has none")
    assert "  counter    fresh (another data set: it starts at 0)" in run.manager.report.lines()


def test_a_part_that_cannot_take_its_state_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 1)

    class Strict(Counter):
        def load_state_dict(self, state: dict[str, int]) -> str | None:
            raise KeyError("epoch")

    with pytest.raises(MismatchError, match=r"counter: its saved state cannot be taken over \('epoch'\)"):
        resumed(tmp_path, parts={"counter": Strict()})


def test_changed_config_keys_are_listed(tmp_path: Path) -> None:
    trained(tmp_path, 1, fingerprint={"lr": "0.1", "seed": "1", "gone": "x"})
    run = resumed(tmp_path, fingerprint={"lr": "0.2", "seed": "1", "new": "y"})
    assert "  note       the config has changed: lr (0.1 -> 0.2), gone (x -> unset), new (unset -> y)" in (
        run.manager.report.lines()
    )
    assert not resumed(tmp_path, fingerprint={"lr": "0.1", "seed": "1", "gone": "x"}).manager.report.notes[1:]


def test_contents_that_go_together_are_said_to(tmp_path: Path) -> None:
    run = resumed(tmp_path, load_contents=("model",))
    assert run.manager.report.notes == (
        "load_contents leaves out optimizer, extra: model, optimizer, extra go together, so all are taken",
    )
    with pytest.raises(ConfigError, match="save_contents: 'weights' is none of model, optimizer, extra, hf_model"):
        Run(tmp_path, save_contents=("weights",))


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_step_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        Run(tmp_path, keep_last=keep)


def test_the_diary_of_a_killed_run(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    EventLog(tmp_path / EVENTS).write("step", step=3)
    again = resumed(tmp_path)
    events = read_events(tmp_path / EVENTS)
    assert [event["event"] for event in events] == [
        "resume", "save_requested", "save_durable", "save_requested", "save_durable", "step", "kill_seen", "resume",
    ]  # fmt: skip
    assert (events[-2]["last_step"], events[-2]["committed_step"], events[-2]["lost_steps"]) == (3, 2, 1)
    assert (events[-1]["from_step"], events[-1]["next_step"], events[-1]["saved_world_size"]) == (2, 3, 1)
    assert any("killed after step 3: 1 step after its last save lost" in line for line in again.manager.report.lines())
    assert events[2]["bytes"] == read_manifest(tmp_path / "global_step_1").nbytes


def test_a_tracker_that_cannot_be_moved_does_not_undo_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path, 1)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER / "occupied").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        run.train(2)
    assert TRACKER in caplog.text
    assert resumed(tmp_path).is_at(2)


def test_an_end_on_an_error_is_no_kill_to_the_next_start(tmp_path: Path) -> None:
    """A step that was on its way at the end never came to the disk: the diary says so, and close() raises it."""
    run = trained(tmp_path, 1)
    in_the_way = tmp_path / "global_step_2" / "something"
    in_the_way.mkdir(parents=True)
    run.reach(2)
    run.manager.save(2, blocking=False)
    with pytest.raises(WriteError, match=r"step 2 was not saved: .*/global_step_2 is there already"):
        run.manager.close()
    *_, failed, stop = read_events(tmp_path / EVENTS)
    assert (failed["event"], failed["step"]) == ("save_failed", 2)
    assert (stop["event"], stop["reason"]) == ("stop", "error")
    assert "step 2 was not saved" in stop["error"]
    run.manager.close()
    assert read_events(tmp_path / EVENTS)[-1] == stop
    in_the_way.rmdir()
    assert not any("was killed" in note for note in resumed(tmp_path).manager.report.notes)
