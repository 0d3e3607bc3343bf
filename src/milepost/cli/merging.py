"""merge: any checkpoint to a Hugging Face model directory. Imports no torch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from milepost.api.merging import MergeCall, bytes_checked, check_bytes
from milepost.cli.declared import Argument, Option
from milepost.cli.options import (
    Directory,
    LocalDir,
    found,
    of_call,
    one,
    print_json,
    takes_urls,
    team_at,
    this_launch,
)
from milepost.console import bytes_progress, note
from milepost.jobs import merge as merging
from milepost.jobs.prepare import prepare
from milepost.wording import duration, file_size


@takes_urls("directory", "local_dir")
@of_call(MergeCall)
def merge(
    directory: Directory = None,
    output: Annotated[
        Path | None, Argument(metavar="OUT", help="Where the model goes: a new or empty directory, unless --overwrite.")
    ] = None,
    local_dir: LocalDir = None,
    target_dir: Annotated[Path | None, Option("--target_dir", help="The same as OUT.", show_default=False)] = None,
    *,
    call: MergeCall,
    json_: bool,
    quiet: bool,
) -> None:
    """Write a checkpoint as a Hugging Face model directory.

    Shards of any number of ranks become safetensors, with config, tokenizer and generation config beside them. The
    directory appears whole or not at all. Memory does not grow with the model.

    Under torchrun (torchrun --nproc-per-node 8 -m milepost merge DIR OUT, on one node or several that share a disk)
    the ranks share out the output files by bytes.

    Example: milepost merge checkpoints/project/run my-model --dtype bf16
    """
    source = one("DIR", "--local_dir", directory, local_dir)
    launch = this_launch()
    call.check_upload()
    if call.dry_run and launch is not None and launch.rank:
        return
    target = None if call.dry_run else one("OUT", "--target_dir", output, target_dir)
    with nullcontext() if launch is None or target is None else team_at(launch, target) as team:
        leads = team is None or team.leads
        quiet = quiet or not leads
        located, part = found(source, call.role, call.backend, quiet)
        call = call.of_part(part)
        model = prepare(located.directory, located.layout.name, call)
        for text in model.notes:
            note(text, quiet=quiet)
        if target is None:
            _say_dry_run(merging.planned(model, source, call), json_)
            return
        if call.check and leads:
            from milepost.checkpoint.verify import bytes_to_read  # noqa: PLC0415

            with bytes_progress("check", bytes_to_read(bytes_checked(located)), quiet=quiet) as progress:
                check_bytes(located, progress)
        if team is not None:
            note(f"{team.size} ranks share out the output files; the progress is that of rank 0", quiet=quiet)
        with bytes_progress("merge", merging.bytes_to_move(model, call, team), quiet=quiet) as progress:
            report = merging.merge(model, target, call, progress=progress, team=team)
    if not leads:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.dtypes.items())
    size, time = file_size(report.nbytes), duration(report.seconds)
    note(f"wrote {report.tensors} tensors ({kinds}), {size} in {time}", quiet=quiet or json_)
    if not json_:
        print(str(target))
    address = None
    if call.hf_upload_path is not None:
        from milepost.jobs.upload import upload  # noqa: PLC0415

        bars = not quiet and sys.stderr.isatty()
        address = upload(target, call.hf_upload_path, private=call.private, bars=bars)
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


def _say_dry_run(report: merging.MergeReport, as_json: bool) -> None:
    note(f"would write {report.tensors} tensors, {file_size(report.nbytes)}", quiet=as_json)
    if as_json:
        print_json(tensors=report.tensors, bytes=report.nbytes, dry_run=True)
