"""inspect and verify: what a checkpoint holds, and whether it is whole. Neither imports torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from milepost.checkpoint import verify as verification
from milepost.checkpoint.inventory import StepFacts, disk_steps, inventory, retention_of
from milepost.checkpoint.locate import Located, locate, roles_of
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.remote.folder import url_of
from milepost.checkpoint.retention import Decision, Retention, decide
from milepost.checkpoint.steps import judge, read_tracker, scan
from milepost.cli.declared import Option
from milepost.cli.options import (
    Backend,
    Directory,
    Json,
    LocalDir,
    Quiet,
    one,
    print_json,
)
from milepost.console import bytes_progress, note
from milepost.index import OPTIMIZER_PREFIX, TensorIndex
from milepost.layouts import find_layout
from milepost.wording import counted, duration, file_size, printable

REWARD = "critic/score/mean"


def inspect(
    directory: Directory = None,
    local_dir: LocalDir = None,
    backend: Backend = "auto",
    name: Annotated[
        list[str] | None,
        Option("--name", metavar="GLOB", help="List the tensors whose names match.", show_default=False),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a run, a step, or a role's directory holds.

    A run: its steps, whether each is whole, and which stay and why. A step: its roles. A role: its tensors; --name '*'
    lists them all.
    """
    del quiet
    path = one("DIR", "--local_dir", directory, local_dir)
    url = url_of(path)
    if url is not None:
        from milepost.cli import at_url  # noqa: PLC0415  most calls name none

        at_url.inspect(url, backend, name or [], as_json=json_)
        return
    if path.is_dir() and find_layout(path, backend) is None and scan(path):
        _inspect_run(path, json_)
        return
    located = locate(path, backend=backend)
    step_dir = located.directory.parent
    if not name and path.resolve() == step_dir.resolve():
        _inspect_step(step_dir, backend, json_)
    else:
        inspect_role(located, name or [], json_)


