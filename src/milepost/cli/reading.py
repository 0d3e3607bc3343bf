"""merge, test, inspect, verify: what can be done with a checkpoint on disk. None of them imports torch."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.checkpoint import verify as verification
from milepost.checkpoint.locate import Located, locate
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.steps import list_steps, read_tracker, scan
from milepost.console import bytes_progress, note
from milepost.errors import CallError
from milepost.index import OPTIMIZER_PREFIX, TensorIndex
from milepost.jobs import compare as comparison
from milepost.jobs import merge as merging
from milepost.jobs.prepare import ModelOptions, prepare, prepare_to_compare, under_cast
from milepost.layouts import find_layout, open_directory
from milepost.units import parse_bytes
from milepost.wording import duration, file_size

Directory = Annotated[Path | None, typer.Argument(help="A run, a step, or a role's directory.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="Layout of the checkpoint: auto, fsdp, huggingface.")]
LocalDir = Annotated[Path | None, typer.Option("--local_dir", help="The same as DIR.", show_default=False)]
Role = Annotated[
    str | None, typer.Option("--role", help="Which role of a step: actor (default), critic.", show_default=False)
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
    max_shard_size: Annotated[str, typer.Option("--max_shard_size", help="Largest output file.")] = "5GB",
    memory_limit: Memory = "1GiB",
    workers: Workers = 2,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option("--allow-missing", metavar="GLOB", help="Tensors that may be missing.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="First check every byte against its checksum.")] = False,
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

    Example: milepost merge checkpoints/project/run my-model --dtype bf16
    """
    _say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = _one("DIR", "--local_dir", directory, local_dir)
    located = _found(source, role, backend, quiet)
    model = prepare(
        located.directory,
        located.layout.name,
        ModelOptions(hf_model_path, is_value_model, tie_word_embedding, tuple(allow_missing or ())),
    )
    for text in model.notes:
        note(text, quiet=quiet)
    if dry_run:
        written = under_cast(model.index, dtype)
        note(f"would write {len(written)} tensors, {file_size(written.nbytes)}", quiet=json_)
        if json_:
            _print_json(tensors=len(written), bytes=written.nbytes, dry_run=True)
        return
    target = _one("OUT", "--target_dir", output, target_dir)
    if check:
        _check_bytes(located, quiet)
    options = merging.MergeOptions(
        dtype, parse_bytes(max_shard_size), parse_bytes(memory_limit), workers, overwrite=overwrite
    )
    with bytes_progress("merge", model.index.nbytes, quiet=quiet) as progress:
        report = merging.merge(model, target, options, progress=progress)
    if json_:
        _print_json(
            source=str(located.directory),
            target=str(report.target),
            layout=model.index.layout,
            world_size=model.index.world_size,
            step=located.step,
            role=located.role,
            tensors=report.tensors,
            bytes=report.nbytes,
            dtypes=report.dtypes,
            files=list(report.files),
            notes=list(model.notes),
            seconds=round(report.seconds, 3),
        )
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.dtypes.items())
        size, time = file_size(report.nbytes), duration(report.seconds)
        note(f"wrote {report.tensors} tensors ({kinds}), {size} in {time}", quiet=quiet)
        typer.echo(str(target))


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
    is_value_model: ValueModel = False,
    tie_word_embedding: Tie = False,
    memory_limit: Memory = "1GiB",
    json_: Json = False,
    quiet: Quiet = False,
    hf_model_path: ConfigFrom = None,
    trust_remote_code: TrustRemoteCode = False,
    use_cpu_initialization: CpuInit = False,
) -> None:
    """Compare a checkpoint with a Hugging Face model.

    Tensor by tensor, both sides streamed; no model is built. Every tensor that is missing, extra, or differs in
    shape, type or value is named. Exit status 1 where they differ.

    Example: milepost test checkpoints/project/run my-model
    """
    _say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = _one("DIR", "--local_dir", directory, local_dir)
    other = _one("HF_DIR", "--test_hf_dir", reference, test_hf_dir)
    located = _found(source, role, backend, quiet)
    theirs = open_directory(other, "huggingface")
    options = ModelOptions(hf_model_path, is_value_model, tie_word_embedding)
    model = prepare_to_compare(located.directory, other, located.layout.name, options)
    with bytes_progress("test", model.index.nbytes, quiet=quiet) as progress:
        report = comparison.compare(
            model.index, theirs, dtype=dtype, atol=atol, rtol=rtol,
            memory_limit=parse_bytes(memory_limit), progress=progress,
        )  # fmt: skip
    if json_:
        _print_json(
            ok=report.ok, tensors=report.tensors, bytes=report.nbytes,
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
            typer.echo(f"not equal: {len(report.differences)} tensors differ, of {report.tensors}")
    if not report.ok:
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
        state = "good" if verdict.ok else f"not good, {len(verdict.problems)} problems"
        typer.echo(f"{state}: {verdict.files} files, {file_size(verdict.nbytes)} ({how})")
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
    typer.echo(f"run {path}: {len(steps)} steps, the tracker says {read_tracker(path)}")
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
    for name, entry in chosen.items():
        alias = f" = {entry.alias_of}" if entry.alias_of else ""
        kind = "moment" if name.startswith(OPTIMIZER_PREFIX) else "weight"
        typer.echo(f"  {kind}  {name}  {entry.dtype} {list(entry.shape)} in {len(entry.chunks)} parts{alias}")


def _entry_facts(index: TensorIndex, name: str) -> dict[str, Any]:
    entry = index[name]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "parts": len(entry.chunks), "alias_of": entry.alias_of}


def _found(source: Path, role: str | None, backend: str, quiet: bool) -> Located:
    located = locate(source, role=role, backend=backend)
    for text in located.notes:
        note(text, quiet=quiet)
    step = "" if located.step is None else f", step {located.step}"
    note(f"found {located.layout.name} checkpoint {located.directory}{step}", quiet=quiet)
    return located


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
