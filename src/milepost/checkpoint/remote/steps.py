"""The steps at a URL: which there are, which are whole, and how one is removed.

A step counts once its manifest is there, since that is written last; it is whole if every file that the manifest names
is there with its size. What is on its way to that, or from it, has a mark: see `UPLOADING`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from milepost.checkpoint.files import set_aside_name
from milepost.checkpoint.inventory import PIN, StepFacts, is_export_path, made_facts, metrics_of, without_export
from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest, parse_manifest, read_manifest
from milepost.checkpoint.remote.folder import PART, Remote, Stored, side_by_side
from milepost.checkpoint.retention import Decision, Retention, decide, exports_to_drop
from milepost.checkpoint.steps import STATE_FILE, TRACKER, step_number
from milepost.errors import CheckpointError, MilepostError, NotFoundError
from milepost.transfer.execute import Progress

UPLOADING = "uploading"
"""An object of this name lies in a step until its manifest does, and again before its manifest is removed: what has it
and no manifest is no step, and left by a kill."""
SETTING_ASIDE = "setting_aside"
"""An object of this name lies in a step while it is copied aside, and says into which folder: after a kill the copying
goes on there. Until its end the step is what it was."""
_MARKS = (UPLOADING, SETTING_ASIDE)
_ASIDE = re.compile(r"set_aside_[\w-]+")


class RemoteStep:
    """A step at a URL, as `milepost.checkpoint.retention.Step`: each property is read when it is first asked for.

    folder: the name of its folder
    """

    def __init__(self, remote: Remote, folder: str, step: int) -> None:
        self.remote = remote
        self.folder = folder
        self.step = step

    @cached_property
    def objects(self) -> Mapping[str, Stored]:
        """Its objects, as the server lists them."""
        return self.remote.objects(self.folder)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Their bytes."""
        return {name: stored.size for name, stored in self.objects.items()}

    @cached_property
    def own(self) -> bool:
        """Whether milepost committed it."""
        return MANIFEST in self.sizes

    @cached_property
    def unfinished(self) -> bool:
        """Whether milepost began it, and did not come to its end."""
        return UPLOADING in self.sizes and not self.own

    @cached_property
    def manifest(self) -> Manifest:
        """What it says of itself. DamagedError where it cannot be read."""
        path = f"{self.folder}/{MANIFEST}"
        return parse_manifest(self.remote.read(path), f"{self.remote}/{path}")

    @cached_property
    def why(self) -> str:
        """What keeps it from being whole, in words; empty where nothing does."""
        if not self.own:
            return f"{self.remote}/{self.folder} has no {MANIFEST}: it was not uploaded to its end"
        try:
            manifest = self.manifest
        except CheckpointError as error:
            return str(error)
        if manifest.step != self.step:
            return f"{self.remote}/{self.folder}/{MANIFEST} is of step {manifest.step}"
        for record in manifest.files:
            size = self.sizes.get(record.path)
            if size is None:  # a listing may lag behind
                size = self.remote.size(f"{self.folder}/{record.path}")
            if size is None:
                return f"{self.remote}/{self.folder}/{record.path} is missing"
            if size != record.size:
                return f"{self.remote}/{self.folder}/{record.path} has {size} bytes instead of {record.size}"
        return ""

    @property
    def whole(self) -> bool:
        """Whether training could go on from it."""
        return not self.why

    @cached_property
    def pinned(self) -> bool:
        """Whether it is to stay."""
        return PIN in self.sizes

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved; empty where that cannot be read."""
        try:
            return metrics_of(json.loads(self.remote.read(f"{self.folder}/{STATE_FILE}")))
        except (MilepostError, ValueError, RecursionError):
            return {}

    @cached_property
    def has_export(self) -> bool:
        """Whether weights in Hugging Face's form lie in it."""
        return any(is_export_path(path) and path.endswith(".safetensors") for path in self.sizes)

    @property
    def state(self) -> str:
        """As `milepost.checkpoint.steps` has it of a folder: committed, incomplete or damaged."""
        if self.whole:
            return "committed"
        return "damaged" if self.own and not self.why.endswith("is missing") else "incomplete"

    def facts(self) -> StepFacts:
        """What it is and holds, for people."""
        held: Manifest | Sequence[int] = tuple(self.sizes.values())
        metrics: Mapping[str, float] = {}
        if self.own:
            with contextlib.suppress(CheckpointError):
                held, metrics = self.manifest, self.metrics
        return made_facts(self.folder, self.step, self.state, self.why, held, pinned=self.pinned, metrics=metrics)


def same_step(step_dir: Path, there: RemoteStep) -> bool:
    """Whether what lies there is the very step that lies in a folder, and whole; an export may have gone from one of
    them."""
    if not there.whole:
        return False
    try:
        ours = read_manifest(step_dir)
    except CheckpointError:  # another program's; or retention has just taken it
        return False
    return (ours.created, ours.run_id) == (there.manifest.created, there.manifest.run_id)


def remote_steps(remote: Remote) -> tuple[RemoteStep, ...]:
    """Every folder at a URL that is named as a step, in numeric order; nothing is known of what is in it."""
    found = [(step_number(Path(name)), name) for name in remote.folders()]
    return tuple(RemoteStep(remote, name, step) for step, name in sorted((s, n) for s, n in found if s is not None))


