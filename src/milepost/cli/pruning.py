"""prune: delete what retention lets go. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from milepost.checkpoint.diary.status import numbers, require_run
from milepost.checkpoint.inventory import retention_of
from milepost.checkpoint.litter import sweep
from milepost.checkpoint.pruning import STEP, Going, Marks, alone, carry_out, pin, plan_prune, sweepable
from milepost.checkpoint.remote.folder import url_of
from milepost.checkpoint.retention import Decision, Retention
from milepost.checkpoint.steps import scan
from milepost.cli.declared import Argument, Option
from milepost.cli.options import Json, Quiet, of_call, print_json
from milepost.console import note
from milepost.errors import CallError
from milepost.wording import counted, file_size

WHAT = "say what is to stay: --keep_last N, --keep_every N, --keep_best METRIC, --keep_exports N"


@of_call(Retention)
def prune(
    root: Annotated[Path, Argument(metavar="ROOT", help="A run's directory (trainer.default_local_dir).")],
    pin_: Annotated[
        list[int] | None, Option("--pin", metavar="STEP", help="Keep this step for ever.", show_default=False)
    ] = None,
    unpin: Annotated[
        list[int] | None, Option("--unpin", metavar="STEP", help="Take the pin away.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would go and what stays, and why.")] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
    *,
    call: Retention,
) -> None:
    """Delete steps of a run that nothing keeps.

    Without a --keep option, what the run itself keeps. Never deleted: the newest whole step, what is newer, pinned
    steps, and steps of other programs. What killed saves have left goes too. Refused while the run is alive.

    Example: milepost prune checkpoints/project/run --keep_last 3 --keep_every 100 --dry-run
    """
    marks = Marks(tuple(pin_ or ()), tuple(unpin or ()))
    url = url_of(root)
    if url is not None:
        from milepost.cli import at_url  # noqa: PLC0415  most calls name none

        at_url.prune(url, call, marks, dry_run=dry_run, yes=yes, as_json=json_, quiet=quiet)
        return
    require_run(root)
    marks.check(root, [place.step for place in scan(root)])
    if marks and call.keeps_all:
        if not dry_run:
            pin(root, marks)
        report_marks(str(root), marks, dry_run, json_)
        return
    retention = _retention(root, call)
    if dry_run:
        plan, litter = plan_prune(root, retention, marks=marks), sweepable(root, certain=False)
        show(str(root), plan.decisions, plan.going, retention, litter, quiet)
        report(str(root), plan.decisions, plan.going, retention, litter, marks, dry_run, json_)
        return
    with alone(root) as certain:
        plan, litter = plan_prune(root, retention, marks=marks), sweepable(root, certain=certain)
        show(str(root), plan.decisions, plan.going, retention, litter, quiet)
        require_yes(plan.going, litter, yes)
        pin(root, marks)
        gone = carry_out(plan)
        swept = sweep(root, litter)
    report(str(root), plan.decisions, gone, retention, swept, marks, dry_run, json_)
    left = len(plan.going) - len(gone) + len(litter) - len(swept)
    if left:
        raise CallError(f"{root}: {counted(left, 'thing')} could not be deleted; the lines above say why")


def _retention(root: Path, call: Retention) -> Retention:
    own = retention_of(root) if call.keeps_all else call
    if own is None or own.keeps_all:
        raise CallError(WHAT)
    return own


def show(
    place: str,
    decisions: Sequence[Decision],
    going: Sequence[Going],
    retention: Retention,
    litter: Sequence[str],
    quiet: bool,
) -> None:
    """Say, for a person, what stays and why, and what goes."""
    note(f"{place}: {counted(len(decisions), 'step')}; stays: {retention}", quiet=quiet)
    kept = [decision for decision in decisions if decision.kept]
    for why in dict.fromkeys(decision.why for decision in kept):
        note(f"  keep    {numbers([one.step for one in kept if one.why == why])}: {why}", quiet=quiet)
    for what in dict.fromkeys(one.what for one in going):
        some = [one for one in going if one.what == what]
        kind = "" if what == STEP else "Hugging Face weights of "
        note(f"  delete  {kind}{numbers([one.step for one in some])} ({file_size(_bytes(some))})", quiet=quiet)
    for name in litter:
        note(f"  delete  {name}, left by a save that was killed", quiet=quiet)


def require_yes(going: Sequence[Going], litter: Sequence[str], yes: bool) -> None:
    """Ask on a terminal before anything is deleted. Raises CallError where the answer is no, or there is none."""
    if yes or not (going or litter):
        return
    if not sys.stdin.isatty():
        raise CallError("nothing was deleted: there is no terminal to ask on; say --yes, or look with --dry-run")
    things = counted(len(going) + len(litter), "thing")
    print(f"delete {things}, {file_size(_bytes(going))}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CallError("nothing was deleted")


def report(
    place: str,
    decisions: Sequence[Decision],
    going: Sequence[Going],
    retention: Retention,
    litter: Sequence[str],
    marks: Marks,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print what was deleted and pinned, or would be."""
    if as_json:
        print_json(
            kind="prune", path=place, dry_run=dry_run, retention=retention.as_json(), bytes=_bytes(going),
            steps=[{"step": d.step, "kept": d.kept, "why": d.why} for d in decisions],
            deleted=[{"what": g.what, "step": g.step, "bytes": g.bytes} for g in going], litter=list(litter),
            pinned=marks.pin, unpinned=marks.unpin,
        )  # fmt: skip
        return
    if marks:
        report_marks(place, marks, dry_run, as_json)
    verb = "would be deleted" if dry_run else "deleted"
    rest = f", and {counted(len(litter), 'rest')} of killed saves" if litter else ""
    steps = sum(one.what == STEP for one in going)
    exports = len(going) - steps
    more = f" and {counted(exports, 'export')}" if exports else ""
    print(f"{verb}: {counted(steps, 'step')}{more}, {file_size(_bytes(going))}{rest}")


def report_marks(place: str, marks: Marks, dry_run: bool, as_json: bool) -> None:
    """Print what was pinned, or would be, and what no longer is."""
    if as_json:
        print_json(kind="prune", path=place, dry_run=dry_run, retention=None, bytes=0, steps=[], deleted=[], litter=[],
                   pinned=marks.pin, unpinned=marks.unpin)  # fmt: skip
        return
    for steps, done, foreseen in (
        (marks.pin, "pinned", "would be pinned"),
        (marks.unpin, "no longer pinned", "would no longer be pinned"),
    ):
        if steps:
            print(f"{foreseen if dry_run else done}: {numbers(sorted(set(steps)))}")


def _bytes(going: Sequence[Going]) -> int:
    return sum(one.bytes for one in going)
