"""The verbs of the command line, for Python: open, merge, test.

ckpt = milepost.open("checkpoints/my/run")            # a run, a step, a role or a model directory
ckpt.index["model.embed_tokens.weight"].read()        # a torch tensor
milepost.merge("checkpoints/my/run", "my-model")
milepost.test("checkpoints/my/run", "my-model").ok
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from milepost.checkpoint.locate import Located, locate
from milepost.checkpoint.parts import locate_part
from milepost.index import TensorIndex
from milepost.jobs.compare import Report, compare
from milepost.jobs.merge import MergeOptions, MergeReport
from milepost.jobs.merge import merge as merge_model
from milepost.jobs.prepare import ModelOptions, open_reference, prepare, prepare_to_compare
from milepost.layouts import open_directory
from milepost.layouts.huggingface import find_companions, read_config
from milepost.units import parse_bytes

__all__ = ["Checkpoint", "ModelOptions", "merge", "open", "test"]

AnyPath = str | PathLike[str]


@dataclass(frozen=True)
class Checkpoint:
    """One role of one checkpoint, opened: nothing is read yet but headers."""

    located: Located
    index: TensorIndex

    @property
    def directory(self) -> Path:
        """The role's directory."""
        return self.located.directory

    @property
    def layout(self) -> str:
        """Name of its layout: "fsdp", "huggingface"."""
        return self.index.layout

    @property
    def role(self) -> str:
        """ "actor", "critic"; "" for a model directory that belongs to no step."""
        return self.located.role

    @property
    def step(self) -> int | None:
        """The step's number, or None where the directory belongs to none."""
        return self.located.step

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json; NotFoundError where the checkpoint has none."""
        return read_config(find_companions(self.directory) or self.directory)


def open(path: AnyPath, *, role: str | None = None, backend: str = "auto") -> Checkpoint:
    """Open a checkpoint: a role directory, a step (its actor, or `role`), a run (its newest good step), or a model."""
    located = locate(Path(path), role=role, backend=backend)
    return Checkpoint(located, open_directory(located.directory, located.layout.name))


def merge(
    path: AnyPath,
    target_dir: AnyPath,
    *,
    dtype: str = "keep",
    memory_limit: str | int = "1GiB",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    role: str | None = None,
    backend: str = "auto",
    model: ModelOptions | None = None,
) -> MergeReport:
    """Write a checkpoint as a Hugging Face model directory; see `milepost.jobs.merge` for what it raises.

    `role` is a directory of a step ("actor", "critic"), or "policy" or "value" of a state dict that holds both.
    """
    located, part = locate_part(Path(path), role=role, backend=backend)
    model = replace(model or ModelOptions(), part=part) if part else model
    options = MergeOptions(
        dtype=dtype,
        memory_limit=parse_bytes(str(memory_limit)),
        max_shard_size=parse_bytes(str(max_shard_size)),
        overwrite=overwrite,
    )
    return merge_model(prepare(located.directory, located.layout.name, model), Path(target_dir), options)


def test(
    path: AnyPath,
    hf_dir: AnyPath,
    *,
    dtype: str = "keep",
    atol: float = 0.0,
    rtol: float = 0.0,
    role: str | None = None,
    backend: str = "auto",
    model: ModelOptions | None = None,
) -> Report:
    """Compare a checkpoint with a Hugging Face model: `.ok`, `.differences`."""
    located, part = locate_part(Path(path), role=role, backend=backend)
    model = replace(model or ModelOptions(), part=part) if part else model
    ours = prepare_to_compare(located.directory, Path(hf_dir), located.layout.name, model)
    reference = open_reference(Path(hf_dir))
    return compare(ours.comparable(), reference, dtype=dtype, atol=atol, rtol=rtol, updates=ours.updates)


test.__test__ = False  # type: ignore[attr-defined]  # pytest collects what is named so
