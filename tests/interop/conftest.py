"""Runs that the interop tests share."""

from __future__ import annotations

import pytest
from interop import ours, theirs


@pytest.fixture(scope="session")
def our_run(tmp_path_factory: pytest.TempPathFactory) -> ours.OurRun:
    """A run that milepost saved on two ranks. Read only; copy what a test changes."""
    return ours.make_run(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def their_run(tmp_path_factory: pytest.TempPathFactory, our_run: ours.OurRun) -> theirs.TheirRun:
    """A run that verl saved on two ranks, and what each side made of the other's. Read only, as above."""
    return theirs.make_run(tmp_path_factory.mktemp("theirs"), our_run)
