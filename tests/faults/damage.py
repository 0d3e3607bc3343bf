"""Files of a step that were altered after they were written: one bit flipped, or cut off."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tiny_engine import Run, disk_is_at, trained

from faults.findings import Finding
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.verify import verify
from milepost.errors import CheckpointError


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def files_of(step: Path) -> list[Path]:
    """Every file of a step."""
    return sorted(path for path in step.rglob("*") if path.is_file())


def damages(base: Path, kind: str, count: int, seed: int) -> Iterator[Finding]:
    """`count` times one file of the newer of two steps is altered. `kind`: "a flipped bit" or "a cut file"."""
    template, root, chance = base / "template", base / "run", random.Random(seed)
    trained(template, 1, 2).manager.close()
    for _ in range(count):
        shutil.copytree(template, root)
        path = chance.choice(files_of(root / "global_step_2"))
        size = path.stat().st_size
        # (The last byte of a manifest is a line's end, which says nothing.)
        at = chance.randrange(size - (path.name == MANIFEST))
        if kind == "a cut file":
            path.write_bytes(path.read_bytes()[:at])
        else:
            flip(path, 8 * at + chance.randrange(8))
        yield Finding(f"{kind}: {path.relative_to(root)}, byte {at}", True, tuple(_looked_at(root, path)))
        shutil.rmtree(root)


def _looked_at(root: Path, path: Path) -> Iterator[str]:
    step = root / "global_step_2"
    if not any(path.name in problem for problem in verify(step, deep=True).problems):
        yield "verify --deep does not find it"
    run = Run(root)
    try:
        run.manager.resume("resume_path", step)
        yield "a start from the step that was named loads it"
    except CheckpointError as error:
        if path.name not in str(error):
            yield f"a start from the step that was named does not say which file it is: {error}"
    run = Run(root)
    if run.manager.resume() != 1 or not run.is_at(1):
        yield "a start does not fall back to the step before"
    elif not any(path.name in skipped.why for skipped in run.manager.report.skipped):
        yield "a start does not say what it passed over"
    if not disk_is_at(root / "global_step_1", 1):
        yield "the step before has changed"
