"""verl's converter by its old name: `python scripts/converter_hf_to_mcore.py --hf_model_path ... --output_path ...`.

It is `milepost convert`, with two habits of that script: weights become bfloat16, and an output directory that is not
empty is left as it is, with `--test` compared with the model instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from milepost.cli.app import run
from milepost.errors import MilepostError
from milepost.jobs.convert import ConvertOptions, check_written, prepare_conversion

_ALONE = (
    "--use_cpu_initialization",
    "--test",
    "--trust_remote_code",
    "--separate_layers",
    "--overwrite",
    "--json",
    "--quiet",
    "-q",
    "--help",
    "-h",
)
_DTYPE = "bf16"


def main(arguments: list[str]) -> int:
    """Do what verl's script would do; returns the exit status."""
    given = options_of(arguments)
    output = Path(given.get("--output_path") or "")
    filled = "--output_path" in given and output.is_dir() and any(output.iterdir())
    if not filled or "--overwrite" in given:
        typed = [] if {"--dtype", "--help", "-h"} & given.keys() else ["--dtype", _DTYPE]
        return run(["convert", *arguments, *typed])
    if "--test" not in given:
        print(f"Output path {output} is not empty, skipping conversion", file=sys.stderr)
        return 0
    return check(Path(given.get("--hf_model_path") or ""), output, given.get("--dtype") or _DTYPE)


def check(model: Path, output: Path, dtype: str) -> int:
    """Compare what an earlier call wrote with its model; returns the exit status."""
    options = ConvertOptions(dtype=dtype)
    try:
        check_written(prepare_conversion(model, options).model, output, options)
    except MilepostError as error:
        print(f"milepost: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{output}: every tensor is the model's", file=sys.stderr)
    return 0


def options_of(arguments: list[str]) -> dict[str, str | None]:
    """Each option, spelled with underscores, and its value."""
    found: dict[str, str | None] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        found[name] = value if equals else None if name in _ALONE else next(words, None)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
