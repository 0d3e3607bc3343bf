"""What the reading commands share: their options, and how they find a checkpoint and print facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.checkpoint.locate import Located
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.parts import locate_part
from milepost.checkpoint.steps import judge
from milepost.console import note
from milepost.errors import CallError

Directory = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="A run, a step, or a role's directory.", show_default=False)
]
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


def found(source: Path, role: str | None, backend: str, quiet: bool) -> tuple[Located, str | None]:
    """The role directory that is meant, and the part of a state dict with several; says what was found."""
    located, part = locate_part(source, role=role, backend=backend)
    for text in located.notes:
        note(text, quiet=quiet)
    step = "" if located.step is None else f", step {located.step}"
    note(f"found {located.layout.name} checkpoint {located.directory}{step}", quiet=quiet)
    step_dir = located.directory.parent
    if (step_dir / MANIFEST).exists():
        state = judge(step_dir, named=True)
        if not state.good:
            note(f"beware: {step_dir.name} is {state.state}: {state.why}")
    return located, part


def one(argument: str, option: str, first: Path | None, second: Path | None) -> Path:
    """The one value of a positional argument that can also be given as an option."""
    chosen = second if first is None else first
    if chosen is None or (first is not None and second is not None and first != second):
        raise CallError(f"give {argument} or {option}, one of them; --help shows how")
    return chosen


def say_unused(**options: bool) -> None:
    """Note which of the options of other programs were given and mean nothing here."""
    for name, given in options.items():
        if given:
            note(f"--{name} has no meaning here: no model is built and no code of a checkpoint is run")


def print_json(**facts: Any) -> None:
    """One JSON object on stdout, with the version of its form."""
    typer.echo(json.dumps({"format": FORMAT, **facts}, indent=2, allow_nan=True))
