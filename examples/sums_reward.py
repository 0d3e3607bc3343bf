"""A reward function for sums asked in words, as `reward.path=examples/sums_reward.py:score` uses it."""

from __future__ import annotations

import re


def score(prompt: str, response: str, ground_truth: str | None, **extra: object) -> float:
    """1.0 where the last number of the response is the right one, 0.1 where there is any number, else 0.0."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == ground_truth else 0.1
