"""How the sequences of a step are dealt out to ranks and cut into micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.trainer.batch import Sequences, Spread


def test_each_mini_batch_is_dealt_out_evenly() -> None:
    spread = Spread.of(batch_size=10, mini_batch_size=4, world_size=2)
    assert spread.positions == ((0, 1, 4, 5, 8), (2, 3, 6, 7, 9))
    assert spread.rows(0, 4, 8) == [2, 3]
    assert spread.rows(1, 4, 8) == [2, 3]
    assert spread.size == 10


def test_a_rank_with_fewer_sequences_gets_empty_micro_batches() -> None:
    spread = Spread.of(batch_size=5, mini_batch_size=5, world_size=2)
    assert spread.positions == ((0, 1), (2, 3, 4))
    assert spread.micro_batches(0, 0, 5, 1) == [[0], [1], []]
    assert spread.micro_batches(1, 0, 5, 1) == [[0], [1], [2]]
    assert spread.micro_batches(1, 0, 5, 2) == [[0, 1], [2]]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.integers(1, 9), st.integers(1, 40))
def test_every_sequence_comes_once_and_all_ranks_make_as_many_rounds(
    batch: int, mini: int, world: int, micro: int, other_mini: int
) -> None:
    spread = Spread.of(batch, mini, world)
    assert sorted(p for positions in spread.positions for p in positions) == list(range(batch))
    # The critic may cut the same spread in other mini-batches than the actor.
    for size in (mini, other_mini):
        for low in range(0, batch, size):
            rounds = [spread.micro_batches(rank, low, low + size, micro) for rank in range(world)]
            assert len({len(r) for r in rounds}) == 1
            seen = [spread.positions[rank][row] for rank in range(world) for rows in rounds[rank] for row in rows]
            assert sorted(seen) == list(range(low, min(low + size, batch)))
            assert all(len(rows) <= micro for r in rounds for rows in r)


def test_position_ids_count_real_tokens_from_zero() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    sequences = Sequences(torch.arange(12).reshape(2, 6), mask, mask[:, 4:])
    assert sequences.position_ids.tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]
    assert sequences.responses.tolist() == [[4, 5], [10, 11]]


def test_selecting_no_row_gives_a_dummy_that_is_read_but_not_counted() -> None:
    mask = torch.ones(0, 6, dtype=torch.int64)
    dummy = Sequences(mask, mask, mask[:, :2]).select([])
    assert dummy.input_ids.shape == (1, 6) and dummy.response_mask.tolist() == [[0, 0]]
    assert dummy.attention_mask.tolist() == [[1] * 6]
