"""Which steps may go: a pure function of the committed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def keep_last(steps: Iterable[int], count: int, is_whole: Callable[[int], bool] = lambda step: True) -> list[int]:
    """The steps to delete so that the `count` newest whole ones stay, in numeric order.

    A damaged step saves no older one from being needed: it uses none of the budget, and is deleted only once it is
    older than all that are kept. `count` is at least 1; `is_whole` is asked from the newest step on, as far as needed.
    """
    if count < 1:
        raise ValueError(f"keep_last={count}: at least the newest step must stay")
    ordered = sorted(set(steps), reverse=True)
    kept = 0
    for position, step in enumerate(ordered):
        kept += is_whole(step)
        if kept == count:
            return sorted(ordered[position + 1 :])
    return []
