"""What lies in the steps of a run: as retention asks for it, and as a list for people. No tensor is opened."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.manifest import HF_MODEL, MANIFEST, FileRecord, Manifest, read_manifest
from milepost.checkpoint.retention import Retention
from milepost.checkpoint.steps import STATE_FILE, StepDir, StepState, judge, scan
from milepost.errors import CheckpointError
from milepost.layouts.huggingface import CHECKSUMS, SUBDIRECTORY

PIN = "pinned"
"""An empty file of this name in a step's folder keeps the step. It was not saved with it: no manifest names it."""
CLOSELY = 10  # newest steps that a list of all looks into closely
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class DiskStep:
    """A step on disk, as `milepost.checkpoint.retention.Step`: each property is read when it is first asked for.

    whole: that it is, where it is known already
    """

    def __init__(self, place: StepDir, *, whole: bool | None = None) -> None:
        self.step = place.step
        self.path = place.path
        self._known_whole = whole

    @cached_property
    def own(self) -> bool:
        """Whether milepost wrote it."""
        return (self.path / MANIFEST).exists()

    @cached_property
    def whole(self) -> bool:
        """Whether training could go on from it."""
        return judge(self.path).good if self._known_whole is None else self._known_whole

    @cached_property
    def pinned(self) -> bool:
        """Whether it is to stay."""
        return (self.path / PIN).exists()

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved; empty where that cannot be read."""
        return read_metrics(self.path)

    @cached_property
    def has_export(self) -> bool:
        """Whether weights in Hugging Face's form lie beside those of a role."""
        return any(True for role in _roles(self.path) for _ in export_files(self.path / role))


def disk_steps(root: Path, *, whole: Mapping[int, bool] | None = None) -> tuple[DiskStep, ...]:
    """The steps of a run, in numeric order. `whole`: of which it is known whether they are."""
    known = whole or {}
    return tuple(DiskStep(place, whole=known.get(place.step)) for place in scan(root))


def export_files(role_dir: Path) -> list[Path]:
    """The weights in Hugging Face's form beside a role's own, and the small files that speak of them; config and
    tokenizer, which a later merge needs, are none of them."""
    names = sorted(path for path in (role_dir / SUBDIRECTORY).glob("*") if is_export(path.name))
    return [path for path in names if path.is_file()] if any(path.suffix == ".safetensors" for path in names) else []


def is_export(name: str) -> bool:
    """Whether a file of that name in `huggingface/` goes with the weights."""
    return name.endswith(_WEIGHTS) or name == CHECKSUMS


def export_records(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Those of a step's files that `export_files` means."""
    return tuple(record for record in manifest.files if is_export_path(record.path))


def without_export(manifest: Manifest) -> Manifest:
    """The manifest of the same step once its weights in Hugging Face's form are gone."""
    kept = tuple(record for record in manifest.files if not is_export_path(record.path))
    return replace(manifest, files=kept, contents=tuple(name for name in manifest.contents if name != HF_MODEL))


def is_export_path(path: str) -> bool:
    """Whether a file of a step, by its path in it, goes with the weights in Hugging Face's form."""
    _, _, inside = path.partition("/")
    folder, _, name = inside.rpartition("/")
    return folder == SUBDIRECTORY and is_export(name)


def metrics_of(content: Any) -> Mapping[str, float]:
    """The finite numbers among the metrics of a parsed trainer_state.json."""
    found = content.get("metrics") if isinstance(content, dict) else None
    return {
        str(name): float(value)
        for name, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def read_metrics(step_dir: Path) -> Mapping[str, float]:
    """The metrics of a step; empty where there are none, or they cannot be read."""
    try:
        return metrics_of(json.loads((step_dir / STATE_FILE).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


@dataclass(frozen=True)
class StepFacts:
    """One step folder: how it was judged (see `milepost.checkpoint.steps`), and what it holds.

    files, bytes:  as the manifest has them; without one, as the disk has them
    export_bytes:  those of the bytes that are weights in Hugging Face's form
    created:       unix seconds, None without a manifest; `world_size`, `roles` and `layouts` (of each role) likewise
    """

    folder: str
    step: int
    state: str
    why: str
    files: int
    bytes: int
    world_size: int | None
    roles: tuple[str, ...]
    created: float | None
    layouts: tuple[str, ...] = ()
    export_bytes: int = 0
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether training can go on from it."""
        return self.state in ("committed", "foreign")


def facts_of(state: StepState, manifest: Manifest | None = None) -> StepFacts:
    """What a step that was judged holds. `manifest`: its own, where it was read already."""
    held: Manifest | Sequence[int]
    metrics: Mapping[str, float] = {}
    try:
        held = manifest or read_manifest(state.path)
        metrics = read_metrics(state.path)
    except CheckpointError:
        held = _sizes_below(state.path)
    pinned = (state.path / PIN).exists()
    return made_facts(state.path.name, state.step, state.state, state.why, held, pinned=pinned, metrics=metrics)


def made_facts(
    folder: str,
    step: int,
    state: str,
    why: str,
    held: Manifest | Sequence[int],
    *,
    pinned: bool,
    metrics: Mapping[str, float],
) -> StepFacts:
    """The facts of a step, wherever it lies. held: its manifest; without one, the sizes of its files."""
    if not isinstance(held, Manifest):
        return StepFacts(folder, step, state, why, len(held), sum(held), None, (), None, pinned=pinned)
    return StepFacts(
        folder=folder,
        step=step,
        state=state,
        why=why,
        files=len(held.files),
        bytes=held.nbytes,
        world_size=held.world_size,
        roles=tuple(held.roles),
        created=held.created,
        layouts=tuple(held.roles.values()),
        export_bytes=sum(record.size for record in export_records(held)),
        pinned=pinned,
        metrics=metrics,
    )


def inventory(root: Path) -> tuple[StepFacts, ...]:
    """Every step of a run, in numeric order. Each costs a look at its files' sizes; of the `CLOSELY` newest, and of so
    many that have no manifest, the small files are read too. No file of weights is opened, but of the latter."""
    found = [place.path for place in scan(root)]
    has_manifest = {path: (path / MANIFEST).exists() for path in found}
    own = [path for path in found if has_manifest[path]]
    foreign = [path for path in found if not has_manifest[path]]
    closely = {*own[-CLOSELY:], *foreign[-CLOSELY:]}
    return tuple(_facts_at(path, path in closely) for path in found)


def _facts_at(path: Path, closely: bool) -> StepFacts:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        manifest = None
    return facts_of(judge(path, closely=closely, manifest=manifest), manifest)


def retention_of(root: Path) -> Retention | None:
    """What the last start of a run said that it keeps, by its diary; None where that says nothing."""
    try:
        lines = (root / EVENTS).read_bytes().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        if b'"retention"' not in line:  # of a long diary next to no line is parsed
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("event") == "resume":
            return Retention.from_json(event.get("retention"))
    return None


def _roles(step_dir: Path) -> list[str]:
    try:
        return list(read_manifest(step_dir).roles)
    except CheckpointError:
        return []


def _sizes_below(directory: Path) -> list[int]:
    sizes = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(folder) / name).stat().st_size)
            except OSError:
                continue  # gone since it was listed, or a link to nothing: it holds no bytes
    return sizes
