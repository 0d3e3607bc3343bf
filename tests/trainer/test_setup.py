"""What can be found wrong at the start is found there, and before anything that takes long."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from whole_runs import train

from milepost.checkpoint import comm
from milepost.checkpoint.comm import SingleProcess
from milepost.checkpoint.preemption import Preemption, StopSignals
from milepost.checkpoint.retention import Retention
from milepost.errors import CallError
from milepost.trainer import setup
from milepost.trainer.base_model import build_tokenizer
from milepost.trainer.config import load_config
from milepost.trainer.lengths import check_positions, learned_positions
from milepost.trainer.ranks import Ranks
from milepost.trainer.schema import DataConfig
from milepost.trainer.setup import retention


def models() -> dict[str, object]:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        GPT2Config,
        GPT2ForTokenClassification,
        GPT2LMHeadModel,
        OPTConfig,
        OPTForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=24)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    opt = OPTConfig(**size, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=20)
    qwen = Qwen2Config(**size, intermediate_size=8, num_key_value_heads=1, max_position_embeddings=12)
    return {
        "gpt2": GPT2LMHeadModel(gpt2),
        "gpt2_values": GPT2ForTokenClassification(gpt2),
        "opt": OPTForCausalLM(opt),
        "qwen2": Qwen2ForCausalLM(qwen),
        "bloom": BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16)),
    }


def test_what_the_config_says_of_the_steps_that_stay() -> None:
    overrides = (
        "max_actor_ckpt_to_keep=3", "keep_every=100", "keep_best=val/r", "keep_best_count=2", "keep_best_mode=min",
        "keep_exports=0",
    )  # fmt: skip
    config = load_config(None, [f"trainer.{override}" for override in overrides])
    assert retention(config.trainer) == Retention(3, 100, "val/r", 2, "min", 0)
    assert retention(load_config(None, []).trainer).keeps_all


def test_how_many_positions_a_model_has_learned() -> None:
    found = {name: learned_positions(model) for name, model in models().items()}
    # OPT keeps two rows more than it can use; Qwen2 turns by position, and Bloom biases: neither has a last one.
    assert found == {"gpt2": 24, "gpt2_values": 24, "opt": 20, "qwen2": None, "bloom": None}


def test_sequences_longer_than_the_learned_positions_are_refused() -> None:
    made = models()
    both = SimpleNamespace(policy=made["qwen2"], value_model=made["gpt2_values"])
    check_positions(both, DataConfig(max_prompt_length=20, max_response_length=4))  # type: ignore[arg-type]
    with pytest.raises(
        CallError, match=r"critic\.model\.path: this model has learned 24 positions, and data\.max_"
    ) as e:
        check_positions(both, DataConfig(max_prompt_length=20, max_response_length=5))  # type: ignore[arg-type]
    assert "data.max_prompt_length=20 + data.max_response_length=5 is 25: lower them" in str(e.value)


@pytest.mark.parametrize("wrong", ["data", "reward", "length"])
def test_bad_data_rewards_and_lengths_are_found_before_the_base_model_is_made(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": "1+1="}) + "\n")
    (tmp_path / "reward.py").write_text("import nowhere_to_be_found\n")
    setting, said = {
        "data": (f"data.train_files=[{tmp_path}/prompts.jsonl]", "prompts.jsonl"),
        "reward": (f"reward.path={tmp_path}/reward.py:mine", "nowhere_to_be_found"),
        # Of 0+0= to 99+9= 90 have a first number of one digit, and 900 one of two; 128 of all are held out.
        "length": (
            "data.max_prompt_length=4",
            r"data\.train_files: 7\d\d of 872 prompts .* prompt \d+ has 5: raise it",
        ),
    }[wrong]
    with pytest.raises(AssertionError, match=said):
        run_ranks(train, 1, [setting, f"trainer.default_local_dir={tmp_path}/run", "trainer.logger=[]"])
    assert not (tmp_path / "run" / "base_model").exists()


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_restart_does_not_try_the_url_again(tmp_path: Path, attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def enough(*_: object) -> None:
        raise CallError("the models are next")

    monkeypatch.setattr(setup, "try_at_start", lambda url, root, events: tried.append(url))
    monkeypatch.setattr(setup, "prepare_models", enough)
    url = f"memory://{tmp_path}/there"
    config = load_config(None, [f"trainer.default_local_dir={tmp_path}/run", f"trainer.remote_dir={url}"])
    ranks = Ranks(torch.device("cpu"), SingleProcess())
    preemption = Preemption(StopSignals(()), list)
    with pytest.raises(CallError, match="the models are next"):
        setup.build_trainer(config, ranks, run_id="r", attempt=attempt, preemption=preemption)
    assert tried == [url] * (1 - attempt)


@pytest.mark.parametrize("what", ["check_lengths", "try_at_start", "_make_base_model", "convert_gguf"])
def test_what_rank_0_does_for_long_loses_no_rank(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for one another no longer than saves may take; meanwhile they meet."""

    class Met(SingleProcess):
        times = 0

        def all_gather(self, value: object) -> list[object]:  # type: ignore[override]
            self.times += 1
            return super().all_gather(value)

    met = Met()

    def long(*_: object) -> None:
        before = met.times
        for _ in range(200):
            if met.times > before:
                raise CallError("they have met")
            time.sleep(0.01)

    monkeypatch.setattr(comm, "_BEAT", 0.01)
    monkeypatch.setattr(setup, what, long)
    words = [f"trainer.default_local_dir={tmp_path}/run", f"task.base_model_dir={tmp_path}/base"]
    if what == "try_at_start":
        words.append(f"trainer.remote_dir=memory://{tmp_path}/there")
    if what == "convert_gguf":
        words += [f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.gguf_file=model.gguf"]
    preemption = Preemption(StopSignals(()), list)
    with pytest.raises(CallError, match="they have met"):
        setup.build_trainer(
            load_config(None, words), Ranks(torch.device("cpu"), met), run_id="r", attempt=0, preemption=preemption
        )


def test_prompts_too_long_for_a_gguf_model_are_found_by_the_tokenizer_that_comes_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        setup, "convert_gguf", lambda directory, file, target: build_tokenizer().save_pretrained(target)
    )
    model = [f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.gguf_file=model.gguf"]
    config = load_config(None, [f"trainer.default_local_dir={tmp_path}/run", "data.max_prompt_length=4", *model])
    ranks = Ranks(torch.device("cpu"), SingleProcess())
    with pytest.raises(CallError, match=r"data\.train_files: 7\d\d of 872 prompts .* prompt \d+ has 5: raise it"):
        setup.build_trainer(config, ranks, run_id="r", attempt=0, preemption=Preemption(StopSignals(()), list))
