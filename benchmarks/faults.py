"""Faults, injected into real savers: how many of each kind, and how many a run survived.

    python benchmarks/faults.py [--quick] [--only WORD] [--soak N] [--seed N] [--work DIR] [--json FILE]

Without `--quick` every call of a save is hit once by each kind; that takes some minutes. `--soak 500` instead kills one
run 500 times, one rank, all of them or the launcher, at random calls, and goes on from what is there each time.

A fault is survived when every folder that is named as a step is whole and holds, bit for bit, the state of its step,
no step is lost that was acknowledged, the tracker names one of them, all ranks were told what happened in one sentence,
and the next start takes up the newest step and sweeps the rest. Mutants are savers that lack one safeguard: they must
be found out. The faults are those of tests/faults. Takes a C compiler; power cuts of a real file system and hangs take
root, too. Ctrl-C ends it at any moment and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import damage, mutants, places, shim, sweeps
from faults.findings import Finding
from faults.jobs import Job
from faults.savers import Savers

MEMORY = Path("/dev/shm")
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EROFS": errno.EROFS}


@dataclass
class Tally:
    """Of one kind of fault: how many were injected, and what was not survived."""

    injected: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    """Inject all, print a table; the exit status is 1 where something was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the calls, in about a minute")
    parser.add_argument("--only", default="", help="only kinds whose name has this word in it")
    parser.add_argument("--soak", type=int, metavar="N", help="N random kills of one run, and nothing else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where files go; default: memory, or a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shim.COMPILER is None:
        sys.exit("the preload shim takes a C compiler (cc)")
    work = options.work or (MEMORY if MEMORY.is_dir() else None)
    tallies: dict[str, Tally] = {}
    stopped = False
    try:
        with (
            tempfile.TemporaryDirectory(prefix="milepost-faults-", dir=work) as folder,
            Savers("tiny", mounts=not places.why_not(), quiet=True) as savers,
        ):
            if options.soak:
                soak(savers, Path(folder), options.soak, options.seed, tallies)
            else:
                sweep(savers, Path(folder), options, tallies)
    except KeyboardInterrupt:
        say("stopped")
        stopped = True
    say(table(tallies))
    if options.json:
        options.json.write_text(json.dumps({kind: vars(tally) for kind, tally in tallies.items()}, indent=1) + "\n")
    sys.exit(1 if any(tally.failed for tally in tallies.values()) else 130 if stopped else 0)


def sweep(savers: Savers, base: Path, options: argparse.Namespace, tallies: dict[str, Tally]) -> None:
    """Every kind, one after another."""
    every = 12 if options.quick else 1
    for number, (kind, inject) in enumerate(kinds(savers, every, options.seed).items()):
        if options.only not in kind:
            continue
        folder = base / str(number)
        folder.mkdir()
        tally = tallies.setdefault(kind, Tally())
        begun = time.monotonic()
        for count, finding in enumerate(inject(folder)):
            note(tally, finding, counts=finding.reached)
            progress(f"{kind}: {count + 1}")
        tally.seconds = time.monotonic() - begun
    for mutant, inject in found_out(savers).items():
        if options.only in mutant:
            folder = base / mutant
            folder.mkdir()
            begun = time.monotonic()
            progress(mutant)
            found = any(finding.shows(mutants.FAULTS[mutant]) for finding in inject(folder))
            tally = tallies.setdefault("mutants that were found out", Tally())
            tally.injected += 1
            tally.failed += [] if found else [mutant]
            tally.seconds += time.monotonic() - begun


def kinds(savers: Savers, every: int, seed: int) -> dict[str, Callable[[Path], Iterable[Finding]]]:
    """Each kind of fault, and what injects it."""
    mounting = not places.why_not()
    found: dict[str, Callable[[Path], Iterable[Finding]]] = {
        "SIGKILL of the only rank": lambda base: sweeps.kills(savers, base, every=every),
        "SIGKILL of it while it trains on": lambda base: sweeps.kills(savers, base, every=every, blocking=False),
    }
    for who in sweeps.WHO:
        for rank in (0, 1):
            found[f"SIGKILL of {who} of two, at rank {rank}'s call"] = lambda base, who=who, rank=rank: sweeps.kills(
                savers, base, ranks=2, who=who, at_rank=rank, every=2 * every
            )
    for number in (SIGINT, SIGTERM):
        found[f"{number.name} to one rank of two"] = lambda base, number=number: sweeps.interrupts(
            savers, base, number, ranks=2, every=3 * every
        )
    found["SIGINT to all of two ranks"] = lambda base: sweeps.interrupts(
        savers, base, SIGINT, ranks=2, all_ranks=True, every=3 * every
    )
    for blocking in (True, False):
        behind = "" if blocking else " while it trains on"
        found[f"SIGINT, and it goes on saving{behind}"] = lambda base, blocking=blocking: sweeps.ctrl_c(
            savers, base, every=max(1, every // 4), blocking=blocking
        )
        found[f"hanging call of rank 0 of two{behind}"] = lambda base, blocking=blocking: sweeps.commit_hangs(
            savers, base, every=2 * every, blocking=blocking
        )
    found["SIGSTOP of one rank of two"] = lambda base: sweeps.stops(savers, base, every=2 * every)
    two, subsets = Job(Path(), Path(), ranks=2, steps=2), 1 if every > 1 else 6
    found["power cut, by POSIX's promises"] = lambda base: sweeps.power_cuts(
        savers, base, two, subsets=subsets, every=every, seed=seed
    )
    found["power cut after going back to an older step"] = lambda base: sweeps.power_cuts(
        savers,
        base,
        Job(Path(), Path(), resume_from=base / "run/global_step_1", options={"keep_last": None}),
        subsets=subsets,
        every=every,
        seed=seed,
    )
    if mounting:
        found["power cut of ext4"] = lambda base: sweeps.power_cuts_on_ext4(savers, base, every=2 * every)
        found["power cut of ext4, two ranks"] = lambda base: sweeps.power_cuts_on_ext4(
            savers, base, ranks=2, every=3 * every
        )
        found["hanging file system"] = lambda base: sweeps.hangs(savers, base, every=3 * every)
    for name, number in ERRORS.items():
        for rank in (0, 1):
            found[f"{name} at rank {rank} of two"] = lambda base, number=number, rank=rank: sweeps.errors(
                savers, base, number, at_rank=rank, every=max(1, every // 2)
            )
    found["EIO while training goes on"] = lambda base: sweeps.errors(
        savers, base, errno.EIO, at_rank=1, every=max(1, every // 2), blocking=False
    )
    for rank in (0, 1):
        found[f"failing read at rank {rank} of two"] = lambda base, rank=rank: sweeps.unreadable(
            savers, base, at_rank=rank, every=2 * every
        )
    for kind in ("a flipped bit", "a cut file"):
        found[kind] = lambda base, kind=kind: damage.damages(base, kind, 240 // every, seed)
    return found


def found_out(savers: Savers) -> dict[str, Callable[[Path], Iterable[Finding]]]:
    """Each mutant, and what should find it out."""
    ops = ("create", "rename", "rmdir")
    found: dict[str, Callable[[Path], Iterable[Finding]]] = {
        name: lambda base, name=name: sweeps.kills(savers, base, ops=ops, mutant=name) for name in mutants.MUTANTS
    }
    for flush in ("fsync", "fsyncdir"):
        job = Job(Path(), Path(), steps=2)
        found[f"no {flush}"] = lambda base, flush=flush, job=job: sweeps.power_cuts(
            savers, base, job, every=6, flushes=(flush,)
        )
    return found


def soak(savers: Savers, base: Path, count: int, seed: int, tallies: dict[str, Tally]) -> None:
    """One run, killed again and again."""
    begun = time.monotonic()
    for done, finding in enumerate(sweeps.random_kills(savers, base, count, seed), 1):
        who = finding.what.partition("SIGKILL of ")[2].partition(" at call")[0]
        tally = tallies.setdefault(f"SIGKILL of {who}", Tally())
        note(tally, finding, counts=finding.reached)
        passed = time.monotonic() - begun
        tally.seconds += passed - sum(other.seconds for other in tallies.values())
        left = passed / done * (count - done)
        progress(f"{done} of {count} kills, at step {finding.newest}, about {left:.0f} s left")
    missed = count - sum(tally.injected for tally in tallies.values())
    say(f"{missed} of {count} jobs came to their end before their call; the run is at step {finding.newest}")


def note(tally: Tally, finding: Finding, *, counts: bool) -> None:
    """Count one finding; say at once what was not survived."""
    tally.injected += counts
    if finding.faults:
        tally.failed.append(f"{finding.what}: {'; '.join(finding.faults)}")
        say(f"NOT SURVIVED  {tally.failed[-1]}")


def say(text: str) -> None:
    """A line that stays."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(text, flush=True)


_last = [0.0]


def progress(text: str) -> None:
    """One line that is written over on a terminal, and now and then in a log."""
    terminal = sys.stderr.isatty()
    if time.monotonic() - _last[0] > (0.1 if terminal else 10.0):
        _last[0] = time.monotonic()
        print(f"\r{text}\033[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)


def table(tallies: dict[str, Tally]) -> str:
    """Kinds, injected, survived, seconds."""
    lines = [f"{'fault':58}{'injected':>10}{'survived':>10}{'seconds':>9}"]
    for kind, tally in tallies.items():
        survived = tally.injected - min(tally.injected, len(tally.failed))
        lines.append(f"{kind:58}{tally.injected:10}{survived:10}{tally.seconds:9.1f}")
    injected = sum(tally.injected for tally in tallies.values())
    failed = sum(len(tally.failed) for tally in tallies.values())
    lines.append(f"{'all':58}{injected:10}{injected - min(injected, failed):10}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
