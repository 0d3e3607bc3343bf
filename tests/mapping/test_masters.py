"""A master takes its weight's place where training goes on, and nowhere else."""

from __future__ import annotations

from milepost.index import Box, ByteSource, Chunk, TensorEntry, TensorIndex
from milepost.mapping.masters import with_masters


def _entry(file: str, dtype: str, shape: tuple[int, ...] = (2,)) -> TensorEntry:
    return TensorEntry(dtype, shape, (Chunk(Box.whole(shape), ByteSource(file, 0, (1,) * len(shape))),))


def _index(entries: dict[str, TensorEntry]) -> TensorIndex:
    return TensorIndex(entries, "megatron", (), 1, {}, ())


def test_a_master_is_the_weight() -> None:
    weight, master, moment = _entry("w", "bfloat16"), _entry("m", "float32"), _entry("e", "float32")
    found = with_masters(
        _index({"a@tp1": weight, "b": weight, "optim/a@tp1/param": master, "optim/a@tp1/exp_avg": moment})
    )
    assert dict(found.items()) == {"a@tp1": master, "b": weight, "optim/a@tp1/exp_avg": moment}


def test_without_masters_nothing_changes() -> None:
    index = _index({"a": _entry("w", "float32"), "optim/a/exp_avg": _entry("e", "float32")})
    assert with_masters(index) is index


def test_a_master_of_another_shape_or_of_no_weight_is_left_out() -> None:
    weight = _entry("w", "bfloat16")
    index = _index(
        {"a": weight, "optim/a/param": _entry("m", "float32", (3,)), "optim/c/param": _entry("m", "float32")}
    )
    assert dict(with_masters(index).items()) == {"a": weight}
