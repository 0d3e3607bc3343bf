from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from milepost.errors import CallError, NotFoundError
from milepost.trainer.base_model import build_tokenizer
from milepost.trainer.data import Example, PromptDataset, collate

TOKENIZER = build_tokenizer()
CHAT = [{"role": "system", "content": "be "}, {"role": "user", "content": "brief"}]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def ids(text: str) -> list[int]:
    """Token numbers of ASCII text in the order of the vocabulary: three special tokens, then `!` as the first byte."""
    return [3 + ord(c) - ord("!") for c in text]


class TestFiles:
    def test_jsonl(self, tmp_path: Path) -> None:
        path = jsonl(
            tmp_path / "a.jsonl",
            {"prompt": "1+1=", "ground_truth": "2", "level": 3},
            "",
            {"prompt": CHAT, "ground_truth": 7},
            {"prompt": "no answer"},
        )
        dataset = PromptDataset.from_files([path])
        assert dataset[:] == [
            Example("1+1=", "2", {"level": 3}, 0),
            Example(CHAT, "7", {}, 1),
            Example("no answer", None, {}, 2),
        ]
        assert dataset.name == "a.jsonl"

    def test_parquet_with_nested_truth_as_verl_has_it(self, tmp_path: Path) -> None:
        rows = [{"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "72"}, "data_source": "gsm8k"}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        (example,) = PromptDataset.from_files([tmp_path / "a.parquet"], ground_truth_key="reward_model.ground_truth")
        assert example == Example(CHAT, "72", {"data_source": "gsm8k"}, 0)

    def test_files_follow_each_other_up_to_a_limit(self, tmp_path: Path) -> None:
        one = jsonl(tmp_path / "1.jsonl", {"q": "a"}, {"q": "b"})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": "c"}, {"q": "d"}]), tmp_path / "2.parquet")
        dataset = PromptDataset.from_files([one, tmp_path / "2.parquet"], prompt_key="q", max_samples=3)
        assert [example.prompt for example in dataset] == ["a", "b", "c"]
        assert [example.number for example in dataset] == [0, 1, 2]
        assert dataset.name == "1.jsonl,2.parquet"

    @pytest.mark.parametrize(
        "row, words",
        [
            ("{", "line 2: not JSON"),
            ("[1]", "line 2: expected an object"),
            ({"text": "x"}, "line 2: no column 'prompt'; there are text"),
            ({"prompt": 3}, "line 2: column 'prompt' must be text"),
            ({"prompt": ""}, "line 2: column 'prompt' must be text"),
            ({"prompt": [{"content": "no role"}]}, "line 2: column 'prompt' must be text"),
        ],
    )
    def test_bad_line(self, tmp_path: Path, row: object, words: str) -> None:
        path = jsonl(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
        with pytest.raises(CallError) as caught:
            PromptDataset.from_files([path])
        assert f"{path}, {words}" in str(caught.value) and "\n" not in str(caught.value)

    def test_bad_parquet(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
        with pytest.raises(CallError, match=r"a\.parquet: not a parquet file"):
            PromptDataset.from_files([tmp_path / "a.parquet"])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"x": 1}]), tmp_path / "b.parquet")
        with pytest.raises(CallError, match=r"b\.parquet: no column 'prompt'; there are x"):
            PromptDataset.from_files([tmp_path / "b.parquet"])

    def test_missing_or_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match=r"a\.jsonl does not exist"):
            PromptDataset.from_files([tmp_path / "a.jsonl"])
        (tmp_path / "a.csv").touch()
        with pytest.raises(CallError, match=r"a\.csv: expected \.jsonl or \.parquet"):
            PromptDataset.from_files([tmp_path / "a.csv"])


class TestFingerprint:
    EXAMPLES = (Example("a", "1"), Example(CHAT, None))

    def test_content_counts_and_the_name_does_not(self) -> None:
        one = PromptDataset("one", self.EXAMPLES).fingerprint
        assert one.same_data(PromptDataset("two", self.EXAMPLES).fingerprint)
        assert (one.name, one.length, len(one.digest)) == ("one", 2, 32)

    @pytest.mark.parametrize(
        "other",
        [
            (Example("a", "1"),),
            (Example(CHAT, None), Example("a", "1")),
            (Example("a", "2"), Example(CHAT, None)),
            (Example("b", "1"), Example(CHAT, None)),
        ],
    )
    def test_other_content(self, other: tuple[Example, ...]) -> None:
        one, two = PromptDataset("x", self.EXAMPLES), PromptDataset("x", other)
        assert not one.fingerprint.same_data(two.fingerprint)


class TestCollate:
    def test_left_padding(self) -> None:
        batch = collate(PromptDataset("x", [Example("1+22=", "23"), Example("7=", "7", {"k": 1})])[:], TOKENIZER, 16)
        assert batch.input_ids.tolist() == [ids("1+22="), [0, 0, 0, *ids("7=")]]
        assert batch.attention_mask.tolist() == [[1] * 5, [0, 0, 0, 1, 1]]
        assert batch.prompts == ["1+22=", "7="]
        assert (batch.ground_truths, batch.extras, batch.numbers) == (["23", "7"], [{}, {"k": 1}], [0, 1])

    def test_chat_goes_through_the_template(self) -> None:
        batch = collate([Example(CHAT)], TOKENIZER, 16)
        assert batch.prompts == ["be brief"]
        assert TOKENIZER.decode(batch.input_ids[0]) == "be brief"

    def test_chat_template_gets_the_generation_prompt_and_the_extra_variables(self) -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = (
            "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{% if loud %}!{% endif %}"
        )
        assert collate([Example(CHAT)], tokenizer, 16, chat_kwargs={"loud": True}).prompts == ["be >!"]

    def test_text_gets_the_special_tokens_and_a_chat_those_of_its_template_only(self) -> None:
        tokenizer = build_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
        batch = collate([Example("12"), Example([{"role": "user", "content": "12"}])], tokenizer, 16)
        assert batch.input_ids.tolist() == [[1, *ids("12")], [0, *ids("12")]]

    def test_chat_without_a_template(self) -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(CallError, match="prompt 0 is a chat"):
            collate([Example(CHAT)], tokenizer, 16)

    @pytest.mark.parametrize("truncation, kept", [("left", "345"), ("right", "123")])
    def test_truncation(self, truncation: str, kept: str) -> None:
        batch = collate([Example("12345"), Example("9")], TOKENIZER, 3, truncation)
        assert batch.input_ids.tolist() == [ids(kept), [0, 0, *ids("9")]]

    def test_too_long(self) -> None:
        with pytest.raises(CallError, match=r"prompt 4 has 5 tokens, data\.max_prompt_length is 3"):
            collate([Example("12345", number=4)], TOKENIZER, 3)

    def test_filtering(self) -> None:
        dataset = PromptDataset("x", [Example("12345"), Example("1"), Example("123")])
        kept = dataset.without_overlong(TOKENIZER, 3)
        assert [(example.prompt, example.number) for example in kept] == [("1", 0), ("123", 1)]
        assert not kept.fingerprint.same_data(dataset.fingerprint)
        assert dataset.without_overlong(TOKENIZER, 5) is dataset

    def test_nothing(self) -> None:
        batch = collate([], TOKENIZER, 16)
        assert batch.input_ids.shape == batch.attention_mask.shape == (0, 1)
        assert batch.input_ids.dtype == torch.int64

    def test_tokenizer_without_padding(self) -> None:
        tokenizer: Any = build_tokenizer()
        tokenizer.pad_token = None
        with pytest.raises(CallError, match="no pad token"):
            collate([Example("1")], tokenizer, 16)
