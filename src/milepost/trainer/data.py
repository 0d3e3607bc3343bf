"""Prompts: from JSONL or parquet files or from memory, and tokenised, left-padded batches of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from milepost.errors import CallError, NotFoundError
from milepost.trainer.sampler import Fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 1000  # prompts

Prompt = str | list[dict[str, Any]]
"""Plain text, or chat messages with `role` and `content`."""


@dataclass(frozen=True)
class Example:
    """One prompt, what its answer is judged by, and the other columns of its row, for the reward function."""

    prompt: Prompt
    ground_truth: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class PromptBatch:
    """Tokenised prompts, B of them, padded at the left to the longest of the batch, P tokens.

    Attributes:
        input_ids, attention_mask: int64 [B, P]; the mask is 0 on padding.
        prompts: the text that was tokenised, chat template applied.
        ground_truths, extras, numbers: of each example; `numbers` are positions in the data set.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompts: list[str]
    ground_truths: list[str | None]
    extras: list[dict[str, Any]]
    numbers: list[int]


class PromptDataset(Sequence[Example]):
    """A list of examples with a name and a fingerprint. `number` of an example is its position here."""

    def __init__(self, name: str, examples: Sequence[Example]) -> None:
        self.name = name
        self._examples = [dataclasses.replace(example, number=i) for i, example in enumerate(examples)]
        self.fingerprint = Fingerprint(name=name, length=len(examples), digest=_digest(examples))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> Any:
        return self._examples[index]

    @classmethod
    def from_files(
        cls,
        files: Sequence[str | Path],
        *,
        prompt_key: str = "prompt",
        ground_truth_key: str = "ground_truth",
        max_samples: int = -1,
    ) -> PromptDataset:
        """Read `.jsonl` (or `.json`, one object a line) and `.parquet` files, one after the other.

        Args:
            files: paths; `~` is the home directory.
            prompt_key: column with text or a list of chat messages.
            ground_truth_key: column that the reward compares to, absent or null where there is none. `a.b` means the
                entry `b` of the column `a`. What is not text becomes its JSON.
            max_samples: take only the first so many; -1: all.

        Raises:
            NotFoundError: a file does not exist.
            CallError: a file or row is not what it must be; names file and line.
        """
        examples: list[Example] = []
        for path in (Path(file).expanduser() for file in files):
            for place, row in _rows(path, prompt_key):
                if len(examples) == max_samples:
                    break
                examples.append(_example(place, row, prompt_key, ground_truth_key))
        return cls(",".join(Path(file).name for file in files), examples)

    def without_overlong(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        chat_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptDataset:
        """The data set without prompts of more than `max_prompt_length` tokens; its fingerprint is another one."""
        out = {position for position, _ in self.overlong(tokenizer, max_prompt_length, chat_kwargs)}
        kept = [example for position, example in enumerate(self._examples) if position not in out]
        return self if not out else PromptDataset(self.name, kept)

    def overlong(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        chat_kwargs: Mapping[str, Any] | None = None,
    ) -> list[tuple[int, int]]:
        """Position and number of tokens of each prompt that has more than `max_prompt_length`."""
        lengths = (
            len(ids)
            for first in range(0, len(self), _AT_ONCE)
            for _, ids in _rendered(self._examples[first : first + _AT_ONCE], tokenizer, chat_kwargs)
        )
        return [(position, length) for position, length in enumerate(lengths) if length > max_prompt_length]


def collate(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    truncation: str = "error",
    chat_kwargs: Mapping[str, Any] | None = None,
) -> PromptBatch:
    """Tokenise prompts and pad them at the left, where `generate` needs its padding.

    Chat messages go through the tokenizer's chat template with `add_generation_prompt`; plain text gets the special
    tokens that the tokenizer adds by itself.

    Args:
        examples: any number, none included: then the tensors are [0, 1].
        max_prompt_length: most tokens of a prompt.
        truncation: what happens to a longer one. `left` drops its first tokens, `right` its last, `error` refuses it.
            The names and the default are verl's.
        chat_kwargs: extra variables for the chat template.

    Raises:
        CallError: a prompt is too long, has no tokens, or is a chat and the tokenizer has no template.
    """
    rendered = _rendered(examples, tokenizer, chat_kwargs)
    rows = [
        _shortened(ids, example, max_prompt_length, truncation)
        for example, (_, ids) in zip(examples, rendered, strict=True)
    ]
    width = max((len(row) for row in rows), default=1)
    if tokenizer.pad_token_id is None:
        raise CallError(
            f"the tokenizer {tokenizer.name_or_path} has no pad token; set one in its tokenizer_config.json"
        )
    pads = [width - len(row) for row in rows]
    ids = [[tokenizer.pad_token_id] * pad + row for pad, row in zip(pads, rows, strict=True)]
    mask = [[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)]
    return PromptBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64).reshape(len(rows), width),
        attention_mask=torch.tensor(mask, dtype=torch.int64).reshape(len(rows), width),
        prompts=[text for text, _ in rendered],
        ground_truths=[example.ground_truth for example in examples],
        extras=[example.extra for example in examples],
        numbers=[example.number for example in examples],
    )


