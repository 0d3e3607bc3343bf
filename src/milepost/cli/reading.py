"""merge, test, inspect, verify: what can be done with a checkpoint on disk. None of them imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.checkpoint import verify as verification
from milepost.checkpoint.locate import Located, locate
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.parts import locate_part
from milepost.checkpoint.steps import list_steps, read_tracker, scan
from milepost.cli.logits import LogitsReport, compare_logits
from milepost.console import bytes_progress, note
from milepost.errors import CallError
from milepost.index import OPTIMIZER_PREFIX, TensorIndex
from milepost.jobs import compare as comparison
from milepost.jobs import merge as merging
from milepost.jobs import upload as uploading
from milepost.jobs.prepare import (
    HuggingFaceModel,
    ModelOptions,
    open_reference,
    prepare,
    prepare_to_compare,
    under_cast,
)
from milepost.jobs.ranks import Team, launch_of
from milepost.layouts import find_layout
from milepost.units import parse_bytes
from milepost.wording import counted, duration, file_size

Directory = Annotated[Path | None, typer.Argument(help="A run, a step, or a role's directory.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="Layout of the checkpoint: auto, fsdp, dcp, huggingface.")]
LocalDir = Annotated[Path | None, typer.Option("--local_dir", help="The same as DIR.", show_default=False)]
Role = Annotated[
    str | None,
    typer.Option(
        "--role",
        help="Which role of a step: actor (default), critic. Or policy, value: of a state dict with both.",
        show_default=False,
    ),
]
Lora = Annotated[
    str, typer.Option("--lora", help="A LoRA adapter: keep (lora_adapter/, base model beside it) or merge into one.")
]
LoraAlpha = Annotated[
    float | None, typer.Option("--lora-alpha", help="The adapter's alpha, where no file says it.", show_default=False)
]
Dtype = Annotated[str, typer.Option("--dtype", help="keep, bf16, fp16 or fp32. Integers keep their type.")]
ConfigFrom = Annotated[
    Path | None,
    typer.Option("--hf_model_path", help="Take config and tokenizer from this model directory.", show_default=False),
]
ValueModel = Annotated[
    bool, typer.Option("--is-value-model", help="A critic: its head becomes a token classification head.")
]
Tie = Annotated[bool, typer.Option("--tie-word-embedding", help="Output and input embeddings are one tensor.")]
Memory = Annotated[str, typer.Option("--memory_limit", help="Bound on the memory for tensor data.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Parallel readers and writers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (key `format` is its version).")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results only.")]

# Options of verl's merger and converter that mean nothing here: its habits keep working, with one note.
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", hidden=True)]
CpuInit = Annotated[bool, typer.Option("--use_cpu_initialization", hidden=True)]

FORMAT = 1


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (merge, test, inspect, verify):
        app.command()(command)


def merge(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run, a step, or a role's directory.")
    ] = None,
    output: Annotated[Path | None, typer.Argument(metavar="OUT", help="Where the model goes.")] = None,
    local_dir: LocalDir = None,
    target_dir: Annotated[
        Path | None, typer.Option("--target_dir", help="The same as OUT.", show_default=False)
    ] = None,
    backend: Backend = "auto",
    role: Role = None,
    dtype: Dtype = "keep",
    hf_model_path: ConfigFrom = None,
    is_value_model: ValueModel = False,
    tie_word_embedding: Tie = False,
    lora: Lora = "keep",
    lora_alpha: LoraAlpha = None,
    max_shard_size: Annotated[str, typer.Option("--max_shard_size", help="Largest output file.")] = "5GB",
    memory_limit: Memory = "1GiB",
    workers: Workers = 2,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option("--allow-missing", metavar="GLOB", help="Tensors that may be missing.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="First check every byte against its checksum.")] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Write checksums of the export, which `verify --deep` checks.")
    ] = False,
    hf_upload_path: Annotated[
        str | None,
        typer.Option("--hf_upload_path", metavar="REPO", help="Then upload it to the Hub.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Upload into a private repository only.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older export, as a whole.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
    use_cpu_initialization: CpuInit = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory.

    Shards of any number of ranks become safetensors, with config, tokenizer and generation config beside them. The
    directory appears whole or not at all. Memory does not grow with the model.

    Under torchrun (torchrun --nproc-per-node 8 -m milepost merge DIR OUT, on one node or several that share a disk)
    the ranks share out the output files by bytes.

    Example: milepost merge checkpoints/project/run my-model --dtype bf16
    """
    _say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = _one("DIR", "--local_dir", directory, local_dir)
    launch = launch_of(os.environ)
    if hf_upload_path is not None:
        uploading.check_repository_name(hf_upload_path)
    elif private:
        raise CallError("--private says how to upload; give the repository with --hf_upload_path")
    if dry_run and launch is not None and launch.rank:
        return
    options = merging.MergeOptions(
        dtype, parse_bytes(max_shard_size), parse_bytes(memory_limit), workers, overwrite=overwrite, checksum=checksum
    )
    target = None if dry_run else _one("OUT", "--target_dir", output, target_dir)
    with nullcontext() if launch is None or target is None else Team(launch, target) as team:
        leads = team is None or team.leads
        quiet = quiet or not leads
        located, part = _found(source, role, backend, quiet)
        asked = ModelOptions(
            hf_model_path, is_value_model, tie_word_embedding, tuple(allow_missing or ()), part, lora, lora_alpha
        )
        model = prepare(located.directory, located.layout.name, asked)
        for text in model.notes:
            note(text, quiet=quiet)
        if target is None:
            _say_dry_run(model.index, dtype, json_)
            return
        if check and leads:
            _check_bytes(located, quiet)
        if team is not None:
            note(f"{team.size} ranks share out the output files; the progress is that of rank 0", quiet=quiet)
        with bytes_progress("merge", merging.bytes_to_move(model, options, team), quiet=quiet) as progress:
            report = merging.merge(model, target, options, progress=progress, team=team)
    if not leads:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.dtypes.items())
    size, time = file_size(report.nbytes), duration(report.seconds)
    note(f"wrote {report.tensors} tensors ({kinds}), {size} in {time}", quiet=quiet or json_)
    if not json_:
        typer.echo(str(target))
    address = None
    if hf_upload_path is not None:
        address = uploading.upload(target, hf_upload_path, private=private, bars=not quiet and sys.stderr.isatty())
        note(f"uploaded to {address}", quiet=quiet)
    if json_:
        _print_json(
            source=str(located.directory),
            target=str(report.target),
            layout=model.index.layout,
            world_size=model.index.world_size,
            step=located.step,
            role=part or located.role,
            tensors=report.tensors,
            bytes=report.nbytes,
            dtypes=report.dtypes,
            files=list(report.files),
            notes=list(model.notes),
            uploaded_to=address,
            seconds=round(report.seconds, 3),
        )


