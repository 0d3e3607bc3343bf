"""test: is a checkpoint the same model as a Hugging Face directory?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.api.calls import AnyPath, Call, call_of
from milepost.checkpoint.parts import locate_part
from milepost.jobs.compare import CompareOptions, LogitsReport, Report, compare
from milepost.jobs.prepare import HuggingFaceModel, ModelOptions, open_reference, prepare_to_compare
from milepost.settings import keywords, setting

if TYPE_CHECKING:
    from milepost.transfer.execute import Progress


@dataclass(frozen=True)
class TestCall(Call, CompareOptions):
    """What a comparison may be told."""

    logits: bool = setting(False, "Also build both models and compare their logits (needs transformers).")

    __test__ = False  # pytest collects what is named so


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
    call = call_of(TestCall, model, settings)
    located, part = locate_part(Path(path), role=call.role, backend=call.backend)
    call = call.of_part(part)
    ours = prepare_to_compare(located.directory, Path(hf_dir), located.layout.name, call)
    reference = open_reference(Path(hf_dir))
    report = compare(
        ours.comparable(), reference, call, progress=progress, updates=ours.updates, allow_missing=call.allow_missing
    )
    return replace(report, logits=logits_of(report, ours, Path(hf_dir), call)) if call.logits else report


test.__test__ = False  # type: ignore[attr-defined]  # pytest collects what is named so


def logits_of(report: Report, model: HuggingFaceModel, reference: Path, call: TestCall) -> LogitsReport | None:
    """The comparison of logits; None where the two do not hold the same tensors, so that one cannot be built."""
    if any(difference.kind in ("missing", "extra", "shape") for difference in report.differences):
        return None
    from milepost.logits import compare_logits  # noqa: PLC0415  it imports torch

    return compare_logits(model, reference, call)
