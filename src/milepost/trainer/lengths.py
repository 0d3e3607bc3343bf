"""Sequences that are too long are found before training: the first of them would else end a run that has got far."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from milepost.errors import CallError
from milepost.trainer.data import PromptDataset
from milepost.trainer.experience import Models
from milepost.trainer.schema import DataConfig


def check_prompts(dataset: PromptDataset, data: DataConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a data set in which a prompt is too long, where the config lets none be cut or left out.

    name:  of the files' key, such as data.train_files, for the message
    """
    if data.truncation != "error":
        return
    found = dataset.overlong(tokenizer, data.max_prompt_length, data.apply_chat_template_kwargs)
    if found:
        number, tokens = max(found, key=lambda one: one[1])
        raise CallError(
            f"{name}: {len(found)} of {len(dataset)} prompts of {dataset.name} have more than data.max_prompt_length="
            f"{data.max_prompt_length} tokens, prompt {number} has {tokens}: raise it, or set data.truncation=left or "
            "data.filter_overlong_prompts=true"
        )


def check_positions(models: Models, data: DataConfig) -> None:
    """Refuse sequences that are longer than the positions that a model has learned: it has no vector for those behind,
    and the first long response would end the run."""
    longest = data.max_prompt_length + data.max_response_length
    for key, model in (("actor_rollout_ref.model.path", models.policy), ("critic.model.path", models.value_model)):
        positions = learned_positions(model)
        if positions is not None and positions < longest:
            raise CallError(
                f"{key}: this model has learned {positions} positions, and data.max_prompt_length="
                f"{data.max_prompt_length} + data.max_response_length={data.max_response_length} is {longest}: lower "
                "them"
            )


def learned_positions(model: Any) -> int | None:
    """For how many positions a model has learned a vector; None for one that turns or biases by position, or none."""
    names = ("wpe", "embed_positions", "position_embeddings")
    found = [
        getattr(module, "num_embeddings", None)
        for name, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        if name.rpartition(".")[2] in names
    ]
    counts = [count for count in found if isinstance(count, int)]
    config = getattr(model, "config", None)
    # Some keep a few rows for padding: what the config says is what can be used.
    told = getattr(config, "max_position_embeddings", None)
    return min([*counts, *([told] if isinstance(told, int) else [])]) if counts else None
