"""A disk that refuses, is slow, or takes less than it was given: every rank is told why, and nothing has changed."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from faults import places, state, sweeps
from faults.jobs import Job
from faults.savers import Savers
from faults.shim import Rule
from faults.state import Promise

WORDS = {
    errno.EIO: "Input/output error",
    errno.ENOSPC: "the disk is full; free some space, or keep fewer steps",
    errno.EDQUOT: "your disk quota is used up; free some space, or keep fewer steps",
    errno.EROFS: "the file system is read-only; choose another place",
}


@pytest.mark.parametrize(("why", "at_rank", "every"), [(w, w in (errno.EIO, errno.EROFS), 3 + w % 2) for w in WORDS])
def test_an_error_at_any_call_is_one_sentence_on_all_ranks_and_the_next_save_is_good(
    savers: Savers, base: Path, why: int, at_rank: int, every: int
) -> None:
    *points, last = sweeps.errors(savers, base, why, at_rank=int(at_rank), every=every)
    assert [(found.what, found.faults) for found in (*points, last) if found.faults] == []
    assert last.outcome is not None
    told = last.outcome.errors
    assert len(told) > 2
    for text in told:
        assert text.startswith("WriteError: step ")
        assert f"rank {int(at_rank)}: {base}/run" in text
        assert WORDS[why] in text


def test_an_error_at_the_last_flush_takes_the_step_back(savers: Savers, base: Path) -> None:
    """It has its name already, and nobody knows whether the disk has it: a step that was not acknowledged is gone."""
    *points, last = sweeps.errors(savers, base, errno.EIO, ranks=1, ops=("fsyncdir",))
    assert [(found.what, found.faults) for found in (*points, last) if found.faults] == []
    assert last.outcome is not None
    assert len(last.outcome.of("error")) > 2


def test_a_disk_that_takes_half_of_each_write_gets_the_other_half_too(savers: Savers, base: Path) -> None:
    job = Job(base / "run", base / "scratch", ranks=2, steps=2, rules=(Rule("short", 1, onwards=True, ops=("write",)),))
    outcome = savers.run(job)
    assert outcome.errors == []
    assert state.faults_of(job.root, Promise(2, 2)) == []


def test_a_slow_disk_is_waited_for(savers: Savers, base: Path) -> None:
    rule = Rule("delay=300", 1, onwards=True, ops=("write", "fsync"))
    job = Job(base / "run", base / "scratch", ranks=2, steps=1, at_rank=1, rules=(rule,))
    begun = time.monotonic()
    outcome = savers.run(job)
    assert time.monotonic() - begun > 2 * 0.3
    assert outcome.errors == []
    assert state.faults_of(job.root, Promise(1, 1)) == []


def test_a_file_system_that_has_become_read_only(savers: Savers, base: Path, mounting: None) -> None:
    image, at = base / "image", base / "at"
    places.make_image(image)
    with places.mounted(savers, image, at) as seen:
        job = Job(at / "run", base / "scratch", steps=1)
        assert savers.run(job).saved == 1
        places.read_only(savers, at)
        [text] = savers.run(replace(job, scratch=base / "again")).errors
        assert text == f"WriteError: step 2 was not saved: {at}/run: {WORDS[errno.EROFS]}"
        assert state.faults_of(seen / "run", Promise(1, 1)) == []


def test_a_file_system_that_is_gone_in_the_middle(savers: Savers, base: Path, mounting: None) -> None:
    """From some write on everything fails, reads too: as a disk that was pulled out."""
    image, at = base / "image", base / "at"
    places.make_image(image)
    with places.mounted(savers, image, at):
        job = Job(at / "run", base / "scratch", steps=1)
        assert savers.run(job).saved == 1
        rule = Rule(f"errno={errno.EIO}", 20, onwards=True)
        outcome = savers.run(replace(job, scratch=base / "again", rules=(rule,)))
        [text] = outcome.errors
        assert text.startswith(f"WriteError: step 2 was not saved: {at}/run/global_step_2/")
        assert text.endswith(os.strerror(errno.EIO))


@pytest.mark.parametrize(("ranks", "at_rank", "every"), [(1, 0, 23), (2, 1, 67)])
def test_a_start_that_cannot_read_a_step_goes_on_from_the_one_before(
    savers: Savers, base: Path, ranks: int, at_rank: int, every: int
) -> None:
    *findings, last = sweeps.unreadable(savers, base, ranks=ranks, at_rank=at_rank, every=every)
    assert [(found.what, found.faults) for found in (*findings, last) if found.faults] == []
    assert {found.newest for found in findings} >= {1}
    assert last.newest == 2


def test_a_file_system_that_hangs_is_given_up_on_all_ranks_and_the_next_save_is_good(
    savers: Savers, base: Path, mounting: None
) -> None:
    first = next(iter(sweeps.hangs(savers, base, seconds=2.0)))
    assert first.faults == ()
    assert first.outcome is not None
    [told] = first.outcome.errors
    assert re.match(r"WriteError: step 2 was not saved: rank [01]: ", told)
    assert "the file system did not answer within 2.0 s (save_timeout); look after it" in told
    assert max(said["seconds"] for said in first.outcome.of("error")) < 60  # no timeout of minutes
    assert first.outcome.saved == 2
