"""One fault at every call of a save, one after another, and what was found after each."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from errno import EIO
from pathlib import Path
from signal import SIGINT
from typing import Any

from faults import crash, places, shim, state
from faults.findings import Finding
from faults.jobs import Job, Outcome
from faults.savers import Savers
from faults.shim import Rule
from faults.state import Promise
from milepost.checkpoint.diary.events import EVENTS, read_events

_TORCH = "unexpected pos"  # what torch.save makes of whatever comes while it calls back, Ctrl-C too
WHO = {"one rank": "kill", "all ranks": "group", "the launcher": "parent"}


@dataclass(frozen=True)
class Template:
    """A run of two steps, made once, and copied for each fault."""

    folder: Path
    job: Job

    @classmethod
    def make(cls, savers: Savers, base: Path, job: Job) -> Template:
        """By `job` without its faults."""
        folder = base / "template"
        base.mkdir(exist_ok=True)
        plain = Job(folder, base / "making", job.ranks, steps=2, kind=job.kind)
        made = savers.run(plain)
        assert made.saved == 2, made
        return cls(folder, job)

    def fresh(self) -> Job:
        """The job, with its folder as it was."""
        shutil.rmtree(self.job.root, ignore_errors=True)
        shutil.rmtree(self.job.scratch, ignore_errors=True)
        shutil.copytree(self.folder, self.job.root)
        return self.job


def kills(
    savers: Savers,
    base: Path,
    *,
    ranks: int = 1,
    who: str = "one rank",
    at_rank: int = 0,
    ops: tuple[str, ...] = (),
    every: int = 1,
    mutant: str = "",
    blocking: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """SIGKILL of `who` at every call that changes a file, or every such `every`, in a resume and a save of step 3.

    at_rank:  whose call it is
    blocking: whether training waits for its saves
    options:  of the manager
    """
    rule = Rule(WHO[who], ops=ops)
    job = Job(base / "run", base / "scratch", ranks, at_rank=at_rank, mutant=mutant, blocking=blocking)
    template = Template.make(savers, base, job if options is None else replace(job, options=options))
    for k in itertools.count(1, every):
        job = replace(template.fresh(), rules=(replace(rule, k=k),))
        outcome = savers.run(job)
        reached = shim.counted(job.scratch / "calls") >= k
        faults, newest = looked_at(job.root, outcome)
        yield Finding(f"SIGKILL of {who} at call {k} of rank {at_rank}", reached, tuple(faults), newest, outcome)
        if not reached:
            return


def looked_at(root: Path, outcome: Outcome) -> tuple[list[str], int]:
    """What does not hold after a job, and after the start that follows it; the newest step after the job."""
    saved = max(2, outcome.saved)
    found = state.faults_of(root, Promise(saved, saved))
    newest = state.newest(root)
    found += [*_odd(outcome), *_untrue(root, outcome, newest)]
    return [*found, *state.faults_of_next_start(root)], newest


def noted(root: Path) -> dict[int, str]:
    """The last that the diary says of the save of each step."""
    return {event["step"]: event["event"] for event in read_events(root / EVENTS) if event["event"].startswith("save_")}


def _untrue(root: Path, outcome: Outcome, newest: int) -> list[str]:
    """What ranks, or the diary, were told of a step that is there: that it was not saved."""
    lost = [re.search(r"LostRankError: step (\d+) was not saved", text) for text in outcome.errors]
    told = newest in {int(match[1]) for match in lost if match}
    failed = noted(root).get(newest) == "save_failed"
    return ([f"a rank was told that step {newest} was not saved, and it is there"] if told else []) + (
        [f"the diary says that step {newest} failed, and it is there"] if failed else []
    )


def _odd(outcome: Outcome) -> list[str]:
    """What was told in a way that no user should see, or not at all."""
    found = [f"rank {said['rank']}: {said['why']}" for said in outcome.of("error") if said["raw"]]
    found += [f"rank {said['rank']} got another state" for said in outcome.of("resumed") if not said["holds"]]
    return [*found, "some ranks never came to an end"] if outcome.overtime else found


def errors(
    savers: Savers,
    base: Path,
    errno: int,
    *,
    ranks: int = 2,
    at_rank: int = 0,
    ops: tuple[str, ...] = (),
    every: int = 1,
    blocking: bool = True,
) -> Iterator[Finding]:
    """That error at every call of a save, one save each, by ranks that go on: all are told, and nothing has changed."""
    rule = Rule(f"errno={errno}", ops=ops)
    job = Job(base / "run", base / "scratch", ranks, rules=(rule,), at_rank=at_rank, each=every, seconds=300)
    job = replace(job, blocking=blocking)
    outcome = savers.run(job)
    name = os.strerror(errno)
    points = outcome.of("point")
    for point in points:
        found = (point["why"],) if point["why"] else ()
        yield Finding(f"{name} at call {point['k']} of rank {at_rank}", point is not points[-1], found)
    # The tracker may lag behind where it could not be moved, until the next save.
    found = (*told_badly(outcome, ranks), *state.faults_of(job.root, Promise(outcome.saved, outcome.saved)))
    ended = () if outcome.of("closed", 0) else ("the ranks did not come to their end",)
    yield Finding(f"{name}, and then a save without", False, (*found, *ended), state.newest(job.root), outcome)


def commit_hangs(
    savers: Savers,
    base: Path,
    *,
    ops: tuple[str, ...] = (),
    part: str = "",
    every: int = 1,
    blocking: bool = True,
    seconds: float = 1.5,
) -> Iterator[Finding]:
    """One call after another of rank 0 of two hangs for longer than a save may take, one save each; then it goes on.

    part:  only calls whose path has this in it
    """
    made = savers.run(Job(base / "run", base / "making", 2, steps=2))
    assert made.saved == 2, made
    rule = Rule("hang", ops=ops, part=part)
    options = {"keep_last": 2, "save_timeout": seconds}
    job = Job(base / "run", base / "scratch", 2, rules=(rule,), at_rank=0, each=every, seconds=600, options=options)
    # Ranks wait longer for one another than any of them for a diary that hangs.
    outcome = savers.run(replace(job, blocking=blocking, patience=60.0))
    points = outcome.of("point")
    for point in points:
        found = (point["why"],) if point["why"] else ()
        which = "done" if point["saved"] else "given up"
        yield Finding(
            f"call {point['k']} of rank 0 hangs: {which}", point is not points[-1], found, int(point["saved"])
        )
    found = (*told_badly(outcome, 2), *state.faults_of(job.root, Promise(outcome.saved, outcome.saved)))
    ended = () if outcome.of("closed", 0) else ("the ranks did not come to their end",)
    newest, start = state.newest(job.root), state.faults_of_next_start(job.root)
    yield Finding("hanging calls, and then a save without", False, (*found, *ended, *start), newest, outcome)


def ctrl_c(savers: Savers, base: Path, *, every: int = 1, blocking: bool = True) -> Iterator[Finding]:
    """Ctrl-C comes at one call after another, one save each, in a process that goes on: a notebook."""
    rule = Rule(f"signal={int(SIGINT)}")
    job = Job(base / "run", base / "scratch", rules=(rule,), each=every, seconds=300, blocking=blocking)
    outcome = savers.run(job)
    points = outcome.of("point")
    for point in points:
        found = (point["why"],) if point["why"] else ()
        reached = point is not points[-1]
        yield Finding(f"SIGINT at call {point['k']}", reached, found, int(point["saved"]))
    faults = [*_odd(outcome), *(f"told of {error}" for error in outcome.errors if _TORCH not in error)]
    faults += state.faults_of(job.root, Promise(outcome.saved, outcome.saved))
    faults += [] if outcome.of("closed") else ["it did not come to its end"]
    newest, start = state.newest(job.root), state.faults_of_next_start(job.root)
    yield Finding("SIGINTs, and then a save without", False, (*faults, *start), newest, outcome)


def interrupts(
    savers: Savers,
    base: Path,
    number: int,
    *,
    ranks: int = 1,
    all_ranks: bool = False,
    at_rank: int = 0,
    every: int = 1,
    blocking: bool = True,
) -> Iterator[Finding]:
    """A signal that breaks off one rank, or all of them, comes at every call, or every such `every`, of a resume and a
    save of step 3."""
    rule = Rule(f"{'signals' if all_ranks else 'signal'}={number}")
    job = Job(base / "run", base / "scratch", ranks, at_rank=at_rank, blocking=blocking, interrupts=True)
    template = Template.make(savers, base, job)
    for k in itertools.count(every, every):
        job = replace(template.fresh(), rules=(replace(rule, k=k),))
        outcome = savers.run(job)
        reached = shim.counted(job.scratch / "calls") >= k
        faults, newest = looked_at(job.root, outcome)
        told = {"Traceback", "Exception", "Error", "Fatal"}
        for rank in range(ranks):
            said = (job.scratch / f"stderr{rank}").read_text()
            if any(word in said for word in told):
                faults.append(f"rank {rank} says {said!r}")
            hit = reached and (all_ranks or rank == at_rank)
            allowed = {128 + number} if hit and not outcome.of("closed", rank) else {0, 128 + number}
            if outcome.statuses[rank] not in allowed:
                faults.append(f"rank {rank} ended with {outcome.statuses[rank]}, {outcome.signals[rank]}")
        who = "all ranks" if all_ranks else "one rank"
        yield Finding(
            f"signal {number} to {who} at call {k} of rank {at_rank}", reached, tuple(faults), newest, outcome
        )
        if not reached:
            return


def told_badly(outcome: Outcome, ranks: int) -> list[str]:
    """What is wrong with how errors were told: all ranks the same, soon, in one sentence."""
    found = []
    by_rank = [outcome.of("error", rank) for rank in range(ranks)]
    for said in zip(*by_rank, strict=False):
        if len({one["why"] for one in said}) > 1:
            found.append(f"the ranks were told different things: {[one['why'] for one in said]}")
        why = said[0]["why"]
        if said[0]["raw"] or "\n" in why or ".tmp" in why or not re.search(r"step \d+ was not saved: ", why):
            found.append(f"told badly: {why}")
        if max(one["seconds"] for one in said) > 60:  # no measurement: they waited for no timeout of minutes
            found.append(f"told late: {why}")
    if len({len(one) for one in by_rank}) > 1:
        found.append("some ranks were told of fewer errors than others")
    return found


def power_cuts(
    savers: Savers,
    base: Path,
    job: Job,
    *,
    subsets: int = 2,
    every: int = 1,
    seed: int = 0,
    flushes: tuple[str, ...] = (),
    starts: int = 4,
) -> Iterator[Finding]:
    """Power cuts after every change of a recorded job, by the promises of POSIX alone (`crash`).

    flushes:  kinds of flushes (fsync, fsyncdir) that the saver does not make: a mutant
    starts:   after each so many the next start is tried too
    """
    trace = base / "trace"
    skipped = (Rule("skip", onwards=True, ops=flushes),) if flushes else ()
    template = Template.make(savers, base, replace(job, root=base / "run", scratch=base / "scratch"))
    outcome = savers.run(replace(template.fresh(), trace=trace, rules=skipped))
    assert outcome.of("closed"), outcome
    changes = shim.read_trace(trace)
    root = base / "after"
    back = job.resume_from is not None
    first = 1 if back else 2
    cuts = crash.cuts(template.job.root, template.folder, changes, seed, subsets, every)
    for turn, (number, acknowledged, found) in enumerate(cuts):
        crash.put(found, root)
        saved = max(first, acknowledged)
        faults = state.faults_of(root, Promise(saved, saved, back))
        if back:
            faults += state.lost(root, (1, 2))
        at = state.newest(root)
        if turn % starts == 0:
            faults += state.faults_of_next_start(root)
        change = changes[number]
        yield Finding(f"power cut after {change.op} of {Path(change.path).name}", True, tuple(faults), at)
        shutil.rmtree(root)


def power_cuts_on_ext4(
    savers: Savers, base: Path, *, ranks: int = 1, every: int = 1, flushes: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """The power of an ext4 file system fails right before every call, or every such `every`, of a resume and a save of
    step 3, and right after `save` has returned. `flushes`: see `power_cuts`."""
    at, image, fresh = base / "at", base / "image", base / "fresh"
    places.make_image(fresh)
    skipped = (Rule("skip", onwards=True, ops=flushes),) if flushes else ()
    job = Job(at / "run", base / "scratch", ranks, at_rank=0, mount=at)
    with places.mounted(savers, fresh, at):
        made = savers.run(replace(job, steps=2))
        assert made.saved == 2, made
    for k in itertools.count(1, every):
        shutil.copyfile(fresh, image)
        shutil.rmtree(job.scratch, ignore_errors=True)
        with places.mounted(savers, image, at) as seen:
            outcome = savers.run(replace(job, rules=(Rule("cut", k), *skipped)))
            reached = shim.counted(job.scratch / "calls") >= k
            if not reached:
                places.cut_power(seen)
        saved = max(2, outcome.saved)
        with places.mounted(savers, image, at) as seen:
            faults = state.faults_of(seen / "run", Promise(saved, saved))
            newest = state.newest(seen / "run")
            faults += state.faults_of_next_start(seen / "run")
        when = f"before call {k}" if reached else "after the save"
        yield Finding(f"power of ext4 cut {when}", True, tuple(faults), newest, outcome)
        if not reached:
            return


def hangs(savers: Savers, base: Path, *, every: int = 10, seconds: float = 2.0) -> Iterator[Finding]:
    """The file system of two ranks hangs at a call of rank 1, for longer than a save may take: both are told in time.
    Then it goes on, and so do they. (A frozen ext4 file system holds whoever changes it in the kernel.)"""
    image, at = base / "image", base / "at"
    places.make_image(image)
    with places.mounted(savers, image, at) as seen:
        plain = Job(at / "run", base / "scratch", 2, mount=at, options={"keep_last": 2, "save_timeout": seconds})
        step = savers.run(plain).saved
        for k in itertools.count(1, every):
            scratch = base / f"scratch{k}"
            rules = (Rule("freeze", k, ops=("mkdir", "create", "write", "fsync")),)
            savers.start(replace(plain, scratch=scratch, at_rank=1, rules=rules, again=True))
            while not (scratch / "done").exists() and len(list(scratch.glob("told*"))) < 2:
                time.sleep(0.02)
            places.thaw(seen)
            (scratch / "go").touch()
            outcome = savers.outcome()
            reached = shim.counted(scratch / "calls") >= k
            faults = [*_odd(outcome), *state.faults_of(seen / "run", Promise(step + 1, step + 1))]
            if reached and (len(outcome.errors) != 1 or "did not answer within" not in outcome.errors[0]):
                faults.append(f"told badly: {outcome.errors}")
            step = state.newest(seen / "run")
            yield Finding(f"file system hangs at call {k} of rank 1", reached, tuple(faults), step, outcome)
            if not reached:
                return


def stops(savers: Savers, base: Path, *, every: int = 10, seconds: float = 1.0) -> Iterator[Finding]:
    """Rank 1 of two stops (SIGSTOP: a machine that hangs) at a call of a save, and answers no more: rank 0 is told."""
    options = {"keep_last": 2, "save_timeout": seconds}
    job = Job(base / "run", base / "scratch", 2, at_rank=1, options=options)
    template = Template.make(savers, base, job)
    for k in itertools.count(1, every):
        fresh = replace(template.fresh(), rules=(Rule("stop", k, ops=("write", "fsync", "create")),))
        outcome = savers.run(fresh)
        reached = shim.counted(fresh.scratch / "calls") >= k
        faults, newest = looked_at(job.root, outcome)
        if reached and not any("does not answer" in text for text in outcome.errors):
            faults.append(f"told badly: {outcome.errors}")
        yield Finding(f"rank 1 stops at call {k}", reached, tuple(faults), newest, outcome)
        if not reached:
            return


def unreadable(savers: Savers, base: Path, *, ranks: int = 2, at_rank: int = 0, every: int = 1) -> Iterator[Finding]:
    """A read fails (a sector that is gone) at one call after another of a start: it goes on from a step that it read
    whole, or says why not."""
    rule = Rule(f"errno={EIO}", ops=("read",))
    template = Template.make(savers, base, Job(base / "run", base / "scratch", ranks, at_rank=at_rank, steps=0))
    for k in itertools.count(1, every):
        job = replace(template.fresh(), rules=(replace(rule, k=k),))
        outcome = savers.run(job)
        reached = shim.counted(job.scratch / "calls") >= k
        faults = [*_odd(outcome), *state.faults_of(job.root, Promise(2, 2))]
        from_steps = {said["step"] for said in outcome.of("resumed")}
        if len(outcome.of("resumed")) not in (0, ranks) or not from_steps <= {1, 2} or len(from_steps) > 1:
            faults.append(f"the ranks went on from {from_steps}")
        at = next(iter(from_steps), 0)
        yield Finding(f"read {k} of rank {at_rank} fails", reached, tuple(faults), at, outcome)
        if not reached:
            return


def random_kills(savers: Savers, base: Path, count: int, seed: int) -> Iterator[Finding]:
    """One run of one or two ranks, killed so often: one rank, all, or the launcher, at a random call of a random save;
    each time it goes on from what is there."""
    chance = random.Random(seed)
    root, before = base / "run", 0
    for turn in range(count):
        who, ranks = chance.choice(list(WHO)), chance.choice((1, 2))
        at_rank = chance.randrange(ranks)
        scratch = base / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        rule = Rule(WHO[who], chance.randrange(1, 300))
        outcome = savers.run(Job(root, scratch, ranks, steps=4, rules=(rule,), at_rank=at_rank))
        saved = max(before, outcome.saved)
        faults = [*state.faults_of(root, Promise(saved, saved)), *_odd(outcome), *state.faults_of_next_start(root)]
        before = state.newest(root)
        reached = shim.counted(scratch / "calls") >= rule.k
        what = f"{turn}: SIGKILL of {who} at call {rule.k} of rank {at_rank} of {ranks}"
        yield Finding(what, reached, tuple(faults), before, outcome)
