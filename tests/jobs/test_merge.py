"""merge: cases E of the field's bug reports, against the model that transformers saved before it was sharded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zoo import CHAT_TEMPLATE, GENERATION

import milepost
from milepost.errors import CallError, DamagedError, IncompleteError, MismatchError, NotFoundError, WriteError
from milepost.jobs.merge import write_companions
from milepost.jobs.output import output_directory
from milepost.jobs.prepare import ModelOptions, prepare


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert torch.equal(
            value.view(torch.uint8) if value.dim() else value, other.view(torch.uint8) if value.dim() else other
        )


@pytest.mark.parametrize("case", ["tied", "untied", "moe", "critic"])
def test_merged_is_bitwise_what_transformers_saved(zoo: Path, tmp_path: Path, case: str) -> None:
    report = milepost.merge(zoo / case / "actor", tmp_path / "out")
    expected = tensors(zoo / case / "reference")
    assert_bitwise(tensors(tmp_path / "out"), expected)
    assert report.tensors == len(expected)
    assert report.nbytes == sum(t.nbytes for t in expected.values())


@pytest.mark.parametrize("case", ["tied", "untied", "moe"])
def test_transformers_loads_it_with_nothing_missing(zoo: Path, tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    milepost.merge(zoo / case / "actor", tmp_path / "out", max_shard_size="3kB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    reference = AutoModelForCausalLM.from_pretrained(zoo / case / "reference")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_e64_a_critic_is_a_token_classifier(zoo: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    milepost.merge(zoo / "critic" / "actor", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 16)


def test_e46_dtypes(zoo: Path, tmp_path: Path) -> None:
    reference = tensors(zoo / "untied" / "reference")
    for option, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("keep", torch.float32)):
        milepost.merge(zoo / "untied" / "actor", tmp_path / option, dtype=option)
        assert_bitwise(tensors(tmp_path / option), {name: t.to(dtype) for name, t in reference.items()})
        config = json.loads((tmp_path / option / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_e37_e39_e47_replicated_integers_and_float32_by_design(zoo: Path, tmp_path: Path) -> None:
    expected = torch.load(zoo / "custom" / "expected.pt")
    milepost.merge(zoo / "custom" / "actor", tmp_path / "out", dtype="bf16")
    merged = tensors(tmp_path / "out")
    assert merged["scale"].shape == () and merged["steps"].shape == (1,) and merged["norm.weight"].shape == (16,)
    assert merged["positions"].dtype == torch.int64
    assert merged["layers.0.gate.e_score_correction_bias"].dtype == torch.float32
    by_design = {"layers.0.gate.e_score_correction_bias", "steps", "positions"}
    assert_bitwise(merged, {n: t if n in by_design else t.bfloat16() for n, t in expected.items()})


def test_e50_e52_companions_travel_byte_for_byte(zoo: Path, tmp_path: Path) -> None:
    milepost.merge(zoo / "untied" / "actor", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == GENERATION
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"version": "1.0",  "odd": "spacing"}\n'


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_companion_that_the_disk_does_not_give_is_named(zoo: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(zoo / "tied" / "actor" / "huggingface", tmp_path / "hf")
    (tmp_path / "hf" / name).unlink()
    (tmp_path / "hf" / name).symlink_to("/proc/self/mem")  # of which no byte at 0 can be read
    with pytest.raises(DamagedError, match=f"hf/{name}: cannot be read: Input/output error"):
        milepost.merge(zoo / "tied" / "actor", tmp_path / "out", hf_model_path=tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_place_that_takes_no_companion_is_no_fault_of_the_companion(zoo: Path, tmp_path: Path) -> None:
    model = prepare(zoo / "tied" / "actor", "auto")
    with pytest.raises(OSError) as caught:  # which who made the directory puts in words
        write_companions(model, model.index, Path("/sys/kernel"))
    assert str(caught.value.filename).startswith("/sys/kernel/")


def test_e54_wrapper_prefixes_are_stripped(zoo: Path, tmp_path: Path) -> None:
    milepost.merge(zoo / "prefixed" / "actor", tmp_path / "out")
    assert_bitwise(tensors(tmp_path / "out"), tensors(zoo / "untied" / "reference"))


def test_e59_a_missing_layer_is_named_and_nothing_written(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match=r"model\.layers\.1\.\* \(12 tensors\)"):
        milepost.merge(zoo / "headless" / "actor", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    options = ModelOptions(allow_missing=("model.layers.1.*",))
    milepost.merge(zoo / "headless" / "actor", tmp_path / "out", model=options)
    assert not any(".layers.1." in name for name in tensors(tmp_path / "out"))


def test_another_models_config_is_refused(zoo: Path, tmp_path: Path) -> None:
    other = ModelOptions(hf_model_path=zoo / "tied" / "reference")
    with pytest.raises(MismatchError, match=r"lm_head\.weight|q_proj\.bias"):
        milepost.merge(zoo / "untied" / "actor", tmp_path / "out", model=other)


def test_a_tied_config_with_two_different_tensors_stops(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"lm_head\.weight"):
        milepost.merge(zoo / "untied" / "actor", tmp_path / "out", model=ModelOptions(tie_word_embedding=True))


def test_no_config_says_what_to_give(zoo: Path, tmp_path: Path) -> None:
    role = tmp_path / "actor"
    role.mkdir()
    for shard in (zoo / "untied" / "actor").glob("*.pt"):
        (role / shard.name).hardlink_to(shard)
    with pytest.raises(NotFoundError, match="--hf_model_path"):
        milepost.merge(role, tmp_path / "out")
    milepost.merge(role, tmp_path / "out", model=ModelOptions(hf_model_path=zoo / "untied" / "reference"))
    assert_bitwise(tensors(tmp_path / "out"), tensors(zoo / "untied" / "reference"))


def test_old_sibling_folder_of_companions_is_found(zoo: Path, tmp_path: Path) -> None:
    step = tmp_path / "global_steps_4"
    (step / "actor").mkdir(parents=True)
    for shard in (zoo / "tied" / "actor").glob("*.pt"):
        (step / "actor" / shard.name).hardlink_to(shard)
    shutil.copytree(zoo / "tied" / "actor" / "huggingface", step / "actor_huggingface")
    milepost.merge(step / "actor", tmp_path / "out")
    assert_bitwise(tensors(tmp_path / "out"), tensors(zoo / "tied" / "reference"))


def test_a_full_target_is_refused_and_replaced_as_a_whole_when_asked(zoo: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    milepost.merge(zoo / "untied" / "actor", target, max_shard_size="3kB")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(WriteError, match="--overwrite"):
        milepost.merge(zoo / "tied" / "actor", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    milepost.merge(zoo / "tied" / "actor", target, overwrite=True)
    assert sorted(path.name for path in target.glob("model*")) == ["model.safetensors"]
    assert_bitwise(tensors(target), tensors(zoo / "tied" / "reference"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_spares_what_is_no_export(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WriteError, match="does not look like a model export"):
        milepost.merge(zoo / "tied" / "actor", tmp_path, overwrite=True)
    role = tmp_path / "actor"
    role.mkdir()
    for shard in (zoo / "tied" / "actor").glob("*.pt"):
        (role / shard.name).hardlink_to(shard)
    (role / "config.json").write_bytes((zoo / "tied" / "actor" / "huggingface" / "config.json").read_bytes())
    with pytest.raises(CallError, match="holds the checkpoint that is being merged"):
        milepost.merge(role, role, overwrite=True)
    assert (tmp_path / "thesis.tex").exists() and len(list(role.glob("*.pt"))) == 2


def test_e56_two_writers_of_one_target(zoo: Path, tmp_path: Path) -> None:
    holds, done = threading.Event(), threading.Event()

    def first() -> None:
        with output_directory(tmp_path / "out", overwrite=False) as building:
            (building / "config.json").write_text("first")
            holds.set()
            done.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert holds.wait(20)
    with pytest.raises(WriteError, match="another process is writing it"):
        milepost.merge(zoo / "tied" / "actor", tmp_path / "out")
    done.set()
    thread.join()
    assert (tmp_path / "out" / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_while_writing_leaves_nothing(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    pwrite = os.pwrite

    def full(*arguments: Any) -> int:
        if arguments[-1]:  # not the head of a file
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match="the disk is full"):
        milepost.merge(zoo / "tied" / "actor", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_e58_memory_does_not_grow_with_the_model(zoo: Path, tmp_path: Path) -> None:
    """256 MiB through at most 32 MiB of windows; what else the process needs is start-up."""
    program = (
        "import resource, sys, milepost\n"
        "from milepost.layouts.torchfile import TorchFile\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "milepost.merge(sys.argv[1], sys.argv[2], dtype='bf16', memory_limit='32MiB')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start, 'torch' in sys.modules)"
    )
    call = [sys.executable, "-c", program, str(zoo / "custom" / "big"), str(tmp_path / "out")]
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=120)
    growth, torch_loaded = done.stdout.split()
    assert int(growth) * 1024 < 64 * 2**20
    assert torch_loaded == "False"
    merged = load_file(tmp_path / "out" / "model.safetensors")["big.weight"]
    assert torch.equal(merged[:, 5], torch.arange(len(merged), dtype=torch.float32).bfloat16())
