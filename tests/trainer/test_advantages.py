from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.trainer.advantages import gae, masked_mean, masked_sum, masked_whiten


def prefix_mask(lengths: list[int], width: int) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)).int()


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask of a few responses of different lengths, with nonsense in the padding."""
    width = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, width), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards, values = (torch.randn(len(lengths), width, generator=generator).double() for _ in range(2))
    mask = prefix_mask(lengths, width)
    return rewards.masked_fill(mask == 0, math.nan), values.masked_fill(mask == 0, 1e9), mask


class TestGae:
    def test_by_hand(self) -> None:
        # gamma 0.5, lambda 0.5, so gamma * lambda = 0.25
        # row 0, three tokens:  delta_2 = 1 - 2            = -1      A_2 = -1
        #                       delta_1 = 0 + 0.5*2 - 4    = -3      A_1 = -3 + 0.25*-1    = -3.25
        #                       delta_0 = 0 + 0.5*4 - 1    =  1      A_0 =  1 + 0.25*-3.25 = 0.1875
        # row 1 ends after one token: A_0 = 3 - 1 = 2, and the value 7 behind it must not leak in
        advantages, returns = gae(
            torch.tensor([[0.0, 0.0, 1.0], [3.0, 5.0, 5.0]]),
            torch.tensor([[1.0, 4.0, 2.0], [1.0, 7.0, 7.0]]),
            prefix_mask([3, 1], 3),
            gamma=0.5,
            lam=0.5,
        )
        assert advantages.tolist() == [[0.1875, -3.25, -1.0], [2.0, 0.0, 0.0]]
        assert returns.tolist() == [[1.1875, 0.75, 1.0], [3.0, 0.0, 0.0]]

    @given(ragged(), st.floats(0, 1), st.floats(0, 1))
    @settings(deadline=None)
    def test_against_the_sum_of_discounted_differences(
        self, batch: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float
    ) -> None:
        rewards, values, mask = batch
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        for row, length in enumerate(mask.sum(1).tolist()):
            r, v = rewards[row, :length].tolist(), [*values[row, :length].tolist(), 0.0]
            for t in range(length):  # equation 16: a sum forward in time, not the recursion of the code
                expected = sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, length))
                assert advantages[row, t].item() == pytest.approx(expected, abs=1e-9)
                assert returns[row, t].item() == pytest.approx(expected + v[t], abs=1e-9)
            assert not advantages[row, length:].any() and not returns[row, length:].any()

    def test_lambda_one_is_the_return_minus_the_value(self) -> None:
        # rewards 1, 2, 4 undiscounted: returns 7, 6, 4, whatever the critic says
        _, returns = gae(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[9.0, -9.0, 5.0]]), torch.ones(1, 3), 1.0, 1.0)
        assert returns.tolist() == [[7.0, 6.0, 4.0]]

    def test_empty_batch(self) -> None:
        advantages, returns = gae(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4), 1.0, 1.0)
        assert advantages.shape == returns.shape == (0, 4)

    def test_against_verl(self) -> None:
        algos = pytest.importorskip("verl.trainer.ppo.core_algos")
        generator = torch.Generator().manual_seed(0)
        rewards, values = (torch.randn(4, 6, generator=generator) for _ in range(2))
        mask = prefix_mask([6, 3, 1, 5], 6)
        theirs, their_returns = algos.compute_gae_advantage_return(rewards, values, mask.float(), 0.9, 0.8)
        advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
        torch.testing.assert_close(masked_whiten(advantages, mask), theirs * mask)
        torch.testing.assert_close(returns, their_returns * mask)


class TestMaskedMeans:
    def test_by_hand(self) -> None:
        values, mask = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.nan, math.inf]]), prefix_mask([2, 1], 3)
        assert masked_sum(values, mask).item() == 7.0
        assert masked_mean(values, mask).item() == pytest.approx(7 / 3)

    def test_nothing_real(self) -> None:
        assert masked_mean(torch.full((2, 2), math.nan), torch.zeros(2, 2)).item() == 0.0
        assert masked_mean(torch.zeros(0, 2), torch.zeros(0, 2)).item() == 0.0


class TestWhitening:
    def test_by_hand(self) -> None:
        # 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, variance 14 / 2 = 7
        values, mask = torch.tensor([[1.0, 2.0], [6.0, 99.0]]), prefix_mask([2, 1], 2)
        expected = [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5]
        whitened = masked_whiten(values, mask)
        assert whitened.flatten().tolist() == pytest.approx([*expected, 0.0])
        kept = masked_whiten(values, mask, shift_mean=False)
        assert kept.flatten().tolist() == pytest.approx([e + 3 for e in expected] + [0.0])

    @pytest.mark.parametrize("cuts", [[2, 3], [0, 5], [1, 1]])
    def test_spread_over_ranks_it_is_the_same(self, cuts: list[int]) -> None:
        values = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * 100 + 1000
        mask = prefix_mask([4, 1, 0, 3, 2, 4], 4)
        parts = list(zip(values.tensor_split(cuts), mask.tensor_split(cuts), strict=True))
        whole = masked_whiten(values, mask)
        torch.testing.assert_close(torch.cat(_on_ranks(parts)), whole)

    def test_sums_are_exact_where_float32_would_not_be(self) -> None:
        # 1,000,000 for 2048 tokens, one more for 2047: near 4e9 float32 goes in steps of 256, so the mean of a float32
        # sum is off by up to 0.03, and the whitened values by 0.06
        values = 1e6 + (torch.arange(4095) % 2).reshape(63, 65).float()
        whitened = masked_whiten(values, torch.ones(63, 65))
        assert whitened.unique().tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)

    def test_one_token_and_none(self) -> None:
        assert masked_whiten(torch.tensor([[5.0, 1.0]]), prefix_mask([1], 2)).tolist() == [[0.0, 0.0]]
        assert masked_whiten(torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)


def _on_ranks(parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Whiten each part on a rank of its own: a thread, meeting the others at each reduction."""
    meeting = threading.Barrier(len(parts), timeout=30)
    sent: dict[int, Tensor] = {}

    def whiten(rank: int) -> Tensor:
        def reduce(tensor: Tensor) -> Tensor:
            sent[rank] = tensor.clone()
            meeting.wait()
            total = torch.stack([sent[other] for other in range(len(parts))]).sum(0)
            meeting.wait()
            return total

        return masked_whiten(*parts[rank], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(whiten, range(len(parts))))