def _rendered(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, chat_kwargs: Mapping[str, Any] | None
) -> list[tuple[str, list[int]]]:
    """The text of each prompt as the model sees it, and its tokens; many at once take a fraction of the time."""
    texts = [_text(example, tokenizer, chat_kwargs) for example in examples]
    ids: list[list[int]] = [[] for _ in examples]
    for is_chat in (False, True):
        which = [i for i, example in enumerate(examples) if isinstance(example.prompt, str) != is_chat]
        if which:
            # A chat template has put the special tokens already.
            tokens = tokenizer([texts[i] for i in which], add_special_tokens=not is_chat)["input_ids"]
            for i, own in zip(which, tokens, strict=True):
                ids[i] = list(own)
    return list(zip(texts, ids, strict=True))


def _text(example: Example, tokenizer: PreTrainedTokenizerBase, chat_kwargs: Mapping[str, Any] | None) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    if not tokenizer.chat_template:
        raise CallError(
            f"prompt {example.number} is a chat, and the tokenizer {tokenizer.name_or_path} has no chat template"
        )
    return str(
        tokenizer.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True, **(chat_kwargs or {}))
    )


def _shortened(ids: list[int], example: Example, longest: int, truncation: str) -> list[int]:
    if not ids:
        raise CallError(f"prompt {example.number} has no tokens: {example.prompt!r}")
    if len(ids) <= longest:
        return ids
    if truncation == "error":
        raise CallError(
            f"prompt {example.number} has {len(ids)} tokens, data.max_prompt_length is {longest}: raise it, or set "
            "data.truncation=left or data.filter_overlong_prompts=true"
        )
    return ids[-longest:] if truncation == "left" else ids[:longest]


def _rows(path: Path, prompt_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file with the words that name its place."""
    if not path.is_file():
        raise NotFoundError(f"data file {path} does not exist")
    match path.suffix.lower():
        case ".jsonl" | ".json":
            yield from _jsonl_rows(path)
        case ".parquet":
            yield from _parquet_rows(path, prompt_key)
        case other:
            raise CallError(f"data file {path}: expected .jsonl or .parquet, not {other or 'a name without a suffix'}")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise CallError(f"{place}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise CallError(f"{place}: expected an object with columns, got {type(row).__name__}")
            yield place, row


def _parquet_rows(path: Path, prompt_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow  # noqa: PLC0415  (slow to import, and most runs read no parquet)
    import pyarrow.parquet  # noqa: PLC0415

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if prompt_key not in file.schema_arrow.names:
                raise CallError(f"{path}: no column {prompt_key!r}; there are {', '.join(file.schema_arrow.names)}")
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise CallError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from error


def _example(place: str, row: dict[str, Any], prompt_key: str, ground_truth_key: str) -> Example:
    if prompt_key not in row:
        raise CallError(f"{place}: no column {prompt_key!r}; there are {', '.join(row) or 'none'}")
    truth_column, *inner = ground_truth_key.split(".")
    truth: Any = row.get(truth_column)
    for part in inner:
        truth = truth.get(part) if isinstance(truth, dict) else None
    return Example(
        prompt=_prompt(place, prompt_key, row[prompt_key]),
        ground_truth=truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=str),
        extra={name: value for name, value in row.items() if name not in (prompt_key, truth_column)},
    )


def _prompt(place: str, prompt_key: str, value: object) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return value
    raise CallError(
        f"{place}: column {prompt_key!r} must be text or a list of messages "
        f"with role and content, not {str(value)[:80]!r}"
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and bool(message.get("content"))


def _digest(examples: Sequence[Example]) -> str:
    """xxh3-128 over the prompts and ground truths, in their order."""
    hasher = xxhash.xxh3_128()
    for example in examples:
        hasher.update(json.dumps([example.prompt, example.ground_truth], sort_keys=True).encode())
    return hasher.hexdigest()
