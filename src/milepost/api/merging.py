"""merge: any checkpoint to a Hugging Face model directory, checked before and uploaded after where that is wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.api.calls import AnyPath, Call, call_of
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.parts import locate_part
from milepost.errors import CallError, DamagedError
from milepost.jobs.merge import MergeOptions, MergeReport, planned
from milepost.jobs.merge import merge as merge_model
from milepost.jobs.prepare import ModelOptions, prepare
from milepost.settings import keywords, setting

if TYPE_CHECKING:
    from milepost.checkpoint.locate import Located
    from milepost.transfer.execute import Progress


@dataclass(frozen=True)
class MergeCall(Call, MergeOptions):
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
    call = call_of(MergeCall, model, settings)
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


def bytes_checked(located: Located) -> Path:
    """The directory that `check` checks: the whole step, or a directory that belongs to none."""
    return located.directory.parent if (located.directory.parent / MANIFEST).exists() else located.directory


def check_bytes(located: Located, progress: Progress | None = None) -> None:
    """Check every byte of `bytes_checked` against its checksum. DamagedError has a line for each fault."""
    from milepost.checkpoint.verify import verify  # noqa: PLC0415  most merges check nothing

    verdict = verify(bytes_checked(located), deep=True, progress=progress)
    if not verdict.ok:
        raise DamagedError("\n".join(verdict.problems))
