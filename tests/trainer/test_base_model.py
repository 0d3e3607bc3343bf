from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from milepost.errors import WriteError
from milepost.trainer.base_model import SETTINGS_FILE, build_base_model, build_tokenizer
from milepost.trainer.data import collate
from milepost.trainer.schema import TaskConfig, WarmStartConfig
from milepost.trainer.task import addition_datasets, addition_score

TASK = TaskConfig(max_first=9, max_second=3, val_size=4)
SMALL = WarmStartConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, steps=3)


class TestTokenizer:
    @pytest.mark.parametrize("text", ["17+5=22", " two  words\n", "Zürich 東京 🙂", "\x00\x7f"])
    def test_every_text_comes_back(self, text: str) -> None:
        tokenizer = build_tokenizer()
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.encode())

    def test_is_what_it_says(self) -> None:
        tokenizer = build_tokenizer()
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert len(tokenizer) == 3 + 256
        assert tokenizer.padding_side == "left"


class TestDirectory:
    def test_transformers_load_it(self, tmp_path: Path) -> None:
        assert build_base_model(tmp_path / "deep" / "base", TASK, SMALL)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "base")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "base")
        assert model.config.architectures == ["Qwen2ForCausalLM"]
        assert model.config.tie_word_embeddings and model.dtype == torch.float32
        assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
        assert len(tokenizer) == model.config.vocab_size
        assert tokenizer("17+5=")["input_ids"] == build_tokenizer()("17+5=")["input_ids"]
        assert tokenizer.chat_template == build_tokenizer().chat_template

    def test_made_once_for_the_same_settings(self, tmp_path: Path) -> None:
        steps: list[tuple[int, int]] = []
        assert build_base_model(tmp_path / "base", TASK, SMALL, lambda done, total: steps.append((done, total)))
        assert steps == [(1, 3), (2, 3), (3, 3)]
        assert not build_base_model(tmp_path / "base", replace(TASK, base_model_dir="elsewhere"), SMALL)
        assert build_base_model(tmp_path / "base", TASK, replace(SMALL, steps=1))
        assert build_base_model(tmp_path / "base", replace(TASK, seed=2), replace(SMALL, steps=1))
        assert [path.name for path in tmp_path.iterdir()] == ["base"]

    def test_same_seed_same_weights_and_no_trace_in_the_random_state(self, tmp_path: Path) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        for name in ("a", "b"):
            build_base_model(tmp_path / name, TASK, SMALL)
        assert torch.equal(torch.rand(3), expected)
        build_base_model(tmp_path / "c", replace(TASK, seed=2), SMALL)
        a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])

    def test_a_half_made_one_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: object, directory: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(WriteError, match="No space left on device"):
            build_base_model(tmp_path / "base", TASK, SMALL)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_a_write_error_that_names_the_folder(self, tmp_path: Path) -> None:
        program = (
            "import sys; from pathlib import Path; from milepost.errors import WriteError\n"
            "from milepost.trainer.base_model import build_base_model\n"
            "from milepost.trainer.schema import TaskConfig, WarmStartConfig\n"
            "try: build_base_model(Path(sys.argv[1]) / 'base', TaskConfig(), WarmStartConfig(steps=1))\n"
            "except WriteError as error: print(error)\n"
        )
        shell = 'mount -t tmpfs -o size=64k none "$1" && "$2" -c "$3" "$1"; ls -A "$1"'
        call = ["unshare", "-m", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, program]
        done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
        if "not permitted" in done.stderr or "must be superuser" in done.stderr:
            pytest.skip("needs the right to mount a file system")
        (line,) = done.stdout.splitlines()  # and nothing left in the folder
        assert f"base model {tmp_path}/base cannot be written" in line and "No space left" in line

    def test_an_old_one_stays_when_the_new_one_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build_base_model(tmp_path / "base", TASK, SMALL)
        before = (tmp_path / "base" / "model.safetensors").read_bytes()
        monkeypatch.setattr("milepost.trainer.base_model.sync_tree", _failing_fsync)
        with pytest.raises(WriteError):
            build_base_model(tmp_path / "base", TASK, replace(SMALL, steps=1))
        assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["base"]

    @pytest.mark.parametrize("settings", [None, "{ torn"])
    def test_what_is_not_ours_is_left_alone(self, tmp_path: Path, settings: str | None) -> None:
        (tmp_path / "theirs").write_text("precious")
        if settings is not None:
            (tmp_path / SETTINGS_FILE).write_text(settings)
        with pytest.raises(WriteError, match="not a base model made by milepost"):
            build_base_model(tmp_path, TASK, SMALL)
        assert (tmp_path / "theirs").read_text() == "precious"

    def test_settings_are_recorded(self, tmp_path: Path) -> None:
        build_base_model(tmp_path / "base", TASK, SMALL)
        recorded = json.loads((tmp_path / "base" / SETTINGS_FILE).read_text())
        assert recorded["warm_start"]["hidden_size"] == 16 and recorded["task"]["max_first"] == 9


def _failing_fsync(path: Path) -> None:
    raise OSError(5, "Input/output error")


def test_default_settings_leave_room_for_ppo(tmp_path: Path) -> None:
    """About a third of the held-out additions right, and most others one too low: what the slips taught it."""
    build_base_model(tmp_path / "base", TaskConfig(), WarmStartConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    _, held_out = addition_datasets(TaskConfig())
    batch = collate(held_out[:], tokenizer, 8)
    tokens = model.generate(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=6, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    truths = [int(truth or "") for truth in batch.ground_truths]
    right = sum(addition_score("", answer, str(truth)) == 1.0 for answer, truth in zip(answers, truths, strict=True))
    slipped = sum(answer == str(truth - 1) for answer, truth in zip(answers, truths, strict=True))
    assert 0.1 < right / len(held_out) < 0.6
    assert (right + slipped) / len(held_out) > 0.5
