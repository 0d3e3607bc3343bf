"""Settings are declared once: what the command line takes, Python takes, with the same defaults and the same effect."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

import milepost
from milepost.cli.app import run
from milepost.cli.commands import function_of
from milepost.cli.declared import Option
from milepost.errors import CallError, DamagedError
from milepost.settings import SIZE, declared, made

OF_A_TERMINAL = {"directory", "local_dir", "json_", "quiet", "trust_remote_code", "use_cpu_initialization"}
PLACES = {"merge": {"output", "target_dir"}, "test": {"reference", "test_hf_dir"}}


@pytest.mark.parametrize("verb", ["merge", "test"])
def test_python_and_the_command_line_take_the_same(verb: str) -> None:
    call = {"merge": milepost.MergeCall, "test": milepost.TestCall}[verb]
    python = inspect.signature(getattr(milepost, verb)).parameters
    terminal = inspect.signature(function_of(verb)).parameters
    known = declared(call)
    assert set(known) == set(python) - {"path", "target_dir", "hf_dir", "model", "progress"}
    assert set(known) == set(terminal) - OF_A_TERMINAL - PLACES[verb]
    assert {f.name for f in fields(call)} - set(known) == {"part"}  # which `role` tells
    for name, (_, default, facts) in known.items():
        (option,) = terminal[name].annotation.__metadata__
        assert isinstance(option, Option) and option.names[0].replace("-", "_") == f"__{name}"
        assert python[name].default == (facts[SIZE] or default)
        assert terminal[name].default == (facts[SIZE] or default or default if default != () else None)


def test_values_in_any_form() -> None:
    given = {"memory_limit": "32MiB", "max_shard_size": 3000, "hf_model_path": "base", "allow_missing": "a.*"}
    call = made(milepost.MergeCall, given)
    assert (call.memory_limit, call.max_shard_size) == (32 * 2**20, 3000)
    assert call.hf_model_path == Path("base") and call.allow_missing == ("a.*",)
    assert made(milepost.MergeCall, {"allow_missing": ["a", "b"]}).allow_missing == ("a", "b")
    assert made(milepost.MergeCall, {}) == milepost.MergeCall()
    with pytest.raises(TypeError, match=r"'dtpye' is no setting; known are dtype, "):
        made(milepost.MergeCall, {"dtpye": "bf16"})
    with pytest.raises(CallError, match="no size"):
        made(milepost.MergeCall, {"memory_limit": "much"})


def test_python_checks_bytes_first(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo / "untied", tmp_path / "run")
    role = tmp_path / "run" / "actor"
    milepost.merge(role, tmp_path / "good", check=True, checksum=True)
    assert (tmp_path / "good" / "milepost_checksums.json").is_file()
    shard = role / "model_world_size_2_rank_1.pt"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    milepost.merge(role, tmp_path / "unchecked")
    with pytest.raises(DamagedError, match="model_world_size_2_rank_1"):
        milepost.merge(role, tmp_path / "bad", check=True)
    assert not (tmp_path / "bad").exists()
    assert run(["merge", str(role), str(tmp_path / "bad"), "--check"]) == 1


def test_python_says_what_would_be_written(zoo: Path, tmp_path: Path) -> None:
    dry = milepost.merge(zoo / "untied" / "actor", tmp_path / "out", dtype="bf16", max_shard_size="3kB", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = milepost.merge(zoo / "untied" / "actor", tmp_path / "out", dtype="bf16", max_shard_size="3kB")
    assert (dry.tensors, dry.nbytes, dry.dtypes) == (done.tensors, done.nbytes, done.dtypes)
    assert set(dry.files) == {name for name in done.files if name.endswith(".safetensors")}


def test_python_compares_logits(zoo: Path, tmp_path: Path) -> None:
    report = milepost.test(zoo / "untied" / "actor", zoo / "untied" / "reference", logits=True)
    assert report.ok and report.logits is not None and report.logits.numel == 16 * 33
    other = milepost.test(zoo / "untied" / "actor", zoo / "tied" / "reference", logits=True)
    assert not other.ok and other.logits is None


def test_what_may_be_missing(zoo: Path, capfd: pytest.CaptureFixture[str]) -> None:
    role, reference = zoo / "headless" / "actor", zoo / "tied" / "reference"
    missing = {d.name for d in milepost.test(role, reference).differences if d.kind == "missing"}
    assert missing
    assert run(["test", str(role), str(reference), "--json", "--allow-missing", "model.layers.1.*"]) == 0
    assert json.loads(capfd.readouterr().out)["differences"] == []
    assert milepost.test(role, reference, allow_missing="model.layers.1.*").ok
    assert not milepost.test(role, reference, allow_missing="model.layers.0.*").ok


@pytest.mark.parametrize("settings", [{"private": True}, {"hf_upload_path": "a/b/c"}])
def test_an_upload_that_cannot_be_is_refused_before_the_work(
    settings: dict[str, object], zoo: Path, tmp_path: Path
) -> None:
    with pytest.raises(CallError, match="--hf_upload_path"):
        milepost.merge(zoo / "untied" / "actor", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_settings_by_name_have_the_last_word(wrapped: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    keep = milepost.ModelOptions(lora="keep", lora_alpha=1)
    milepost.merge(wrapped / "fraction" / "actor", tmp_path / "out", model=keep, lora="merge")
    assert not (tmp_path / "out" / "lora_adapter").exists()
