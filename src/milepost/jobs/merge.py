"""merge: any checkpoint to a Hugging Face model directory.

open -> map to Hugging Face -> plan over all boxes -> safetensors files. The directory appears whole or not at all: it
is built beside its place and renamed into it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from milepost.errors import WriteError
from milepost.index import DTYPES, Box, TensorIndex
from milepost.jobs.output import output_directory
from milepost.jobs.prepare import HuggingFaceModel, under_cast
from milepost.layouts.huggingface import CONFIG, companion_files, read_config
from milepost.layouts.safetensors import SafetensorsWriter, with_dtype
from milepost.transfer import execute, plan
from milepost.transfer.execute import Progress, window_bytes_for
from milepost.wording import file_size


@dataclass(frozen=True)
class MergeOptions:
    """How to write; defaults are those of the command line. Sizes in bytes."""

    dtype: str = "keep"
    max_shard_size: int = 5 * 10**9
    memory_limit: int = 2**30
    workers: int = 2
    overwrite: bool = False


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: number of tensors, bytes of the weights, tensors by element type, files, seconds."""

    target: Path
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    files: tuple[str, ...]
    seconds: float


def merge(
    model: HuggingFaceModel,
    target: Path,
    options: MergeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> MergeReport:
    """Write a prepared model as a Hugging Face model directory.

    Raises CheckpointError where the checkpoint is not good, CallError and WriteError where the call or the target is
    not. Nothing is left behind then, and an older export in `target` stays as it was.
    """
    options = options or MergeOptions()
    begun = monotonic()
    with output_directory(target, overwrite=options.overwrite, sources=model.index.files) as building:
        written = export(model, building, options, progress)
    return MergeReport(
        target=target,
        tensors=len(written),
        nbytes=written.nbytes,
        dtypes=dict(Counter(entry.dtype for entry in written.entries.values())),
        files=tuple(sorted(path.name for path in target.iterdir())),
        seconds=monotonic() - begun,
    )


def export(
    model: HuggingFaceModel, directory: Path, options: MergeOptions, progress: Progress | None = None
) -> TensorIndex:
    """Write weights, config and companions into an existing directory; returns what was written."""
    written = under_cast(model.index, options.dtype)
    _check_space(directory, written.nbytes)
    windows = plan(
        model.index,
        ((name, Box.whole(entry.shape)) for name, entry in model.index.entries.items()),
        window_bytes_for(options.memory_limit, options.workers),
    )
    with SafetensorsWriter(directory, written.entries, options.max_shard_size) as writer:
        execute(windows, writer, workers=options.workers, progress=progress)
    write_companions(model, written, directory)
    return written


def write_companions(model: HuggingFaceModel, written: TensorIndex, directory: Path) -> None:
    """Copy the companions byte for byte; config.json too, unless it must say something else to be true."""
    for path in companion_files(model.companions):
        shutil.copyfile(path, directory / path.name)
    config = with_dtype(model.config, main_dtype(written))
    if config != read_config(model.companions):
        (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def main_dtype(index: TensorIndex) -> str:
    """The floating element type that most bytes have: what config.json calls the model's."""
    weight: Counter[str] = Counter()
    for entry in index.entries.values():
        if DTYPES[entry.dtype].floating:
            weight[entry.dtype] += entry.nbytes
    return weight.most_common(1)[0][0] if weight else "float32"


def _check_space(directory: Path, nbytes: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < nbytes:
        raise WriteError(
            f"{directory.parent}: the model needs {file_size(nbytes)}, {file_size(free)} are free; "
            "make room or choose another --target_dir"
        )
