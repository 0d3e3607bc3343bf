from __future__ import annotations

import math

import pytest
import torch

from milepost.trainer.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    kl_estimate,
    make_kl_controller,
    sequence_mean,
)
from milepost.trainer.schema import KLControlConfig

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


class TestEstimators:
    # d = log 2:   k1 = log 2;   k2 = (log 2)^2 / 2;   k3 = exp(-log 2) - 1 + log 2 = log 2 - 1/2
    # d = -log 2:  k1 = -log 2;                        k3 = exp(+log 2) - 1 - log 2 = 1 - log 2
    @pytest.mark.parametrize(
        "kind, at_plus, at_minus",
        [
            ("kl", math.log(2), -math.log(2)),
            ("abs", math.log(2), math.log(2)),
            ("mse", math.log(2) ** 2 / 2, math.log(2) ** 2 / 2),
            ("low_var_kl", math.log(2) - 0.5, 1 - math.log(2)),
        ],
    )
    def test_by_hand(self, kind: str, at_plus: float, at_minus: float) -> None:
        logprobs = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
        reference = torch.log(torch.tensor([0.25, 0.5], dtype=torch.float64))
        assert kl_estimate(logprobs, reference, kind).tolist() == pytest.approx([at_plus, at_minus])

    @pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
    def test_unbiased(self, kind: str) -> None:
        p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.7, 0.2, 0.1], [0.2, 0.5, 0.3]))
        exact = sum(a * math.log(a / b) for a, b in ((0.7, 0.2), (0.2, 0.5), (0.1, 0.3)))
        assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)

    def test_k3_stays_finite(self) -> None:
        far = kl_estimate(torch.tensor([-1000.0, 1000.0]), torch.tensor([0.0, 0.0]), "low_var_kl")
        assert far.tolist() == [10.0, 10.0]

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match="full"):
            kl_estimate(torch.zeros(1), torch.zeros(1), "full")

    @pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
    def test_against_verl(self, kind: str) -> None:
        algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        a, b = (-3 * torch.rand(3, 5, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
        torch.testing.assert_close(kl_estimate(a, b, kind), algos.kl_penalty_forward(a, b, kind))


class TestPenalty:
    def test_score_stands_at_the_last_real_token(self) -> None:
        # KL per token 1, 2, 3 in row 0 and 4 in row 1; coefficient 0.1
        old = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
        rewards, kl = apply_kl_penalty(torch.tensor([1.0, 0.5, 7.0]), old, torch.zeros(3, 3), MASK, 0.1)
        expected = torch.tensor([[-0.1, -0.2, 1 - 0.3], [0.5 - 0.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
        torch.testing.assert_close(rewards, expected)
        assert kl.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    def test_without_a_coefficient_only_the_score_is_left(self) -> None:
        rewards, _ = apply_kl_penalty(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 3), torch.zeros(3, 3), MASK, 0.0)
        assert rewards.tolist() == [[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    def test_what_stands_in_the_padding_does_not_matter(self) -> None:
        noise = torch.where(MASK.bool(), 1.0, math.nan)
        rewards, kl = apply_kl_penalty(torch.zeros(3), noise, noise, MASK, 0.1)
        assert not rewards.any() and not kl.any()

    def test_sequence_mean(self) -> None:
        assert sequence_mean(torch.tensor([[1.0, 2.0, 6.0]] * 3), MASK).tolist() == [3.0, 1.0, 0.0]


class TestControllers:
    def test_fixed(self) -> None:
        controller = FixedKLController(0.05)
        controller.update(current_kl=9.0, sequences=1000)
        assert controller.value == 0.05

    @pytest.mark.parametrize(
        "kl, factor",
        [
            (0.11, 1 + 0.1 * 50 / 1000),  # 10 % above the target
            (0.09, 1 - 0.1 * 50 / 1000),
            (9.0, 1 + 0.2 * 50 / 1000),  # clipped at 20 %
            (0.0, 1 - 0.2 * 50 / 1000),
        ],
    )
    def test_adaptive(self, kl: float, factor: float) -> None:
        controller = AdaptiveKLController(kl_coef=0.2, target_kl=0.1, horizon=1000)
        controller.update(current_kl=kl, sequences=50)
        assert controller.value == pytest.approx(0.2 * factor)

    def test_a_restored_controller_goes_on_alike(self) -> None:
        one, two = (AdaptiveKLController(c, target_kl=0.1, horizon=1000) for c in (0.2, 0.7))
        one.update(0.3, 64)
        assert two.load_state_dict(one.state_dict()) is None
        one.update(0.05, 64)
        two.update(0.05, 64)
        assert one.value == two.value

    def test_other_states_are_told(self) -> None:
        fixed, adaptive = FixedKLController(0.1), AdaptiveKLController(0.2, 0.1, 1000)
        assert fixed.load_state_dict(FixedKLController(0.1).state_dict()) is None
        changed = fixed.load_state_dict(FixedKLController(0.3).state_dict())
        assert changed is not None and "0.1" in changed and "0.3" in changed
        assert fixed.value == 0.1
        taken = adaptive.load_state_dict(FixedKLController(0.3).state_dict())
        assert taken is not None and adaptive.value == 0.3

    def test_made_from_the_config(self) -> None:
        assert isinstance(make_kl_controller(KLControlConfig()), FixedKLController)
        adaptive = make_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=5, target_kl=0.3))
        assert isinstance(adaptive, AdaptiveKLController)
        assert (adaptive.value, adaptive.horizon, adaptive.target_kl) == (0.2, 5, 0.3)

    def test_against_verl(self) -> None:
        algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        ours, theirs = AdaptiveKLController(0.2, 0.1, 1000), algos.AdaptiveKLController(0.2, 0.1, 1000)
        for kl in (0.05, 0.1, 0.12, 3.0):
            ours.update(kl, 64)
            theirs.update(kl, 64)
            assert ours.value == pytest.approx(theirs.value)
