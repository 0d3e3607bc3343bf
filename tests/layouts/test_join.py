"""Headers of ranks, joined: what of them is one number a tensor, and what is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.chunks import Grid
from milepost.errors import DamagedError, IncompleteError
from milepost.index import Box, TensorEntry, contiguous_strides
from milepost.layouts.headers import Cut, Header
from milepost.layouts.join import Join, OffsetTable, RankFiles

NAMES = ("a", "b", "c")


def _cut(*boxes: Box, shape: tuple[int, ...] = (4, 2), dtype: str = "float32", whole: bool = False) -> Cut:
    return Cut(dtype, shape, boxes, tuple(contiguous_strides(box.sizes) for box in boxes), whole)


def _rows(start: int, count: int) -> Box:
    return Box((start, 0), (count, 2))


def _header(rank: int, cuts: dict[str, tuple[Cut, int]], **fields: Any) -> Header:
    """A header in which each name has a cut and an offset."""
    distinct = list(dict.fromkeys(cut for cut, _ in cuts.values()))
    given_fields: dict[str, Any] = {
        "further": {},
        "digests": {},
        "aliases": {},
        "places": (),
        "content": b"",
        **fields,
    }
    return Header(
        Path(f"rank_{rank}.pt"),
        tuple(cuts),
        tuple(distinct),
        np.array([distinct.index(cut) for cut, _ in cuts.values()], np.int64),
        np.array([offset for _, offset in cuts.values()], np.int64),
        **given_fields,
    )


def _joined(*headers: Header) -> dict[str, TensorEntry]:
    join = Join(len(headers))
    for header in headers:
        join.add(header)
    return join.entries()


def _places(entry: TensorEntry) -> list[tuple[str, str, int]]:
    return sorted((str(chunk.box), chunk.source.file, chunk.source.start()) for chunk in entry.chunks)


def test_tensors_that_are_cut_alike_share_all_but_their_offsets() -> None:
    headers = [
        _header(rank, {name: (_cut(_rows(2 * rank, 2)), 64 * (1 + n + 10 * rank)) for n, name in enumerate(NAMES)})
        for rank in range(2)
    ]
    entries = _joined(*headers)
    assert list(entries) == ["a", "b", "c"]
    grids = [entry.chunks for entry in entries.values()]
    assert all(isinstance(grid, Grid) and grid.offsets.dtype == np.uint32 for grid in grids)
    assert len({id(grid.file) for grid in grids} | {id(grid.strides) for grid in grids}) == 2  # type: ignore[attr-defined]
    assert len({id(grid.cuts) for grid in grids}) == 1  # type: ignore[attr-defined]
    assert _places(entries["b"]) == [("[0:2, 0:2]", "rank_0.pt", 128), ("[2:4, 0:2]", "rank_1.pt", 768)]


def test_names_in_another_order_are_the_same_names() -> None:
    first = _header(0, {"a": (_cut(_rows(0, 3)), 64), "b": (_cut(_rows(0, 1)), 128), "c": (_cut(_rows(0, 4)), 192)})
    second = _header(
        1,
        {"c": (_cut(), 0), "a": (_cut(_rows(3, 1)), 640), "b": (_cut(_rows(1, 1), _rows(2, 2)), 704)},
        further={2: (770,)},
    )
    entries = _joined(first, second)
    assert list(entries) == ["a", "b", "c"]
    assert _places(entries["a"]) == [("[0:3, 0:2]", "rank_0.pt", 64), ("[3:4, 0:2]", "rank_1.pt", 640)]
    assert _places(entries["b"]) == [
        ("[0:1, 0:2]", "rank_0.pt", 128),
        ("[1:2, 0:2]", "rank_1.pt", 704),
        ("[2:4, 0:2]", "rank_1.pt", 770),
    ]
    assert _places(entries["c"]) == [("[0:4, 0:2]", "rank_0.pt", 192)]


def test_a_name_that_some_files_lack_is_told_with_them() -> None:
    cut = (_cut(_rows(0, 4)), 64)
    with pytest.raises(DamagedError, match=r"^b: not in rank_0\.pt, rank_2\.pt, but in the files of the other ranks"):
        _joined(_header(0, {"a": cut}), _header(1, {"a": cut, "b": cut}), _header(2, {"a": cut}))
    with pytest.raises(DamagedError, match=r"^b: not in rank_1\.pt, but"):
        _joined(_header(0, {"a": cut, "b": cut}), _header(1, {"a": cut}), _header(2, {"b": cut, "a": cut}))


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (_cut(_rows(2, 2), dtype="int32"), r"^b: the ranks' files disagree: float32\[4, 2\], int32\[4, 2\]"),
        (_cut(_rows(2, 2), shape=(5, 2)), r"^b: the ranks' files disagree"),
        (_cut(_rows(0, 4), whole=True), r"^b: sharded on some ranks and whole in rank_1\.pt"),
        (_cut(_rows(1, 2)), r"^b: its parts hold|^b: boxes .* cover the same"),
        (_cut(_rows(0, 2)), r"^b: its parts hold 4 of 8 elements"),
        (_cut(), r"^b: its parts hold 4 of 8 elements"),
    ],
)
def test_ranks_that_contradict_each_other(other: Cut, error: str) -> None:
    good = (_cut(_rows(0, 4)), 64)
    with pytest.raises((DamagedError, IncompleteError), match=error):
        _joined(
            _header(0, {"a": good, "b": (_cut(_rows(0, 2)), 128)}), _header(1, {"a": (_cut(), 0), "b": (other, 64)})
        )


def test_plain_tensors_are_compared_by_their_bytes_and_shapes() -> None:
    whole = _cut(_rows(0, 4), whole=True)
    turned = Cut("float32", (4, 2), (_rows(0, 4),), ((1, 4),), True)
    entries = _joined(
        _header(0, {"a": (whole, 64)}, digests={0: b"x"}), _header(1, {"a": (turned, 64)}, digests={0: b"x"})
    )
    assert _places(entries["a"]) == [("[0:4, 0:2]", "rank_0.pt", 64)]
    with pytest.raises(DamagedError, match=r"^a: every rank should hold the same .* rank 2 differs from rank 0"):
        _joined(*(_header(rank, {"a": (whole, 64)}, digests={0: b"xxy"[rank : rank + 1]}) for rank in range(3)))


@given(
    st.lists(
        st.lists(st.integers(0, 1 << 40) | st.integers(0, 1 << 31).map(lambda n: 64 * n), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_offsets_come_back_whatever_they_are(ranks: list[list[int]]) -> None:
    table = OffsetTable(3, len(ranks))
    for rank, offsets in enumerate(ranks):
        table.put(rank, np.array(offsets, np.int64))
    for tensor in range(3):
        found = [int(number) * table.unit for number in table.row(tensor)]
        assert found == [offsets[tensor] for offsets in ranks]
    assert (table.unit == 64) == all(n % 64 == 0 and n < 64 << 32 for offsets in ranks for n in offsets)


def test_only_the_first_file_stays_open(fsdp_checkpoints: Path) -> None:
    paths = [fsdp_checkpoints / "w3" / f"model_world_size_3_rank_{rank}.pt" for rank in range(3)]
    files = RankFiles(paths)
    assert files[0] is files[0]
    assert files[1] is not files[1]
    assert [file.path for file in files] == paths
    assert [file.path for file in files[1:]] == paths[1:]
