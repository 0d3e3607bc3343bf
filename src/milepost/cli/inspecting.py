"""inspect and verify: what a checkpoint holds, and whether it is whole. Neither imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from milepost.checkpoint import verify as verification
from milepost.checkpoint.locate import Located, locate, roles_of
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.steps import judge, list_steps, read_tracker, scan
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
from milepost.wording import counted, file_size


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

    A run: its steps and whether each is whole. A step: its roles. A role: its tensors; --name '*' lists them all.
    """
    del quiet
    path = one("DIR", "--local_dir", directory, local_dir)
    if path.is_dir() and find_layout(path, backend) is None and scan(path):
        _inspect_run(path, json_)
        return
    located = locate(path, backend=backend)
    step_dir = located.directory.parent
    if not name and path.resolve() == step_dir.resolve():
        _inspect_step(step_dir, backend, json_)
    else:
        _inspect_role(located, name or [], json_)


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
    total = verification.bytes_to_read(path) if deep else 0
    with bytes_progress("verify", total, quiet=quiet or not deep) as progress:
        verdict = verification.verify(path, backend=backend, deep=deep, progress=progress)
    if json_:
        print_json(
            ok=verdict.ok, path=str(path), kind=verdict.kind, files=verdict.files, bytes=verdict.nbytes, deep=deep,
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
    steps = list_steps(path)
    sizes = {}
    for state in steps:
        manifest = read_manifest(state.path) if state.state == "committed" else None
        sizes[state.step] = (manifest.nbytes, manifest.world_size) if manifest else (None, None)
    if as_json:
        print_json(
            kind="run", path=str(path), tracker=read_tracker(path),
            steps=[
                {"step": s.step, "path": str(s.path), "state": s.state, "why": s.why, "bytes": sizes[s.step][0],
                 "world_size": sizes[s.step][1]}
                for s in steps
            ],
        )  # fmt: skip
        return
    tracker = read_tracker(path)
    named = "no step is named by the tracker" if tracker is None else f"the tracker says {tracker}"
    print(f"run {path}: {counted(len(steps), 'step')}, {named}")
    for state in steps:
        nbytes, world_size = sizes[state.step]
        detail = f"{file_size(nbytes)}, world size {world_size}" if nbytes is not None else state.why
        print(f"  {state.step:>8}  {state.state:11} {detail}")


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


def _inspect_role(located: Located, globs: list[str], as_json: bool) -> None:
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
        "committed": (located.directory.parent / MANIFEST).exists(),
    }


def _echo_facts(facts: Mapping[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["dtypes"].items())
    size = f"{facts['parameters']:,} parameters, {file_size(facts['bytes'])}"
    print(f"  weights  {facts['tensors']} tensors ({kinds}), {size}")
    print(f"  moments  {facts['moments']} tensors" if facts["moments"] else "  moments  none")
    for line in facts["unread"]:
        print(f"  not read  {line}")


def _entry_facts(index: TensorIndex, name: str) -> dict[str, Any]:
    entry = index[name]
    return {
        "kind": "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "parts": len(entry.chunks),
        "alias_of": entry.alias_of,
    }
