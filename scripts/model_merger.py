"""verl's merger by its old name: `python scripts/model_merger.py merge|test ...` takes exactly its options.

It is `milepost merge|test ...`, with two habits of that script: `merge` without `--target_dir` writes to `tmp`, and
`--hf_model_path` is deprecated.
"""

from __future__ import annotations

import sys

from milepost.cli.app import run


def as_verl_means(arguments: list[str]) -> list[str]:
    """The command line of milepost for one of verl's script."""
    names = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    if "__hf_model_path" in names:
        print(
            "--hf_model_path is deprecated: config and tokenizer are those that lie with the checkpoint "
            "(huggingface/); this model directory is used instead",
            file=sys.stderr,
        )
    if arguments[:1] == ["merge"] and "__local_dir" in names and not names & {"__target_dir", "__dry_run"}:
        return [*arguments, "--target_dir", "tmp"]
    return arguments


if __name__ == "__main__":
    sys.exit(run(as_verl_means(sys.argv[1:])))
