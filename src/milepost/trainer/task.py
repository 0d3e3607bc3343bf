"""The embedded task: two numbers to add, such as `17+5=` -> `22`. No download, and a reward that can be checked."""

from __future__ import annotations

import random

from milepost.trainer.data import Example, PromptDataset
from milepost.trainer.schema import TaskConfig


def addition_datasets(task: TaskConfig) -> tuple[PromptDataset, PromptDataset]:
    """Training and held-out additions a+b=, no pair (a, b) in both.

    All pairs of 0 ... max_first and 0 ... max_second are ordered by a seeded generator whose sequence Python guarantees
    (`random.Random.random`); the first `val_size` are held out.
    """
    draw = random.Random(task.seed).random
    pairs = ((a, b) for a in range(task.max_first + 1) for b in range(task.max_second + 1))
    shuffled = [pair for _, pair in sorted((draw(), pair) for pair in pairs)]
    examples = [Example(prompt=f"{a}+{b}=", ground_truth=str(a + b)) for a, b in shuffled]
    return (
        PromptDataset("additions", examples[task.val_size :]),
        PromptDataset("additions-held-out", examples[: task.val_size]),
    )


def addition_score(prompt: str, response: str, ground_truth: str | None, **extra: object) -> float:
    """Judge an answer digit by digit.

    1.0 for the exact number; for another number of digits only, half of the fraction of places (counted from the
    right, in the longer of the two) that hold the right digit; 0.0 for anything that is no number.

        addition_score("17+5=", "22", "22") == 1.0
        addition_score("17+5=", "12", "22") == 0.25
        addition_score("17+5=", "2", "22") == 0.25
        addition_score("17+5=", "2x", "22") == 0.0
    """
    if ground_truth is None:
        raise ValueError("an addition needs its ground truth; for another task set reward.path")
    answer = response.strip()
    if answer == ground_truth:
        return 1.0
    if not (answer.isascii() and answer.isdigit()):
        return 0.0
    right = sum(a == b for a, b in zip(reversed(answer), reversed(ground_truth), strict=False))
    return 0.5 * right / max(len(answer), len(ground_truth))
