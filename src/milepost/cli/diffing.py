"""diff: what changed between two checkpoints. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from milepost.cli.declared import Argument, Option
from milepost.cli.options import Backend, Json, Quiet, Role, found, print_json, takes_urls
from milepost.console import bytes_progress, note
from milepost.jobs.diff import ADDED, CHANGED, DTYPE, REMOVED, bytes_to_compare, open_pair
from milepost.jobs.diff import diff as compare
from milepost.units import parse_bytes
from milepost.wording import counted, file_size

_SIGN = {ADDED: "+", REMOVED: "-"}


@takes_urls("first", "second")
def diff(
    first: Annotated[Path, Argument(metavar="A", help="A run, a step, a role's directory or a model.")],
    second: Annotated[Path, Argument(metavar="B", help="Another one, in any layout.")],
    name: Annotated[
        list[str] | None,
        Option("--name", metavar="GLOB", help="Only tensors whose names match.", show_default=False),
    ] = None,
    role: Role = None,
    backend: Backend = "auto",
    memory_limit: Annotated[str, Option("--memory_limit", help="Bound on the memory for tensor data.")] = "1GiB",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say how the tensors of two checkpoints differ.

    For each the norm of the difference, that by the norm of A's tensor, and the largest difference of one element; what
    is new, gone, or of another shape. Exit status 0 where nothing differs, 1 where something does, as diff(1).

    Example: milepost diff run/global_step_100 run/global_step_200 --name '*mlp*'
    """
    places, parts = [], []
    for path in (first, second):
        located, part = found(path, role, backend, quiet)
        places.append((located.directory, located.layout.name))
        parts.append(part)
    a, b, notes = open_pair(places[0], places[1], (parts[0], parts[1]))
    with bytes_progress("diff", bytes_to_compare(a, b, name or ()), quiet=quiet) as progress:
        between = compare(
            a, b, patterns=name or (), memory_limit=parse_bytes(memory_limit), progress=progress, notes=notes
        )
    if json_:
        print_json(
            kind="diff", same=between.same, a=str(places[0][0]), b=str(places[1][0]), tensors=between.tensors,
            bytes=between.nbytes, norm=_finite(between.norm), relative=_finite(between.relative), notes=list(notes),
            changes=[
                {"name": c.name, "kind": c.kind, "detail": c.detail, "elements": c.elements, "norm": _finite(c.norm),
                 "relative": _finite(c.relative), "max_abs": _finite(c.max_abs)}
                for c in between.changes
            ],
        )  # fmt: skip
    else:
        for text in notes:
            note(text, quiet=quiet)
        for c in between.changes:
            sizes = f"; |b-a| {c.norm:.4g}, relative {c.relative:.3g}, largest {c.max_abs:.3g}" if c.elements else ""
            kind = f"{c.kind}: " if c.kind not in _SIGN and c.kind != CHANGED else ""
            print(f"{_SIGN.get(c.kind, '~')} {c.name}  {kind}{c.detail}{sizes}")
        compared = f"{counted(between.tensors, 'tensor')}, {file_size(between.nbytes)}"
        if between.same:
            print(f"no difference: {compared}")
        else:
            differ = sum(c.kind in (CHANGED, DTYPE) for c in between.changes)
            other = len(between.changes) - differ
            print(
                f"{differ} of {compared} changed, |b-a| {between.norm:.4g}, relative {between.relative:.3g}"
                + (f"; {other} only in one of them or of another shape" if other else "")
            )
    if not between.same:
        raise SystemExit(1)


def _finite(value: float) -> Any:
    return value if math.isfinite(value) else None
