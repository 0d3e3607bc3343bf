from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.trainer.schema import TaskConfig
from milepost.trainer.task import addition_datasets, addition_score


class TestData:
    def test_every_pair_is_trained_on_or_held_out(self) -> None:
        train, held_out = addition_datasets(TaskConfig(max_first=30, max_second=4, val_size=20))
        prompts = [example.prompt for example in (*train, *held_out)]
        assert sorted(prompts) == sorted(f"{a}+{b}=" for a in range(31) for b in range(5))
        assert (len(train), len(held_out)) == (31 * 5 - 20, 20)

    def test_truths(self) -> None:
        train, held_out = addition_datasets(TaskConfig())
        for example in (*train, *held_out):
            a, b = str(example.prompt).removesuffix("=").split("+")
            assert int(example.ground_truth or "") == int(a) + int(b)

    def test_seeded(self) -> None:
        one, again, other = (addition_datasets(TaskConfig(seed=seed))[0] for seed in (1, 1, 2))
        assert one[:] == again[:] != other[:]


class TestScore:
    # half of the places that are right, over the longer of the two numbers
    @pytest.mark.parametrize(
        "response, score",
        [
            ("122", 1.0),
            (" 122 ", 1.0),
            ("121", 0.5 * 2 / 3),
            ("022", 0.5 * 2 / 3),
            ("22", 0.5 * 2 / 3),
            ("2", 0.5 / 3),
            ("1122", 0.5 * 3 / 4),
            ("1220", 0.5 * 1 / 4),  # 1220 over 0122: only the third place from the left
            ("333", 0.0),
            ("", 0.0),
            ("122=", 0.0),
            ("-122", 0.0),
            ("12²", 0.0),
            ("twelve", 0.0),
        ],
    )
    def test_by_hand(self, response: str, score: float) -> None:
        assert addition_score("120+2=", response, "122") == pytest.approx(score)

    @given(st.text() | st.text("0123456789"), st.integers(0, 2000))
    def test_only_the_exact_answer_is_worth_more_than_half(self, response: str, truth: int) -> None:
        score = addition_score("", response, str(truth))
        assert score == 1.0 if response.strip() == str(truth) else 0.0 <= score < 0.5

    def test_needs_a_truth(self) -> None:
        with pytest.raises(ValueError, match="ground truth"):
            addition_score("", "1", None)
