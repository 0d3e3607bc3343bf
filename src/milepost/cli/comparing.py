"""test: is a checkpoint the same model as a reference? Imports torch only for --logits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from milepost.api.comparing import TestCall, logits_of
from milepost.cli.declared import Argument, Option
from milepost.cli.options import (
    Directory,
    LocalDir,
    found,
    of_call,
    one,
    print_json,
    takes_urls,
)
from milepost.console import bytes_progress, note
from milepost.jobs.compare import compare
from milepost.jobs.prepare import open_reference, prepare_to_compare
from milepost.wording import counted, file_size


@takes_urls("directory", "local_dir", "reference", "test_hf_dir")
@of_call(TestCall)
def test(
    directory: Directory = None,
    reference: Annotated[Path | None, Argument(metavar="HF_DIR", help="The model to compare with.")] = None,
    local_dir: LocalDir = None,
    test_hf_dir: Annotated[Path | None, Option("--test_hf_dir", help="The same as HF_DIR.", show_default=False)] = None,
    *,
    call: TestCall,
    json_: bool,
    quiet: bool,
) -> None:
    """Compare a checkpoint with a Hugging Face model.

    Tensor by tensor, both sides streamed; without --logits no model is built. Every tensor that is missing, extra, or
    differs in shape, type or value is named. Exit status 1 where they differ.

    Example: milepost test checkpoints/project/run my-model
    """
    source = one("DIR", "--local_dir", directory, local_dir)
    other = one("HF_DIR", "--test_hf_dir", reference, test_hf_dir)
    located, part = found(source, call.role, call.backend, quiet)
    call = call.of_part(part)
    theirs = open_reference(other)
    model = prepare_to_compare(located.directory, other, located.layout.name, call)
    with bytes_progress("test", model.index.nbytes, quiet=quiet) as progress:
        report = compare(
            model.comparable(), theirs, call, progress=progress, updates=model.updates, allow_missing=call.allow_missing
        )
    answers = None
    if call.logits:
        answers = logits_of(report, model, other, call)
        if answers is None:
            note("logits not compared: the two do not hold the same tensors")
    ok = report.ok and (answers is None or answers.ok)
    if json_:
        print_json(
            ok=ok, logits=asdict(answers) if answers else None, tensors=report.tensors, bytes=report.nbytes,
            differences=[
                {"name": d.name, "kind": d.kind, "detail": d.detail, "elements": d.elements, "max_abs": d.max_abs,
                 "max_rel": d.max_rel}
                for d in report.differences
            ],
        )  # fmt: skip
    else:
        for d in report.differences:
            largest = f"; largest difference {d.max_abs:.3g}, relative {d.max_rel:.3g}" if d.elements else ""
            print(f"{d.kind:8}{d.name}: {d.detail}{largest}")
        if report.ok:
            print(f"equal: {report.tensors} tensors, {file_size(report.nbytes)}")
        else:
            differ = "differs" if len(report.differences) == 1 else "differ"
            print(f"not equal: {counted(len(report.differences), 'tensor')} {differ}, of {report.tensors}")
        if answers is not None:
            largest = f"; largest difference {answers.max_abs:.3g}, relative {answers.max_rel:.3g}"
            verdict = "equal" if answers.ok else f"{answers.elements} of {answers.numel} differ"
            print(f"logits {verdict}{'' if answers.max_abs == 0 else largest}")
    if not ok:
        raise SystemExit(1)
