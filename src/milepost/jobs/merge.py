"""merge: any checkpoint to a Hugging Face model directory.

open -> map to Hugging Face -> plan over all boxes -> safetensors files. The directory appears whole or not at all: it
is built beside its place and renamed into it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from milepost.errors import WriteError
from milepost.fileio import blocks_of, unreadable
from milepost.index import DTYPES, Box, TensorEntry, TensorIndex
from milepost.jobs.companions import files_of
from milepost.jobs.output import EXPORT, output_directory
from milepost.jobs.prepare import HuggingFaceModel, under_cast
from milepost.layouts.huggingface import CONFIG, read_config
from milepost.layouts.safetensors import SafetensorsWriter, shard_files, with_dtype
from milepost.mapping.nested import TEXT, tower_of
from milepost.settings import setting
from milepost.transfer import execute, plan
from milepost.transfer.execute import Progress, window_bytes_for
from milepost.wording import file_size

if TYPE_CHECKING:
    from milepost.jobs.ranks import Team


@dataclass(frozen=True)
class MergeOptions:
    """How to write. Sizes in bytes."""

    dtype: str = setting("keep", "keep, bf16, fp16 or fp32. Integers keep their type.")
    max_shard_size: int = setting("5GB", "Largest output file.", size=True)
    memory_limit: int = setting("1GiB", "Bound on the memory for tensor data.", size=True)
    workers: int = setting(2, "Parallel readers and writers.", least=1)
    overwrite: bool = setting(False, "Replace an older export, as a whole.")
    checksum: bool = setting(False, "Write checksums of the export, which `verify --deep` checks.")


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: number of tensors, bytes of the weights, tensors by element type, files, seconds, and the
    address of the upload where there was one."""

    target: Path
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    files: tuple[str, ...]
    seconds: float
    uploaded_to: str | None = None


def merge(
    model: HuggingFaceModel,
    target: Path,
    options: MergeOptions | None = None,
    *,
    progress: Progress | None = None,
    team: Team | None = None,
) -> MergeReport:
    """Write a prepared model as a Hugging Face model directory; with a `team`, this rank's share of it.

    Raises CheckpointError where the checkpoint is not good, CallError and WriteError where the call or the target is
    not. Nothing is left behind then, and an older export in `target` stays as it was.
    """
    options = options or MergeOptions()
    begun = monotonic()
    if model.adapter is not None:
        model = replace(model, adapter=model.adapter.of_base(target))
    sources = (*model.index.files, model.companions / CONFIG)
    if team is None:
        with output_directory(target, overwrite=options.overwrite, sources=sources) as building:
            written = export(model, building, options, progress)
            if options.checksum:
                from milepost.jobs.checksums import record_files, write_checksums  # noqa: PLC0415

                write_checksums(building, record_files(building, _files_below(building), options.workers, progress))
    else:
        written = _merge_share(model, sources, options, progress, team)
    return _report(written, target, (path.name for path in target.iterdir()), monotonic() - begun)


def planned(model: HuggingFaceModel, target: Path, options: MergeOptions) -> MergeReport:
    """What a merge would report, as far as it concerns weights; nothing is written."""
    written = under_cast(model.index, options.dtype)
    return _report(written, target, shard_files(written.entries, options.max_shard_size), 0.0)


def _report(written: TensorIndex, target: Path, files: Iterable[str], seconds: float) -> MergeReport:
    dtypes = dict(Counter(entry.dtype for entry in written.entries.values()))
    return MergeReport(target, len(written), written.nbytes, dtypes, tuple(sorted(files)), seconds)


def bytes_to_move(model: HuggingFaceModel, options: MergeOptions, team: Team | None = None) -> int:
    """What `progress` will be told in all, companions aside: bytes read here, and bytes read again for checksums."""
    written = under_cast(model.index, options.dtype)
    names = [name for names in _share(written, options, team).values() for name in names]
    moved = sum(model.index[name].nbytes for name in names)
    return moved + (sum(written[name].nbytes for name in names) if options.checksum else 0)


def _share(written: TensorIndex, options: MergeOptions, team: Team | None) -> dict[str, list[str]]:
    """The files that this rank writes, and the tensors of each."""
    files = shard_files(written.entries, options.max_shard_size)
    if team is None:
        return files
    sizes = {file: sum(written[name].nbytes for name in names) for file, names in files.items()}
    from milepost.jobs.ranks import share_out  # noqa: PLC0415

    mine = share_out(sizes, team.size)[team.rank]
    return {file: names for file, names in files.items() if file in mine}


