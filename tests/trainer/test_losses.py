from __future__ import annotations

import math

import pytest
import torch

from milepost.trainer.losses import entropy_from_logits, logprobs_from_logits, policy_loss, value_loss

MASK = torch.tensor([[1, 1], [1, 0]])


class TestLogprobs:
    def test_by_hand(self) -> None:
        # logits log 1, log 3: probabilities 1/4, 3/4; at temperature 1/2 the odds are squared: 1/10, 9/10
        logits = torch.log(torch.tensor([[[1.0, 3.0], [1.0, 3.0]]]))
        labels = torch.tensor([[0, 1]])
        assert logprobs_from_logits(logits, labels).exp().tolist() == [pytest.approx([0.25, 0.75])]
        assert logprobs_from_logits(logits, labels, temperature=0.5).exp().tolist() == [pytest.approx([0.1, 0.9])]

    def test_half_precision_logits_are_summed_in_float32(self) -> None:
        logits = torch.zeros(1, 1, 50_000, dtype=torch.bfloat16)
        logprobs = logprobs_from_logits(logits, torch.zeros(1, 1, dtype=torch.int64))
        assert logprobs.dtype == torch.float32
        assert logprobs.item() == pytest.approx(-math.log(50_000), rel=1e-6)

    def test_empty(self) -> None:
        assert logprobs_from_logits(torch.zeros(0, 3, 7), torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


class TestEntropy:
    def test_by_hand(self) -> None:
        # uniform over 4: log 4; one certain token: 0; 1/4 and 3/4: log 4 - 3/4 log 3
        logits = torch.tensor([[0.0] * 4, [0.0] + [-math.inf] * 3, [0.0, math.log(3), -math.inf, -math.inf]])
        expected = [math.log(4), 0.0, math.log(4) - 0.75 * math.log(3)]
        assert entropy_from_logits(logits).tolist() == pytest.approx(expected)

    def test_temperature_against_a_naive_sum(self) -> None:
        logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
        for row, entropy in zip(logits, entropy_from_logits(logits, temperature=0.7), strict=True):
            weights = [math.exp(x / 0.7) for x in row.tolist()]
            p = [w / sum(weights) for w in weights]
            assert entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-6)


class TestPolicyLoss:
    def test_by_hand(self) -> None:
        # epsilon 0.2 below, 0.3 above
        # ratio 2,   A  1: max(-2, -1.3) = -1.3 clipped      ratio 0.5, A -2: max(1, 1.6) = 1.6 clipped
        # ratio 1.1, A  3: max(-3.3, -3.3) = -3.3            the fourth token is padding
        old = torch.zeros(2, 2)
        new = torch.log(torch.tensor([[2.0, 0.5], [1.1, 7.0]]))
        terms = policy_loss(old, new, torch.tensor([[1.0, -2.0], [3.0, 99.0]]), MASK, 0.2, 0.3)
        assert terms.loss.item() == pytest.approx(-1.3 + 1.6 - 3.3)
        assert terms.clipped.item() == 2
        assert terms.tokens.item() == 3
        assert terms.kl.item() == pytest.approx(-(math.log(2) + math.log(0.5) + math.log(1.1)))

    def test_gradient_only_where_the_clip_does_not_rule(self) -> None:
        new = torch.log(torch.tensor([[2.0, 0.5], [1.1, 7.0]])).requires_grad_()
        terms = policy_loss(torch.zeros(2, 2), new, torch.tensor([[1.0, -2.0], [3.0, 9.0]]), MASK, 0.2, 0.3)
        terms.loss.backward()
        # d/dx of -A exp(x) is -A * ratio = -3.3 at the one token that is neither clipped nor padding
        assert new.grad is not None
        torch.testing.assert_close(new.grad, torch.tensor([[0.0, 0.0], [-3.3, 0.0]]))

    def test_a_vanishing_old_probability_stays_finite(self) -> None:
        new = torch.zeros(1, 1, requires_grad=True)
        terms = policy_loss(torch.tensor([[-1000.0]]), new, torch.zeros(1, 1), torch.ones(1, 1), 0.2, 0.2)
        terms.loss.backward()
        assert terms.loss.item() == 0.0 and new.grad is not None and new.grad.item() == 0.0

    def test_micro_batches_add_up_whatever_their_lengths(self) -> None:
        old, new, advantages = (torch.randn(4, 5, generator=torch.Generator().manual_seed(s)) for s in range(3))
        mask = torch.arange(5) < torch.tensor([5, 1, 3, 0]).unsqueeze(1)
        whole = policy_loss(old, new, advantages, mask, 0.2, 0.2)
        parts = [policy_loss(old[s], new[s], advantages[s], mask[s], 0.2, 0.2) for s in (slice(0, 1), slice(1, 4))]
        assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
        assert sum(p.tokens.item() for p in parts) == whole.tokens.item() == 9

    @pytest.mark.filterwarnings("ignore:.*compute_policy_loss.*deprecated:FutureWarning")
    def test_against_verl(self) -> None:
        algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        old, new, advantages = (torch.randn(4, 5, generator=torch.Generator().manual_seed(s)) for s in range(3))
        mask = (torch.arange(5) < torch.tensor([5, 1, 3, 2]).unsqueeze(1)).float()
        loss, clipfrac, kl, _ = algos.compute_policy_loss(
            old, new, advantages, mask, cliprange=0.2, cliprange_low=0.1, cliprange_high=0.3, clip_ratio_c=1e9
        )
        terms = policy_loss(old, new, advantages, mask, 0.1, 0.3)
        for ours, theirs in ((terms.loss, loss), (terms.clipped, clipfrac), (terms.kl, kl)):
            torch.testing.assert_close(ours / terms.tokens, theirs)


class TestValueLoss:
    def test_by_hand(self) -> None:
        # range 0.5, old value 1
        # value 3,   return 3: plain 0, near 1.5 -> 2.25, clipped    value 1.2, return 2: both 0.64
        # value 0,   return 2: plain 4, near 0.5 -> 2.25, the larger is the plain one
        values = torch.tensor([[3.0, 1.2], [0.0, 9.0]])
        terms = value_loss(values, torch.ones(2, 2), torch.tensor([[3.0, 2.0], [2.0, 0.0]]), MASK, 0.5)
        assert terms.loss.item() == pytest.approx((2.25 + 0.64 + 4) / 2)
        assert terms.clipped.item() == 1
        assert terms.tokens.item() == 3

    def test_against_verl(self) -> None:
        algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        old, new, returns = (torch.randn(4, 5, generator=torch.Generator().manual_seed(s)) for s in range(3))
        mask = (torch.arange(5) < torch.tensor([5, 1, 3, 2]).unsqueeze(1)).float()
        loss, clipfrac = algos.compute_value_loss(new, returns, old, mask, 0.3)
        terms = value_loss(new, old, returns, mask, 0.3)
        torch.testing.assert_close(terms.loss / terms.tokens, loss)
        torch.testing.assert_close(terms.clipped / terms.tokens, clipfrac)