def test(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run, a step, or a role's directory.")
    ] = None,
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
    _say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = _one("DIR", "--local_dir", directory, local_dir)
    other = _one("HF_DIR", "--test_hf_dir", reference, test_hf_dir)
    located, part = _found(source, role, backend, quiet)
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
        _print_json(
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


def inspect(
    directory: Directory = None,
    local_dir: LocalDir = None,
    backend: Backend = "auto",
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="GLOB", help="List the tensors whose names match.", show_default=False),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a run, a step, or a role's directory holds.

    A run: its steps and whether each is whole. A step: its roles. A role: its tensors; --name '*' lists them all.
    """
    del quiet
    path = _one("DIR", "--local_dir", directory, local_dir)
    if path.is_dir() and find_layout(path, backend) is None and scan(path):
        _inspect_run(path, json_)
    else:
        _inspect_role(locate(path, backend=backend), name or [], json_)


def verify(
    directory: Directory = None,
    local_dir: LocalDir = None,
    backend: Backend = "auto",
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and check it against its checksum.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is whole.

    Files, sizes, headers, and that the parts of every tensor tile it exactly; --deep reads every byte.

    Takes a run (every step of it), a step, a role's directory or a model. Exit status 1 where anything is wrong.
    """
    path = _one("DIR", "--local_dir", directory, local_dir)
    total = verification.bytes_to_read(path) if deep else 0
    with bytes_progress("verify", total, quiet=quiet or not deep) as progress:
        verdict = verification.verify(path, backend=backend, deep=deep, progress=progress)
    if json_:
        _print_json(
            ok=verdict.ok, path=str(path), kind=verdict.kind, files=verdict.files, bytes=verdict.nbytes, deep=deep,
            problems=list(verdict.problems),
        )  # fmt: skip
    else:
        for problem in verdict.problems:
            typer.echo(problem)
        how = "sizes, headers and every byte" if deep else "sizes and headers; --deep reads every byte"
        state = "good" if verdict.ok else f"not good, {counted(len(verdict.problems), 'problem')}"
        typer.echo(f"{state}: {counted(verdict.files, 'file')}, {file_size(verdict.nbytes)} ({how})")
    if not verdict.ok:
        raise typer.Exit(1)


def _inspect_run(path: Path, as_json: bool) -> None:
    steps = list_steps(path)
    sizes = {}
    for state in steps:
        manifest = read_manifest(state.path) if state.state == "committed" else None
        sizes[state.step] = (manifest.nbytes, manifest.world_size) if manifest else (None, None)
    if as_json:
        _print_json(
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
    typer.echo(f"run {path}: {counted(len(steps), 'step')}, {named}")
    for state in steps:
        nbytes, world_size = sizes[state.step]
        detail = f"{file_size(nbytes)}, world size {world_size}" if nbytes is not None else state.why
        typer.echo(f"  {state.step:>8}  {state.state:11} {detail}")


def _inspect_role(located: Located, globs: list[str], as_json: bool) -> None:
    index = located.layout.open(located.directory)
    chosen = {name: entry for name, entry in index.items() if any(fnmatchcase(name, glob) for glob in globs)}
    weights = index.weights()
    facts: dict[str, Any] = {
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
    if as_json:
        _print_json(**facts, listed={name: _entry_facts(index, name) for name in chosen})
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["dtypes"].items())
    step = "" if located.step is None else f", step {located.step}"
    typer.echo(
        f"{located.role or 'model'} {located.directory}: layout {index.layout}, world size {index.world_size}{step}"
    )
    size = f"{facts['parameters']:,} parameters, {file_size(weights.nbytes)}"
    typer.echo(f"  weights  {len(weights)} tensors ({kinds}), {size}")
    typer.echo(f"  moments  {facts['moments']} tensors" if facts["moments"] else "  moments  none")
    for line in index.unread:
        typer.echo(f"  not read  {line}")
    for name, entry in chosen.items():
        alias = f" = {entry.alias_of}" if entry.alias_of else ""
        kind = "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight"
        typer.echo(f"  {kind}  {name}  {entry.dtype} {list(entry.shape)} in {len(entry.chunks)} parts{alias}")


def _entry_facts(index: TensorIndex, name: str) -> dict[str, Any]:
    entry = index[name]
    return {
        "kind": "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "parts": len(entry.chunks),
        "alias_of": entry.alias_of,
    }


def _compare_logits(
    report: comparison.Report, model: HuggingFaceModel, reference: Path, dtype: str, atol: float, rtol: float
) -> LogitsReport | None:
    if any(difference.kind in ("missing", "extra", "shape") for difference in report.differences):
        note("logits not compared: the two do not hold the same tensors")
        return None
    return compare_logits(model, reference, merging.MergeOptions(dtype), atol=atol, rtol=rtol)


def _say_dry_run(index: TensorIndex, dtype: str, as_json: bool) -> None:
    written = under_cast(index, dtype)
    note(f"would write {len(written)} tensors, {file_size(written.nbytes)}", quiet=as_json)
    if as_json:
        _print_json(tensors=len(written), bytes=written.nbytes, dry_run=True)


def _found(source: Path, role: str | None, backend: str, quiet: bool) -> tuple[Located, str | None]:
    located, part = locate_part(source, role=role, backend=backend)
    for text in located.notes:
        note(text, quiet=quiet)
    step = "" if located.step is None else f", step {located.step}"
    note(f"found {located.layout.name} checkpoint {located.directory}{step}", quiet=quiet)
    return located, part


def _check_bytes(located: Located, quiet: bool) -> None:
    directory = located.directory.parent if (located.directory.parent / MANIFEST).exists() else located.directory
    with bytes_progress("check", verification.bytes_to_read(directory), quiet=quiet) as progress:
        verdict = verification.verify(directory, deep=True, progress=progress)
    if not verdict.ok:
        for problem in verdict.problems:
            note(problem)
        raise typer.Exit(1)


def _one(argument: str, option: str, first: Path | None, second: Path | None) -> Path:
    """The one value of a positional argument that can also be given as an option."""
    chosen = second if first is None else first
    if chosen is None or (first is not None and second is not None and first != second):
        raise CallError(f"give {argument} or {option}, one of them; --help shows how")
    return chosen


def _say_unused(**options: bool) -> None:
    for name, given in options.items():
        if given:
            note(f"--{name} has no meaning here: no model is built and no code of a checkpoint is run")


def _print_json(**facts: Any) -> None:
    typer.echo(json.dumps({"format": FORMAT, **facts}, indent=2, allow_nan=True))
