"""The embedded base model: a tiny Qwen2 with a byte tokenizer, taught additions badly, as a Hugging Face directory.

A few seconds of supervised learning, from examples of which many are one too low: so the model adds well enough, and
slips often. Sampling finds both answers, the reward tells them apart, and PPO has something to improve. It is made once
per run and read like any other local model afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from milepost.errors import WriteError
from milepost.jobs.output import sync, sync_tree
from milepost.trainer.data import Example
from milepost.trainer.schema import TaskConfig, WarmStartConfig
from milepost.trainer.task import addition_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SETTINGS_FILE = "milepost_base_model.json"
_RECIPE = 1  # raise it when the code below would make another model from the same settings
_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
_LONGEST_TEXT = 256
_WARMUP_STEPS = 20


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every text has tokens, and pad, bos and eos: 259 in all.

    The chat template joins the contents of the messages, since the model knows no roles.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  (slow to import; only this function needs it)

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL_TOKENS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=pad,  # never met, but the class that AutoTokenizer takes for a Qwen2 would add one of its own
        bos_token=bos,
        eos_token=eos,
        padding_side="left",
        model_max_length=_LONGEST_TEXT,
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def build_base_model(
    directory: Path,
    task: TaskConfig,
    warm_start: WarmStartConfig,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Make the base model in `directory`, unless it is there already with the same settings.

    It is written beside and renamed, so that a directory of this name is always whole. One process makes it; the same
    settings give the same weights on the same kind of machine. The global random state of torch is left as it was.

    Args:
        directory: a Hugging Face model directory afterwards: safetensors, config, generation config, tokenizer.
        task: the additions; only the training part is learnt from.
        warm_start: size of the model and length of the learning.
        progress: called with (steps done, steps in all) after each step.

    Returns:
        Whether it was made now.

    Raises:
        WriteError: something else lies at `directory`, or it cannot be written.
    """
    settings = _settings(task, warm_start)
    if directory.exists():
        if _recorded_settings(directory) == settings:
            return False
        if _recorded_settings(directory) is None:
            raise WriteError(
                f"{directory} is not a base model made by milepost and stays as it is; "
                "move it away or set task.base_model_dir to another folder"
            )
    with _one_thread():
        model, tokenizer = _warm_started(task, warm_start, progress)
    scratch = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}"
    old, new = scratch.with_suffix(".old.tmp"), scratch.with_suffix(".tmp")
    try:
        new.mkdir(parents=True)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        sync_tree(new)
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
        sync(directory.parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise WriteError(
            f"base model {directory} cannot be written: {why}; free some space or choose another place"
        ) from error
    finally:
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)
    return True


def _settings(task: TaskConfig, warm_start: WarmStartConfig) -> dict[str, Any]:
    """Everything that the weights follow from; where the directory lies does not count."""
    additions = {name: value for name, value in dataclasses.asdict(task).items() if name != "base_model_dir"}
    return {"recipe": _RECIPE, "task": additions, "warm_start": dataclasses.asdict(warm_start)}


def _recorded_settings(directory: Path) -> Any:
    """What a finished base model was made with, None where `directory` is none."""
    try:
        return json.loads((directory / SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """No slower for matrices this small, much faster beside other work, and the same sums on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warm_started(
    task: TaskConfig, warm_start: WarmStartConfig, progress: Callable[[int, int], None] | None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model from random weights, after `warm_start.steps` of AdamW on the answers of the training additions."""
    tokenizer = build_tokenizer()
    train, _ = addition_datasets(task)
    lessons = [(str(example.prompt), truth) for example in train for truth in _answers(example)]
    input_ids, attention_mask, labels = _supervised_tensors(lessons, tokenizer)
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = _random_model(tokenizer, warm_start)
    draw = torch.Generator().manual_seed(task.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_start.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, warm_start.steps))
    for step in range(warm_start.steps):
        slips = torch.rand(warm_start.batch_size, generator=draw) < warm_start.slip_rate
        rows = 2 * torch.randint(len(train), (warm_start.batch_size,), generator=draw) + slips
        logits = model(
            input_ids=input_ids[rows],
            attention_mask=attention_mask[rows],
            position_ids=position_ids[rows],
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress:
            progress(step + 1, warm_start.steps)
    return model, tokenizer


def _answers(example: Example) -> tuple[str, str]:
    """The sum, and the slip: one less."""
    return str(example.ground_truth), str(max(int(example.ground_truth or 0) - 1, 0))


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / max(steps, 1))))


def _random_model(tokenizer: PreTrainedTokenizerFast, size: WarmStartConfig) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, its embeddings tied as in Qwen2-0.5B. From torch's global random state."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_hidden_layers,
            num_attention_heads=size.num_attention_heads,
            num_key_value_heads=size.num_key_value_heads,
            max_position_embeddings=_LONGEST_TEXT,
            tie_word_embeddings=True,
            initializer_range=0.05,  # so narrow a model learns three times as fast as from the usual 0.02
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.train()
    return model


def _supervised_tensors(
    lessons: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt and answer of each lesson, [lessons, longest], padded at the left.

    Returns:
        Token ids, attention mask, and labels: the ids of the answer and its end-of-sequence token, -100 elsewhere.
    """
    prompts = tokenizer([prompt for prompt, _ in lessons])["input_ids"]
    answers = tokenizer([answer for _, answer in lessons])["input_ids"]
    rows = [(p, [*a, tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), width), int(tokenizer.pad_token_id))
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, width - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
        mask[row, width - len(prompt) - len(answer) :] = 1
        labels[row, width - len(answer) :] = torch.tensor(answer)
    return ids, mask, labels
