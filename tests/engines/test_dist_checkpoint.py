"""What goes wrong on one rank of a dist checkpoint's writers is told on all, by what it is."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import run_ranks

from milepost.engines.megatron.dist_checkpoint import together
from milepost.errors import MilepostError


def as_rank(home: str) -> dict[str, tuple[str, str]]:
    """Each way in which rank 1 fails, and what this rank was told."""
    import resource
    import signal

    import torch.distributed as dist

    def mistaken() -> None:
        raise TypeError("no such argument")

    def led_to_by_the_disk() -> None:
        try:
            raise OSError(5, "Input/output error")
        except OSError as error:
            raise RuntimeError("it went wrong") from error

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        torch.save(torch.zeros(100_000), Path(home) / "full.pt")

    told = {}
    for name, place, act in (
        ("mistaken", Path(home) / "part", mistaken),
        ("gone", Path(home) / "gone" / "part", led_to_by_the_disk),
        ("full", Path(home) / "part", full),
    ):
        try:
            together(place, act if dist.get_rank() == 1 else lambda: None)
        except MilepostError as error:
            told[name] = (type(error).__name__, str(error))
    return told


def test_all_ranks_are_told_what_it_was(tmp_path: Path) -> None:
    other, own = run_ranks(as_rank, 2, str(tmp_path))
    assert own["mistaken"] == other["mistaken"] == ("MilepostError", "rank 1: TypeError: no such argument")
    # Nothing can be said of the room in a folder that is not there, and nothing hangs for it.
    assert own["gone"] == ("WriteError", f"{tmp_path}/gone/part: could not be written: it went wrong")
    assert own["full"][0] == "WriteError" and "MB are free there" in own["full"][1]
    for name in ("gone", "full"):
        assert other[name] == ("WriteError", f"rank 1 could not write its part: {own[name][1]}")
