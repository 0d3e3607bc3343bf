"""Ctrl-C, and an agent's SIGTERM, in the middle of a save: as after a kill, and the process ends as it should."""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from faults import sweeps
from faults.savers import Savers


@pytest.mark.parametrize("blocking", [True, False])
def test_ctrl_c_at_any_call_of_a_save_leaves_a_process_that_goes_on_saving(
    savers: Savers, base: Path, blocking: bool
) -> None:
    findings = list(sweeps.ctrl_c(savers, base, blocking=blocking))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    assert len(findings) > 50
    assert {found.newest for found in findings[:-1]} == {0, 1}


@pytest.mark.parametrize(
    ("number", "ranks", "all_ranks", "blocking"),
    [(SIGINT, 1, False, False), (SIGINT, 2, True, True), (SIGTERM, 2, False, True)],
)
def test_a_signal_at_any_call_ends_the_process_in_order(
    savers: Savers, base: Path, number: int, ranks: int, all_ranks: bool, blocking: bool
) -> None:
    findings = list(
        sweeps.interrupts(savers, base, number, ranks=ranks, all_ranks=all_ranks, every=45, blocking=blocking)
    )
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    assert len(findings) > 2