def newest_whole(
    remote: Remote,
    roles: Collection[str] = (),
    *,
    run_id: str = "",
    without: Collection[int] = (),
    up_to: int | None = None,
) -> tuple[RemoteStep | None, tuple[RemoteStep, ...]]:
    """The newest step at a URL that is whole, and newer ones that are not, which say why.

    roles:    roles that must be in it
    run_id:   where given, only steps of this run count
    without:  steps to pass over
    up_to:    steps with a higher number belong to another history
    """
    passed_over = []
    for step in reversed(remote_steps(remote)):
        if step.step in without or (up_to is not None and step.step > up_to):
            continue
        if not step.whole:
            passed_over.append(step)
        elif (not run_id or step.manifest.run_id == run_id) and not set(roles) - set(step.manifest.roles):
            return step, tuple(passed_over)
    return None, tuple(passed_over)


def tracker_of(remote: Remote) -> int | None:
    """The step that the tracker at a URL names; None where there is none."""
    try:
        return int(remote.read(TRACKER))
    except (NotFoundError, ValueError):
        return None


def verify_remote(step: RemoteStep, *, deep: bool, progress: Progress) -> list[str]:
    """What is wrong with a step at a URL, one line each; with `deep` every byte is streamed through its checksum."""
    if step.why:
        return [step.why]
    problems: list[str] = []
    below = step.remote.below(step.folder)

    def check(record: FileRecord) -> None:
        digest = xxhash.xxh3_128()
        for start in range(0, record.size, PART):
            digest.update(below.read(record.path, start, min(start + PART, record.size)))
            progress(min(PART, record.size - start))
        if digest.hexdigest() != record.xxh3_128:
            problems.append(f"{below}/{record.path} has other bytes than were written: its checksum differs")

    if deep:
        side_by_side(step.manifest.files, check)
    return sorted(problems)


def remove_step(remote: Remote, folder: str) -> None:
    """Remove a step. It is marked, its manifest goes, then its files, and the mark last: at any moment it is whole or
    can be told from a step of another program, so that what a kill leaves of it is neither resumed from nor stays."""
    remote.put_bytes(b"", f"{folder}/{UPLOADING}")
    remote.remove([f"{folder}/{MANIFEST}"])
    names = [f"{folder}/{name}" for name in remote.sizes(folder) if name != UPLOADING]
    side_by_side(names, lambda name: remote.remove([name]))
    remote.remove_folder(folder)


def remove_unfinished(steps: Iterable[RemoteStep]) -> None:
    """Remove what a kill left of uploads and removals."""
    for step in steps:
        if step.unfinished:
            remove_step(step.remote, step.folder)


def remove_export(step: RemoteStep) -> None:
    """Remove a step's weights in Hugging Face's form; its manifest, written anew, ceases to name them first."""
    manifest = step.manifest
    without = without_export(manifest)
    if without != manifest:
        step.remote.put_bytes(without.to_json().encode(), f"{step.folder}/{MANIFEST}")
    step.remote.remove(f"{step.folder}/{path}" for path in step.sizes if is_export_path(path))


def set_aside(remote: Remote, steps: Iterable[RemoteStep]) -> str:
    """Move steps of a history that a run does not go on with into a folder `set_aside_*`, whose name is returned: the
    one that an earlier move, which a kill ended, had chosen. What a kill left of a step is removed."""
    everything = tuple(steps)
    moving = [step for step in everything if not step.unfinished]
    begun = (_aside_of(step) for step in moving if SETTING_ASIDE in step.sizes)
    into = next((name for name in begun if name), None) or set_aside_name()
    remove_unfinished(everything)
    for step in moving:
        remote.put_bytes(into.encode(), f"{step.folder}/{SETTING_ASIDE}")
    for step in moving:
        names = [f"{step.folder}/{name}" for name in step.sizes if name not in (MANIFEST, *_MARKS)]
        side_by_side(names, lambda name: remote.duplicate(name, f"{into}/{name}"))
        if step.own:
            remote.duplicate(f"{step.folder}/{MANIFEST}", f"{into}/{step.folder}/{MANIFEST}")
        remove_step(remote, step.folder)
    return into


def _aside_of(step: RemoteStep) -> str | None:
    """Where a kill ended the copying of a step to."""
    name = step.remote.read(f"{step.folder}/{SETTING_ASIDE}").decode(errors="replace")
    return name if _ASIDE.fullmatch(name) else None


@dataclass(frozen=True)
class RemotePlan:
    """What retention says of the steps at a URL: every decision, the steps that go, and those whose exports go."""

    decisions: tuple[Decision, ...]
    steps: tuple[RemoteStep, ...]
    exports: tuple[RemoteStep, ...]

    def carry_out(self) -> None:
        """Remove what goes."""
        for step in self.steps:
            remove_step(step.remote, step.folder)
        for step in self.exports:
            remove_export(step)


def plan_remote(steps: Collection[RemoteStep], retention: Retention) -> RemotePlan:
    """Decide from what the URL says; nothing is changed."""
    decisions = decide(steps, retention.policy)
    gone = {decision.step for decision in decisions if not decision.kept}
    staying = [step for step in steps if step.step not in gone]
    dropped = set(exports_to_drop(staying, retention.keep_exports))
    return RemotePlan(
        decisions,
        tuple(step for step in steps if step.own and step.step in gone),
        tuple(step for step in staying if step.step in dropped and "model" in step.manifest.contents),
    )