def _merge_share(
    model: HuggingFaceModel, sources: tuple[Path, ...], options: MergeOptions, progress: Progress | None, team: Team
) -> TensorIndex:
    from milepost.jobs.checksums import record_files, write_checksums  # noqa: PLC0415

    def checked(count: int) -> None:
        team.check()
        if progress is not None:
            progress(count)

    with team.directory(overwrite=options.overwrite, sources=sources) as building:
        written = export(model, building, options, checked, team)
        mine = list(_share(written, options, team))
        hashed = record_files(building, mine, options.workers, checked) if options.checksum else ()
        sizes = {file: (building / file).stat().st_size for file in mine}
        records = team.gather(building, _outline(written), sizes, hashed)
        if team.leads and options.checksum:
            recorded = {record.path for record in records}
            rest = [name for name in _files_below(building) if name not in recorded]
            write_checksums(building, [*records, *record_files(building, rest, options.workers, checked)])
    team.wait_for_commit()
    return written


def _files_below(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]


def _outline(written: TensorIndex) -> str:
    """A digest of every tensor's name, element type and shape, in order."""
    import xxhash  # noqa: PLC0415

    lines = (f"{name} {entry.dtype} {entry.shape}\n" for name, entry in written.items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def export(
    model: HuggingFaceModel,
    directory: Path,
    options: MergeOptions,
    progress: Progress | None = None,
    team: Team | None = None,
) -> TensorIndex:
    """Write weights, config and companions into an existing directory; returns what was written.

    With a `team`, this rank's files; config and companions are for rank 0.
    """
    written = under_cast(model.index, options.dtype)
    files = _share(written, options, team)
    names = [name for names in files.values() for name in names]
    check_space(directory, sum(written[name].nbytes for name in names))
    windows = plan(
        model.index,
        ((name, Box.whole(model.index[name].shape)) for name in names),
        window_bytes_for(options.memory_limit, options.workers),
    )
    with SafetensorsWriter(directory, written.entries, options.max_shard_size, files) as writer:
        execute(windows, writer, workers=options.workers, progress=progress, updates=model.updates)
    if team is None or team.leads:
        write_companions(model, written, directory)
        if model.adapter is not None:
            from milepost.jobs.lora import write_adapter  # noqa: PLC0415
            from milepost.jobs.lora_training import DIRECTORY as ADAPTER  # noqa: PLC0415

            window_bytes = window_bytes_for(options.memory_limit, options.workers)
            write_adapter(model.adapter, directory / ADAPTER, options.dtype, window_bytes, options.workers)
    return written


def write_companions(model: HuggingFaceModel, written: TensorIndex, directory: Path) -> None:
    """Copy the companions byte for byte; config.json too, unless it must say something else to be true.

    Raises DamagedError where one cannot be read, OSError where its copy cannot be written.
    """
    try:
        paths = files_of(model.companions, model.tokenizer)
    except OSError as error:
        raise unreadable(error.filename or model.companions, error) from None
    for path in paths:
        with (directory / path.name).open("wb") as copy:
            copy.writelines(blocks_of(path))
    config = with_dtype(model.config, main_dtype(written), part_dtypes(written, model.config))
    if config != read_config(model.companions):
        (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main_dtype(index: TensorIndex) -> str:
    """The floating element type that most bytes have: what config.json calls the model's."""
    weight: Counter[str] = Counter()
    for entry in index.entries.values():
        if DTYPES[entry.dtype].floating:
            weight[entry.dtype] += entry.nbytes
    return weight.most_common(1)[0][0] if weight else "float32"


def part_dtypes(index: TensorIndex, config: Mapping[str, Any]) -> dict[str, str]:
    """The floating element type of each part of a model that has a config of its own, by that config's key."""
    parts: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in index.items():
        if DTYPES[entry.dtype].floating:
            parts.setdefault(tower_of(name, config) or TEXT, {})[name] = entry
    return {key: main_dtype(index.with_entries(entries)) for key, entries in parts.items()}


def check_space(directory: Path, nbytes: int, option: str = EXPORT.option) -> None:
    """Raise WriteError where the disk has less room than a model needs; `option` names the place in the call."""
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < nbytes:
        raise WriteError(
            f"{directory.parent}: the model needs {file_size(nbytes)}, {file_size(free)} are free; "
            f"make room or choose another {option}"
        )
