from __future__ import annotations

import pytest

from milepost.trainer.schedule import lr_factor, schedule_steps
from milepost.trainer.schema import OptimConfig


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_spends_no_step_at_rate_zero(kind: str) -> None:
    factors = [lr_factor(step, kind=kind, total_steps=10, warmup_steps=3) for step in range(4)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    "kind, factors",
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.55, 0.1, 0.1]),  # half of the way from 1 to 0.1 is 0.55
        ("cosine", [1, 0.55, 0.1, 0.1]),  # cos(pi / 2) = 0: the middle is the same
    ],
)
def test_course(kind: str, factors: list[float]) -> None:
    steps = (2, 6, 10, 99)  # the warm-up ends at 2, the schedule at 10
    got = [lr_factor(s, kind=kind, total_steps=10, warmup_steps=2, min_lr_ratio=0.1) for s in steps]
    assert got == pytest.approx(factors)


def test_cosine_at_a_quarter() -> None:
    # (1 + cos(pi / 4)) / 2 = 0.853553...
    assert lr_factor(1, kind="cosine", total_steps=4) == pytest.approx(0.8535534)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="step"):
        lr_factor(0, kind="step", total_steps=1)


@pytest.mark.parametrize(
    "optim, expected",
    [
        (OptimConfig(), (60, 0)),
        (OptimConfig(lr_warmup_steps_ratio=0.1), (60, 6)),
        (OptimConfig(lr_warmup_steps_ratio=0.1, lr_warmup_steps=4), (60, 4)),
        (OptimConfig(total_training_steps=200, lr_warmup_steps_ratio=0.1), (200, 20)),
    ],
)
def test_steps_from_the_config(optim: OptimConfig, expected: tuple[int, int]) -> None:
    assert schedule_steps(optim, training_steps=60) == expected
