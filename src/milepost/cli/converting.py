"""convert: a Hugging Face model directory to a dist checkpoint of Megatron. Imports no torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from milepost.cli.declared import Argument, Option
from milepost.cli.options import (
    of_call,
    one,
    print_json,
    say_unused,
    team_at,
    this_launch,
)
from milepost.console import bytes_progress, note
from milepost.jobs.convert import ConvertOptions, bytes_to_move, prepare_conversion, write_conversion
from milepost.wording import duration, file_size

_Size = Annotated[int | None, Option("--pp_size", hidden=True)]
_Experts = Annotated[int | None, Option("--ep_size", hidden=True)]


@of_call(ConvertOptions)
def convert(
    model: Annotated[Path | None, Argument(metavar="HF", help="A Hugging Face model directory.")] = None,
    output: Annotated[Path | None, Argument(metavar="OUT", help="Where the checkpoint goes.")] = None,
    hf_model_path: Annotated[Path | None, Option("--hf_model_path", help="The same as HF.", show_default=False)] = None,
    output_path: Annotated[Path | None, Option("--output_path", help="The same as OUT.", show_default=False)] = None,
    pp_size: _Size = None,
    ep_size: _Experts = None,
    *,
    call: ConvertOptions,
    json_: bool,
    quiet: bool,
) -> None:
    """Write a Hugging Face model as a dist checkpoint of Megatron.

    Megatron's own loader reads it under any tensor, pipeline and expert parallel sizes. No model is built, memory
    does not grow with the model, and the directory appears whole or not at all. Config and tokenizer go along, so
    that `milepost merge` of the output gives the model back.

    A mixture-of-experts model that Megatron builds with a list for moe_layer_freq needs --separate-layers. Layers of
    multi-token prediction (MTP) are not converted.

    Under torchrun the ranks share out the output files by bytes.

    Example: milepost convert Qwen2.5-7B qwen-megatron --test
    """
    say_unused(pp_size=pp_size is not None, ep_size=ep_size is not None)
    source = one("HF", "--hf_model_path", model, hf_model_path)
    target = one("OUT", "--output_path", output, output_path)
    launch = this_launch()
    with nullcontext() if launch is None else team_at(launch, target) as team:
        leads = team is None or team.leads
        quiet = quiet or not leads
        conversion = prepare_conversion(source, call)
        for text in conversion.model.notes:
            note(text, quiet=quiet)
        if team is not None:
            note(f"{team.size} ranks share out the output files; the progress is that of rank 0", quiet=quiet)
        with bytes_progress("convert", bytes_to_move(conversion, call, team), quiet=quiet) as progress:
            report = write_conversion(conversion, target, call, progress=progress, team=team)
    if not leads:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.dtypes.items())
    size, time = file_size(report.nbytes), duration(report.seconds)
    checked = "; read back, every bit is the source's" if report.tested else ""
    note(f"wrote {report.tensors} tensors ({kinds}), {size} in {time}{checked}", quiet=quiet or json_)
    if not json_:
        print(str(target))
        return
    print_json(
        source=str(source),
        target=str(report.target),
        tensors=report.tensors,
        bytes=report.nbytes,
        dtypes=report.dtypes,
        keys=report.keys,
        tested=report.tested,
        notes=list(conversion.model.notes),
        seconds=round(report.seconds, 3),
    )
