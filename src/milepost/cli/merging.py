"""merge: any checkpoint to a Hugging Face model directory. Imports no torch."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from milepost.checkpoint import verify as verification
from milepost.checkpoint.locate import Located
from milepost.checkpoint.manifest import MANIFEST
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
    Workers,
    found,
    one,
    print_json,
    say_unused,
)
from milepost.console import bytes_progress, note
from milepost.errors import CallError
from milepost.index import TensorIndex
from milepost.jobs import merge as merging
from milepost.jobs import upload as uploading
from milepost.jobs.prepare import ModelOptions, prepare, under_cast
from milepost.jobs.ranks import Team, launch_of
from milepost.units import parse_bytes
from milepost.wording import duration, file_size


def merge(
    directory: Directory = None,
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
    say_unused(trust_remote_code=trust_remote_code, use_cpu_initialization=use_cpu_initialization)
    source = one("DIR", "--local_dir", directory, local_dir)
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
    target = None if dry_run else one("OUT", "--target_dir", output, target_dir)
    with nullcontext() if launch is None or target is None else Team(launch, target) as team:
        leads = team is None or team.leads
        quiet = quiet or not leads
        located, part = found(source, role, backend, quiet)
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
        print_json(
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


def _say_dry_run(index: TensorIndex, dtype: str, as_json: bool) -> None:
    written = under_cast(index, dtype)
    note(f"would write {len(written)} tensors, {file_size(written.nbytes)}", quiet=as_json)
    if as_json:
        print_json(tensors=len(written), bytes=written.nbytes, dry_run=True)


def _check_bytes(located: Located, quiet: bool) -> None:
    directory = located.directory.parent if (located.directory.parent / MANIFEST).exists() else located.directory
    with bytes_progress("check", verification.bytes_to_read(directory), quiet=quiet) as progress:
        verdict = verification.verify(directory, deep=True, progress=progress)
    if not verdict.ok:
        for problem in verdict.problems:
            note(problem)
        raise typer.Exit(1)
