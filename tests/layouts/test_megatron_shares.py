"""Shares of data-parallel ranks, in files made by hand: what they make together, and what does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milepost.errors import DamagedError, IncompleteError
from milepost.layouts import open_directory

NAME = "decoder.final_layernorm.weight"
WHOLE = torch.arange(15, dtype=torch.float32).view(3, 5)


def _step(directory: Path, *shares: Mapping[str, Any]) -> Path:
    """A model of one parameter [3, 5] and a file of its moments for each share: a slice of its elements, and what the
    file says otherwise than that."""
    (directory / "model" / "mp_rank_00").mkdir(parents=True)
    (directory / "optim").mkdir()
    torch.save([{NAME: WHOLE}], directory / "model" / "mp_rank_00" / "model_states.pt")
    for rank, share in enumerate(shares):
        run = share["run"]
        state = {"step": torch.tensor(share.get("step", 4.0)), "exp_avg": WHOLE.view(-1)[run].clone()}
        place = {"shape": (3, 5), "start": run.start, "tp": 0, **share.get("says", {})}
        groups = [{"lr": 0.5, "params": [0], "param_names": [NAME]}]
        file = {"state": {0: state}, "param_groups": groups, "shares": {0: place}}
        torch.save(file, directory / "optim" / f"distrib_optim_pp0_tp0_cp0_dp{rank}.pt")
    return directory


def test_shares_make_the_whole_moment(tmp_path: Path) -> None:
    index = open_directory(_step(tmp_path, {"run": slice(0, 7)}, {"run": slice(7, 12)}, {"run": slice(12, 15)}))
    moment = index[f"optim/{NAME}/exp_avg"]
    np.testing.assert_array_equal(moment.numpy(), WHOLE.numpy())
    # a row, the rest of a row; of that row, of the next; of the last
    assert [(chunk.box.offsets, chunk.box.sizes) for chunk in moment.chunks] == [
        ((0, 0), (1, 5)), ((1, 0), (1, 2)), ((1, 2), (1, 3)), ((2, 0), (1, 2)), ((2, 2), (1, 3))
    ]  # fmt: skip
    assert index[f"optim/{NAME}/step"].numpy() == 4
    assert index.objects["param_groups"] == [{"lr": 0.5}]
    assert len(index.files) == 4


@pytest.mark.parametrize(
    ("shares", "error", "words"),
    [
        ([{"run": slice(0, 7)}, {"run": slice(8, 15)}], IncompleteError, "from 7 on"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 14)}], IncompleteError, "from 14 on"),
        ([{"run": slice(0, 7)}, {"run": slice(6, 15)}], DamagedError, "repeats"),
        # mutants: the right bytes said to lie elsewhere
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "says": {"start": 6}}], DamagedError, "repeats"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "says": {"shape": (5, 3)}}], DamagedError, "different tensors"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "says": {"start": 9}}], DamagedError, "no run of"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "says": {"start": -1}}], DamagedError, "does not say"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "says": {"shape": "all"}}], DamagedError, "does not say"),
        ([{"run": slice(0, 7)}, {"run": slice(7, 15), "step": 5.0}], DamagedError, "another save"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, shares: list[Mapping[str, Any]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_directory(_step(tmp_path, *shares))
