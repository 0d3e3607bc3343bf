"""test: is a checkpoint the same model as a reference? Imports torch only for --logits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.logits import LogitsReport, compare_logits
from milepost.cli.options import (
    Backend,
    ConfigFrom,
    CpuInit,
    Directory,
    Dtype,
    Json,
    LocalDir,
    Lora,
    LoraAlpha,
    Memory,
    Quiet,
    Role,
    Tie,
    TrustRemoteCode,
    ValueModel,
    found,
    one,
    print_json,
    say_unused,
)
from milepost.console import bytes_progress, note
from milepost.jobs import compare as comparison
from milepost.jobs import merge as merging
from milepost.jobs.prepare import HuggingFaceModel, ModelOptions, open_reference, prepare_to_compare
from milepost.units import parse_bytes
from milepost.wording import counted, file_size


def test(
    directory: Directory = None,
    reference: Annotated[Path | None, typer.Argument(metavar="HF_DIR", help="The model to compare with.")] = None,
    local_dir: LocalDir = None,
    test_hf_dir: Annotated[
        Path | None, typer.Option("--test_hf_dir", help="The same as HF_DIR.", show_default=False)
    ] = None,
    backend: Backend = "auto",
    role: Role = None,
    dtype: Dtype = "keep",
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance; 0 with --rtol 0: bit for bit.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", help="Tolerance relative to the reference.")] = 0.0,
    logits: Annotated[
        bool, typer.Option("--logits", help="Also build both models and compare their logits (needs transformers).")
    ] = False,
    is_value_model: ValueModel = False,
    tie_word_embedding: Tie = False,
    lora: Lora = "keep",
    lora_alpha: LoraAlpha = None,
    memory_limit: Memory = "1GiB",
    json_: Json = False,
    quiet: Quiet = False,
    hf_model_path: ConfigFrom = None,
    trust_remote_code: TrustRemoteCode = False,
    use_cpu_initialization: CpuInit = False,
) -> None:
    """Compare a checkpoint with a Hugging Face model.

    Tensor by tensor, both sides streamed; without --logits no model is built. Every tensor that is missing, extra, or
    differs in shape, type or value is named. Exit status 1 where they differ.

    Example: milepost test checkpoints/project/run my-model
    """
    say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = one("DIR", "--local_dir", directory, local_dir)
    other = one("HF_DIR", "--test_hf_dir", reference, test_hf_dir)
    located, part = found(source, role, backend, quiet)
    theirs = open_reference(other)
    options = ModelOptions(
        hf_model_path, is_value_model, tie_word_embedding, part=part, lora=lora, lora_alpha=lora_alpha
    )
    model = prepare_to_compare(located.directory, other, located.layout.name, options)
    with bytes_progress("test", model.index.nbytes, quiet=quiet) as progress:
        report = comparison.compare(
            model.comparable(), theirs, dtype=dtype, atol=atol, rtol=rtol,
            memory_limit=parse_bytes(memory_limit), progress=progress, updates=model.updates,
        )  # fmt: skip
    answers = _compare_logits(report, model, other, dtype, atol, rtol) if logits else None
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
            typer.echo(f"{d.kind:8}{d.name}: {d.detail}{largest}")
        if report.ok:
            typer.echo(f"equal: {report.tensors} tensors, {file_size(report.nbytes)}")
        else:
            differ = "differs" if len(report.differences) == 1 else "differ"
            typer.echo(f"not equal: {counted(len(report.differences), 'tensor')} {differ}, of {report.tensors}")
        if answers is not None:
            largest = f"; largest difference {answers.max_abs:.3g}, relative {answers.max_rel:.3g}"
            verdict = "equal" if answers.ok else f"{answers.elements} of {answers.numel} differ"
            typer.echo(f"logits {verdict}{'' if answers.max_abs == 0 else largest}")
    if not ok:
        raise typer.Exit(1)


def _compare_logits(
    report: comparison.Report, model: HuggingFaceModel, reference: Path, dtype: str, atol: float, rtol: float
) -> LogitsReport | None:
    if any(difference.kind in ("missing", "extra", "shape") for difference in report.differences):
        note("logits not compared: the two do not hold the same tensors")
        return None
    return compare_logits(model, reference, merging.MergeOptions(dtype), atol=atol, rtol=rtol)