def verify(
    directory: Directory = None,
    local_dir: LocalDir = None,
    backend: Backend = "auto",
    deep: Annotated[bool, Option("--deep", help="Read every byte and check it against its checksum.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is whole.

    Files, sizes, headers, and that the parts of every tensor tile it exactly; --deep reads every byte.

    Takes a run (every step of it), a step, a role's directory or a model. Exit status 1 where anything is wrong.
    """
    path = one("DIR", "--local_dir", directory, local_dir)
    url = url_of(path)
    if url is not None:
        from milepost.cli import at_url  # noqa: PLC0415  most calls name none

        at_url.verify(url, deep=deep, as_json=json_, quiet=quiet)
        return
    total = verification.bytes_to_read(path) if deep else 0
    with bytes_progress("verify", total, quiet=quiet or not deep) as progress:
        verdict = verification.verify(path, backend=backend, deep=deep, progress=progress)
    say_verdict(verdict, str(path), deep, json_)


def say_verdict(verdict: verification.Verdict, path: str, deep: bool, as_json: bool) -> None:
    """Print what was found; exit status 1 where it is not good."""
    if as_json:
        print_json(
            ok=verdict.ok, path=path, kind=verdict.kind, files=verdict.files, bytes=verdict.nbytes, deep=deep,
            problems=list(verdict.problems), notes=list(verdict.notes),
        )  # fmt: skip
    else:
        for problem in verdict.problems:
            print(problem)
        for text in verdict.notes:
            note(text)
        how = "sizes, headers and every byte" if deep else "sizes and headers; --deep reads every byte"
        state = "good" if verdict.ok else f"not good, {counted(len(verdict.problems), 'problem')}"
        print(f"{state}: {counted(verdict.files, 'file')}, {file_size(verdict.nbytes)} ({how})")
    if not verdict.ok:
        raise SystemExit(1)


def _inspect_run(path: Path, as_json: bool) -> None:
    facts = inventory(path)
    retention = retention_of(path)
    steps = disk_steps(path, whole={step.step: step.good for step in facts})
    decisions = decide(steps, None if retention is None else retention.policy)
    say_run(str(path), facts, decisions, retention, read_tracker(path), as_json)


def say_run(
    path: str,
    facts: Sequence[StepFacts],
    decisions: Sequence[Decision],
    retention: Retention | None,
    tracker: int | None,
    as_json: bool,
) -> None:
    """Print the steps of a run, and which stay."""
    now = time.time()
    if as_json:
        print_json(
            kind="run", path=path, tracker=tracker, retention=None if retention is None else retention.as_json(),
            steps=[
                {**asdict(s), "path": f"{path}/{s.folder}", "kept": d.kept, "kept_why": d.why,
                 "age": None if s.created is None else now - s.created}
                for s, d in zip(facts, decisions, strict=True)
            ],
        )  # fmt: skip
        return
    named = "no step is named by the tracker" if tracker is None else f"the tracker says {tracker}"
    size = file_size(sum(step.bytes for step in facts))
    print(f"run {path}: {counted(len(facts), 'step')}, {size}, {named}")
    print(f"keeps {'all steps, as far as is known here' if retention is None else retention}")
    metric = _shown_metric(facts, retention)
    rows = [("step", "state", "size", "age", "engine", "ranks", metric or "", "kept")]
    for step, decision in zip(facts, decisions, strict=True):
        rows.append(
            (
                str(step.step), step.state, file_size(step.bytes),
                "" if step.created is None else duration(max(0.0, now - step.created)),
                "+".join(dict.fromkeys(step.layouts)), "" if step.world_size is None else str(step.world_size),
                f"{step.metrics[metric]:.4g}" if metric in step.metrics else "",
                f"{'yes' if decision.kept else 'no'}, {decision.why}",
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row, why in zip(rows, ["", *(step.why for step in facts)], strict=True):
        cells = [cell.rjust(width) if column != 1 else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=False)) if width]  # fmt: skip
        print(printable("  ".join(["", *cells, row[-1]]).rstrip()))
        if why:
            print(printable(f"      {why}"))


def _shown_metric(facts: Sequence[StepFacts], retention: Retention | None) -> str:
    """The one metric that a line has room for: what retention goes by, or the reward; empty where no step has it."""
    wanted = (retention.keep_best if retention is not None else None) or REWARD
    return wanted if any(wanted in step.metrics for step in facts) else ""


def _inspect_step(step_dir: Path, backend: str, as_json: bool) -> None:
    state = judge(step_dir, named=True)
    facts = {}
    for role in roles_of(step_dir, backend):
        located = locate(step_dir / role, backend=backend)
        facts[role] = _facts(located, located.layout.open(located.directory))
    if as_json:
        print_json(kind="step", path=str(step_dir), step=state.step, state=state.state, why=state.why, roles=facts)
        return
    print(f"step {step_dir}: {state.state}{f', {state.why}' if state.why else ''}")
    for role, of_role in facts.items():
        print(f"{role}: layout {of_role['layout']}, world size {of_role['world_size']}")
        _echo_facts(of_role)


def inspect_role(located: Located, globs: list[str], as_json: bool) -> None:
    """Print what a role's directory holds, and the tensors that the globs match."""
    index = located.layout.open(located.directory)
    chosen = {name: entry for name, entry in index.items() if any(fnmatchcase(name, glob) for glob in globs)}
    facts = _facts(located, index)
    if as_json:
        print_json(**facts, listed={name: _entry_facts(index, name) for name in chosen})
        return
    step = "" if located.step is None else f", step {located.step}"
    print(f"{located.role or 'model'} {located.directory}: layout {index.layout}, world size {index.world_size}{step}")
    _echo_facts(facts)
    for name, entry in chosen.items():
        alias = f" = {entry.alias_of}" if entry.alias_of else ""
        kind = "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight"
        print(f"  {kind}  {name}  {entry.dtype} {list(entry.shape)} in {len(entry.chunks)} parts{alias}")


def _facts(located: Located, index: TensorIndex) -> dict[str, Any]:
    weights = index.weights()
    return {
        "kind": "role",
        "path": str(located.directory),
        "layout": index.layout,
        "role": located.role,
        "step": located.step,
        "world_size": index.world_size,
        "tensors": len(weights),
        "parameters": sum(e.numel for e in weights.entries.values() if e.alias_of is None),
        "bytes": weights.nbytes,
        "dtypes": dict(Counter(entry.dtype for entry in weights.values())),
        "moments": len(index) - len(weights),
        "unread": list(index.unread),
        "skipped": list(index.skipped),
        "committed": (located.directory.parent / MANIFEST).exists(),
    }


def _echo_facts(facts: Mapping[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["dtypes"].items())
    size = f"{facts['parameters']:,} parameters, {file_size(facts['bytes'])}"
    print(f"  weights  {facts['tensors']} tensors ({kinds}), {size}")
    print(f"  moments  {facts['moments']} tensors" if facts["moments"] else "  moments  none")
    for line in facts["unread"]:
        print(f"  not read  {line}")
    for line in facts["skipped"]:
        print(f"  skipped  {line}")


def _entry_facts(index: TensorIndex, name: str) -> dict[str, Any]:
    entry = index[name]
    return {
        "kind": "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "parts": len(entry.chunks),
        "alias_of": entry.alias_of,
    }
