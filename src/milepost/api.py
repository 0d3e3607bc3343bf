"""The verbs of the command line, for Python: open, merge, test.

ckpt = milepost.open("checkpoints/my/run")            # a run, a step, a role or a model directory
ckpt.index["model.embed_tokens.weight"].read()        # a torch tensor
milepost.merge("checkpoints/my/run", "my-model", dtype="bf16", lora="merge")
milepost.test("checkpoints/my/run", "my-model").ok

`MergeCall` and `TestCall` say what a call may set; the command line makes its options of the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from milepost.checkpoint.locate import Located, locate
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.parts import locate_part
from milepost.errors import CallError, DamagedError
from milepost.index import TensorIndex
from milepost.jobs.compare import CompareOptions, LogitsReport, Report, compare
from milepost.jobs.merge import MergeOptions, MergeReport, planned
from milepost.jobs.merge import merge as merge_model
from milepost.jobs.prepare import HuggingFaceModel, ModelOptions, open_reference, prepare, prepare_to_compare
from milepost.layouts import open_directory
from milepost.layouts.huggingface import find_companions, read_config
from milepost.settings import BACKEND, ROLE, keywords, made, setting

if TYPE_CHECKING:
    from milepost.transfer.execute import Progress

__all__ = ["Checkpoint", "MergeCall", "ModelOptions", "TestCall", "merge", "open", "test"]

AnyPath = str | PathLike[str]
Call = TypeVar("Call", bound="_Call")


@dataclass(frozen=True)
class _Call(ModelOptions):
    """What every call may be told: what is meant inside a directory, and how it is to be read."""

    backend: str = setting("auto", BACKEND)
    role: str | None = setting(None, ROLE)

    def of_part(self, part: str | None) -> Self:
        """The same of one part of a state dict."""
        return replace(self, part=part) if part else self


@dataclass(frozen=True)
class MergeCall(_Call, MergeOptions):
    """What a merge may be told."""

    check: bool = setting(False, "First check every byte against its checksum.")
    hf_upload_path: str | None = setting(None, "Then upload it to the Hub.", metavar="REPO")
    private: bool = setting(False, "Upload into a private repository only.")
    dry_run: bool = setting(False, "Say what would be written; write nothing.")

    def check_upload(self) -> None:
        """Raise CallError for a repository that cannot be, before any work is done for it."""
        if self.hf_upload_path is not None:
            from milepost.jobs.upload import check_repository_name  # noqa: PLC0415  most merges upload nothing

            check_repository_name(self.hf_upload_path)
        elif self.private:
            raise CallError("--private says how to upload; give the repository with --hf_upload_path")


@dataclass(frozen=True)
class TestCall(_Call, CompareOptions):
    """What a comparison may be told."""

    logits: bool = setting(False, "Also build both models and compare their logits (needs transformers).")

    __test__ = False  # pytest collects what is named so


@dataclass(frozen=True)
class Checkpoint:
    """One role of one checkpoint, opened: nothing is read yet but headers."""

    located: Located
    index: TensorIndex

    @property
    def directory(self) -> Path:
        """The role's directory."""
        return self.located.directory

    @property
    def layout(self) -> str:
        """Name of its layout: "fsdp", "huggingface"."""
        return self.index.layout

    @property
    def role(self) -> str:
        """ "actor", "critic"; "" for a model directory that belongs to no step."""
        return self.located.role

    @property
    def step(self) -> int | None:
        """The step's number, or None where the directory belongs to none."""
        return self.located.step

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json; NotFoundError where the checkpoint has none."""
        return read_config(find_companions(self.directory) or self.directory)


def open(path: AnyPath, *, role: str | None = None, backend: str = "auto") -> Checkpoint:
    """Open a checkpoint: a role directory, a step (its actor, or `role`), a run (its newest good step), or a model."""
    located = locate(Path(path), role=role, backend=backend)
    return Checkpoint(located, open_directory(located.directory, located.layout.name))


@keywords(MergeCall)
def merge(
    path: AnyPath,
    target_dir: AnyPath,
    *,
    model: ModelOptions | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> MergeReport:
    """Write a checkpoint as a Hugging Face model directory; see `milepost.jobs.merge` for what it raises.

    model:     settings of the model, as one object; those given by name have the last word
    progress:  called with the number of bytes just moved
    settings:  the fields of `MergeCall`

    Where an upload was asked for and fails, CallError says so and the directory stays.
    """
    call = _call(MergeCall, model, settings)
    call.check_upload()
    located, part = locate_part(Path(path), role=call.role, backend=call.backend)
    call = call.of_part(part)
    prepared = prepare(located.directory, located.layout.name, call)
    if call.dry_run:
        return planned(prepared, Path(target_dir), call)
    if call.check:
        check_bytes(located)
    report = merge_model(prepared, Path(target_dir), call, progress=progress)
    if call.hf_upload_path is None:
        return report
    from milepost.jobs.upload import upload  # noqa: PLC0415

    return replace(report, uploaded_to=upload(Path(target_dir), call.hf_upload_path, private=call.private))


@keywords(TestCall)
def test(
    path: AnyPath,
    hf_dir: AnyPath,
    *,
    model: ModelOptions | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Compare a checkpoint with a Hugging Face model: `.ok`, `.differences`, and `.logits` where they were asked for.

    model:     settings of the model, as one object; those given by name have the last word
    progress:  called with the number of bytes just read of the checkpoint
    settings:  the fields of `TestCall`
    """
    call = _call(TestCall, model, settings)
    located, part = locate_part(Path(path), role=call.role, backend=call.backend)
    call = call.of_part(part)
    ours = prepare_to_compare(located.directory, Path(hf_dir), located.layout.name, call)
    reference = open_reference(Path(hf_dir))
    report = compare(
        ours.comparable(), reference, call, progress=progress, updates=ours.updates, allow_missing=call.allow_missing
    )
    return replace(report, logits=logits_of(report, ours, Path(hf_dir), call)) if call.logits else report


test.__test__ = False  # type: ignore[attr-defined]  # pytest collects what is named so


def bytes_checked(located: Located) -> Path:
    """The directory that `check` checks: the whole step, or a directory that belongs to none."""
    return located.directory.parent if (located.directory.parent / MANIFEST).exists() else located.directory


def check_bytes(located: Located, progress: Progress | None = None) -> None:
    """Check every byte of `bytes_checked` against its checksum. DamagedError has a line for each fault."""
    from milepost.checkpoint.verify import verify  # noqa: PLC0415  most merges check nothing

    verdict = verify(bytes_checked(located), deep=True, progress=progress)
    if not verdict.ok:
        raise DamagedError("\n".join(verdict.problems))


def logits_of(report: Report, model: HuggingFaceModel, reference: Path, call: TestCall) -> LogitsReport | None:
    """The comparison of logits; None where the two do not hold the same tensors, so that one cannot be built."""
    if any(difference.kind in ("missing", "extra", "shape") for difference in report.differences):
        return None
    from milepost.logits import compare_logits  # noqa: PLC0415  it imports torch

    return compare_logits(model, reference, call)


def _call(kind: type[Call], model: ModelOptions | None, settings: dict[str, Any]) -> Call:
    said = {} if model is None else {f.name: getattr(model, f.name) for f in fields(ModelOptions)}
    part = said.pop("part", None)
    return made(kind, said | settings).of_part(part)
