from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import CallError
from milepost.trainer.sampler import Fingerprint, GlobalSampler, epoch_order, rank_slice


def fingerprint(length: int, name: str = "prompts", digest: str = "d") -> Fingerprint:
    return Fingerprint(name=name, length=length, digest=digest)


class TestOrder:
    def test_is_the_same_everywhere(self) -> None:
        # the words of PCG64 are guaranteed by numpy, so these orders are for ever
        assert epoch_order(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
        assert epoch_order(8, seed=0, epoch=2).tolist() == [0, 4, 6, 3, 5, 7, 1, 2]
        assert epoch_order(8, seed=1, epoch=1).tolist() == [5, 6, 3, 0, 7, 2, 1, 4]

    @given(st.integers(0, 300), st.integers(0, 2**32), st.integers(1, 1000))
    def test_is_a_permutation(self, length: int, seed: int, epoch: int) -> None:
        assert sorted(epoch_order(length, seed, epoch).tolist()) == list(range(length))

    def test_without_shuffling(self) -> None:
        assert epoch_order(4, seed=3, epoch=7, shuffle=False).tolist() == [0, 1, 2, 3]


class TestStream:
    def test_1000_prompts_in_batches_of_128(self) -> None:
        sampler = GlobalSampler(fingerprint(1000), seed=3)
        drawn = [i for _ in range(8) for i in sampler.next_batch(128)]
        assert (sampler.epoch, sampler.offset) == (2, 24)
        assert sorted(drawn[:1000]) == list(range(1000))
        resumed = GlobalSampler(fingerprint(1000), seed=3)
        assert resumed.load_state_dict(sampler.state_dict()) == []
        assert (resumed.epoch, resumed.offset) == (2, 24)
        rest = [i for _ in range(8) for i in resumed.next_batch(122)]
        assert sorted(drawn[1000:] + rest) == list(range(1000))  # 24 + 8 * 122 = 1000

    def test_end_of_an_epoch_is_the_start_of_the_next(self) -> None:
        sampler = GlobalSampler(fingerprint(6), seed=0)
        sampler.next_batch(6)
        assert (sampler.epoch, sampler.offset) == (2, 0)

    @given(
        length=st.integers(1, 40),
        sizes=st.lists(st.integers(0, 60), max_size=8),
        stop=st.integers(0, 8),
        shuffle=st.booleans(),
    )
    def test_stopped_anywhere_the_stream_goes_on(self, length: int, sizes: list[int], stop: int, shuffle: bool) -> None:
        straight = GlobalSampler(fingerprint(length), seed=5, shuffle=shuffle)
        expected = [straight.next_batch(size) for size in sizes]
        first = GlobalSampler(fingerprint(length), seed=5, shuffle=shuffle)
        got = [first.next_batch(size) for size in sizes[:stop]]
        second = GlobalSampler(fingerprint(length), seed=5, shuffle=shuffle)
        second.load_state_dict(first.state_dict())
        got += [second.next_batch(size) for size in sizes[stop:]]
        assert got == expected
        counts = Counter(i for batch in got for i in batch)
        assert max(counts.values(), default=0) - min((counts[i] for i in range(length)), default=0) <= 1

    def test_nothing_to_draw_from(self) -> None:
        with pytest.raises(CallError, match="prompts is empty"):
            GlobalSampler(fingerprint(0), seed=0)


class TestResumingWithSomethingElse:
    @pytest.mark.parametrize("other", [fingerprint(11), fingerprint(10, name="new", digest="e")])
    def test_other_data_starts_anew_and_says_so(self, other: Fingerprint) -> None:
        saved = GlobalSampler(fingerprint(10), seed=1)
        saved.next_batch(27)
        sampler = GlobalSampler(other, seed=1)
        sampler.next_batch(13)
        (warning,) = sampler.load_state_dict(saved.state_dict())
        assert (sampler.epoch, sampler.offset) == (1, 0)
        assert str(other) in warning and str(saved.fingerprint) in warning
        assert sampler.next_batch(other.length) == epoch_order(other.length, 1, 1).tolist()

    def test_a_renamed_file_is_the_same_data(self) -> None:
        saved = GlobalSampler(fingerprint(10), seed=1)
        saved.next_batch(3)
        sampler = GlobalSampler(fingerprint(10, name="renamed"), seed=1)
        assert sampler.load_state_dict(saved.state_dict()) == []
        assert sampler.offset == 3

    def test_another_seed_does_not_break_the_epoch(self) -> None:
        saved = GlobalSampler(fingerprint(10), seed=1)
        before = saved.next_batch(4)
        sampler = GlobalSampler(fingerprint(10), seed=2)
        sampler.next_batch(3)
        (warning,) = sampler.load_state_dict(saved.state_dict())
        assert "seed to 2" in warning and "with 1" in warning
        assert sorted(before + sampler.next_batch(6)) == list(range(10))


class TestRankSlice:
    @given(st.lists(st.integers(), max_size=50), st.integers(1, 12))
    def test_covers_the_batch_once_and_evenly(self, batch: list[int], world_size: int) -> None:
        parts = [rank_slice(batch, rank, world_size) for rank in range(world_size)]
        assert [item for part in parts for item in part] == batch
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    def test_uneven(self) -> None:
        assert [rank_slice("abcdefgh", rank, 3) for rank in range(3)] == [["a", "b"], ["c", "d", "e"], ["f", "g", "h"]]
        assert [rank_slice("ab", rank, 3) for rank in range(3)] == [[], ["a"], ["b"]]
