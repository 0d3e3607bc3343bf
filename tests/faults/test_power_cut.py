"""The power fails at any moment: what `save` has returned is on the disk, and what is there is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import sweeps
from faults.jobs import Job
from faults.mutants import FAULTS, FLUSHES
from faults.savers import Savers

KINDS = ("fsync", "fsyncdir")
"""Which flushes a saver leaves out: the files' or the folders'."""


def test_by_the_promises_of_posix_no_cut_takes_a_step_that_was_saved(savers: Savers, base: Path) -> None:
    job = Job(base, base, ranks=2, steps=2)
    findings = list(sweeps.power_cuts(savers, base, job, subsets=1, every=13))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    assert len(findings) > 40
    assert {found.newest for found in findings} == {2, 3, 4}


def test_nor_one_that_is_set_aside_by_a_start_from_an_older_one(savers: Savers, base: Path) -> None:
    job = Job(base, base, resume_from=base / "run/global_step_1", options={"keep_last": None})
    findings = list(sweeps.power_cuts(savers, base, job, subsets=2, every=6))
    assert [(found.what, found.faults) for found in findings if found.faults] == []
    assert {found.newest for found in findings} == {1, 2}


def test_a_saver_that_does_not_flush_what_it_sets_aside_is_found_out(savers: Savers, base: Path) -> None:
    [mutant] = FLUSHES
    going_back = base / "run/global_step_1"
    job = Job(base, base, resume_from=going_back, options={"keep_last": None}, mutant=mutant)
    assert any(found.shows(FAULTS[mutant]) for found in sweeps.power_cuts(savers, base, job, subsets=4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saver_that_does_not_flush_is_found_out(savers: Savers, base: Path, kind: str) -> None:
    job = Job(base, base, steps=2)
    assert any(
        found.shows(FAULTS[f"no {kind}"]) for found in sweeps.power_cuts(savers, base, job, every=6, flushes=(kind,))
    )


def test_a_cut_of_a_real_file_system_takes_no_step_that_was_saved(savers: Savers, base: Path, mounting: None) -> None:
    *cuts, last = sweeps.power_cuts_on_ext4(savers, base, every=19)
    assert [(found.what, found.faults) for found in (*cuts, last) if found.faults] == []
    assert len(cuts) > 4
    assert {found.newest for found in cuts} == {2, 3}
    # Cut right after `save` returned: nothing is left to be flushed.
    assert last.outcome is not None
    assert last.newest == last.outcome.saved == 3


@pytest.mark.parametrize("kind", KINDS)
def test_there_too_a_saver_that_does_not_flush_is_found_out(
    savers: Savers, base: Path, mounting: None, kind: str
) -> None:
    assert any(
        found.shows(FAULTS[f"no {kind}"])
        for found in sweeps.power_cuts_on_ext4(savers, base, every=60, flushes=(kind,))
    )
