"""convert: a Hugging Face model directory to a dist checkpoint of Megatron (torch_dist).

open -> map to Megatron -> plan over all boxes -> archives. No model is built and no bytes lie in memory but those on
their way. The output is what Megatron's own loader reads under any tensor, pipeline and expert parallel sizes:

    .metadata, __0_{i}.distcp    the weights
    metadata.json, common.pt     what Megatron looks at first
    huggingface/                 config and tokenizer: with them `milepost merge` of the output needs nothing else

Rows that pad the vocabulary are not written: a model that has some fills them with zeros, as Megatron's loader does
for any checkpoint of another padding. Layers of multi-token prediction (MTP) are not written.

Where all layers are of one kind, each tensor lies in one for all of them. A model of Megatron whose `moe_layer_freq` is
a list asks for those of single layers, though the list says the same of each: `separate_layers`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from milepost.errors import CheckpointError, DamagedError, MismatchError, NotFoundError
from milepost.index import TensorIndex
from milepost.jobs.compare import CompareOptions, compare
from milepost.jobs.merge import check_space, write_companions
from milepost.jobs.output import Kind, output_directory
from milepost.jobs.prepare import HuggingFaceModel, ModelOptions, prepare, under_cast
from milepost.layouts.archive_writer import object_archive
from milepost.layouts.dcp.metadata import METADATA
from milepost.layouts.dcp.writer import Contents, DcpWriter, Stored, lay_out
from milepost.layouts.huggingface import CONFIG, SUBDIRECTORY, is_model_directory, read_config
from milepost.layouts.megatron.reader import COMMON, DIST_BACKEND, DIST_METADATA
from milepost.mapping.megatron import RULES, model_of, to_megatron
from milepost.mapping.megatron.dist import extra_states, layers_alike, places
from milepost.mapping.names import ALLOW_MISSING
from milepost.settings import keywords, made, setting
from milepost.transfer import execute, plan
from milepost.transfer.execute import Progress, start_flush, window_bytes_for

if TYPE_CHECKING:
    from milepost.jobs.ranks import Team

_CHECKPOINT_VERSION = 3.0
"""Of Megatron-LM: how rows of queries, keys and values are ordered."""

OUTPUT = Kind(
    "a dist checkpoint",
    "the model that is being converted",
    "--output_path",
    lambda names: METADATA in names and DIST_METADATA in names,
)


@dataclass(frozen=True)
class ConvertOptions:
    """How to write. Sizes in bytes."""

    dtype: str = setting("keep", "keep, bf16, fp16 or fp32. Integers and routing biases keep their type.")
    test: bool = setting(False, "Read what was written and compare it with the source, bit for bit.")
    separate_layers: bool = setting(
        False,
        "Give each layer tensors of its own, as models want that Megatron builds with moe_layer_freq as a list or with "
        "non_homogeneous_layers.",
    )
    max_shard_size: int = setting("5GB", "Largest output file.", size=True)
    memory_limit: int = setting("1GiB", "Bound on the memory for tensor data.", size=True)
    workers: int = setting(2, "Parallel readers and writers.", least=1)
    overwrite: bool = setting(False, "Replace an older dist checkpoint, as a whole.")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did: number of Hugging Face's tensors, their bytes, tensors by element type, keys in Megatron's
    checkpoint, whether it was checked, seconds."""

    target: Path
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    keys: int
    tested: bool
    seconds: float


@dataclass(frozen=True)
class Conversion:
    """A model that is ready to be converted.

    model:     as it lies in its directory, checked against its config.json
    megatron:  its tensors under Megatron's names, in their own element types
    contents:  every file of the output
    alike:     whether the tensors of all layers lie in one
    keys:      how many tensors Megatron sees
    """

    model: HuggingFaceModel
    megatron: TensorIndex
    contents: Contents
    alike: bool
    keys: int


def prepare_conversion(directory: Path, options: ConvertOptions) -> Conversion:
    """Open a model directory and plan its conversion; nothing is written.

    Raises NotFoundError where there is no model, MismatchError where Megatron's form of the family is not known, and
    MismatchError or IncompleteError where the weights are not what config.json describes.
    """
    if not is_model_directory(directory):
        raise NotFoundError(_no_model(directory))
    kind = read_config(directory).get("model_type", "(none)")
    if kind not in RULES:
        raise MismatchError(
            f"{directory}: a model of type {kind}; the types whose form in Megatron is known are {', '.join(RULES)}"
        )
    try:
        model = prepare(directory, "huggingface")
    except CheckpointError as error:
        said = str(error).replace(ALLOW_MISSING, "")
        raise type(error)(said if str(directory) in said else f"{directory}: {said}") from None
    described = model_of(model.config)
    megatron = to_megatron(model.index, model.config)
    written = to_megatron(under_cast(model.index, options.dtype), model.config)
    alike = not options.separate_layers and layers_alike(megatron, described)
    found = places(megatron, described, alike=alike)
    tensors = {name: Stored(written[name].dtype, written[name].shape, found[name]) for name in megatron}
    contents = lay_out(tensors, {key: [None] for key in extra_states(found)}, options.max_shard_size)
    keys = {place.key for each in found.values() for place in each}
    return Conversion(model, megatron, contents, alike, len(keys))


def _no_model(directory: Path) -> str:
    if directory.is_dir():
        return (
            f"{directory}: has no {CONFIG} with weights beside it; --hf_model_path takes a Hugging Face model directory"
        )
    hint = ""
    if len(directory.parts) == 2 and not directory.is_absolute():
        hint = f"; a model of the Hub is fetched first: hf download {directory} --local-dir DIR"
    return f"{directory}: no such directory{hint}"


def bytes_to_move(conversion: Conversion, options: ConvertOptions, team: Team | None = None) -> int:
    """What `progress` will be told in all: bytes read here, and read again for `--test`."""
    megatron = conversion.megatron
    share = sum(
        box.volume * (megatron[name].nbytes // max(1, megatron[name].numel))
        for name, box in conversion.contents.wanted(_share(conversion.contents, team))
    )
    tested = options.test and (team is None or team.leads)
    return share + (conversion.model.index.nbytes if tested else 0)


@keywords(ConvertOptions)
def convert(
    hf_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> ConvertReport:
    """Write a Hugging Face model directory as a dist checkpoint of Megatron.

    progress:  called with the number of bytes just moved
    settings:  the fields of `ConvertOptions`

    Raises what `prepare_conversion` and `write_conversion` raise.
    """
    options = made(ConvertOptions, settings)
    conversion = prepare_conversion(Path(hf_dir), options)
    return write_conversion(conversion, Path(output_path), options, progress=progress)


def write_conversion(
    conversion: Conversion,
    target: Path,
    options: ConvertOptions,
    *,
    progress: Progress | None = None,
    team: Team | None = None,
) -> ConvertReport:
    """Write a prepared conversion; with a `team`, this rank's share of the files.

    Raises WriteError and CallError where the target is not good, DamagedError where `--test` finds a difference.
    Nothing is left behind then, and an older checkpoint in `target` stays as it was.
    """
    begun = monotonic()
    if team is None:
        sources = _sources(conversion)
        with output_directory(target, overwrite=options.overwrite, sources=sources, kind=OUTPUT) as building:
            _write(conversion, building, options, tuple(conversion.contents.sizes), progress)
            _finish(conversion, building, target, options, progress)
    else:
        _write_share(conversion, target, options, progress, team)
    cast = under_cast(conversion.model.index, options.dtype)
    dtypes = dict(Counter(entry.dtype for entry in cast.values()))
    return ConvertReport(target, len(cast), cast.nbytes, dtypes, conversion.keys, options.test, monotonic() - begun)


def _sources(conversion: Conversion) -> tuple[Path, ...]:
    return *conversion.model.index.files, conversion.model.companions / CONFIG


def _share(contents: Contents, team: Team | None) -> tuple[str, ...]:
    """The files that this rank writes."""
    if team is None:
        return tuple(contents.sizes)
    from milepost.jobs.ranks import share_out  # noqa: PLC0415  only a launch of several ranks needs it

    mine = share_out(contents.sizes, team.size)[team.rank]
    return tuple(file for file in contents.sizes if file in mine)


def _write_share(
    conversion: Conversion, target: Path, options: ConvertOptions, progress: Progress | None, team: Team
) -> None:
    def checked(count: int) -> None:
        team.check()
        if progress is not None:
            progress(count)

    contents = conversion.contents
    files = _share(contents, team)
    with team.directory(overwrite=options.overwrite, sources=_sources(conversion), kind=OUTPUT) as building:
        _write(conversion, building, options, files, checked)
        team.gather(building, _outline(contents), {file: contents.sizes[file] for file in files}, ())
        if team.leads:
            _finish(conversion, building, target, options, checked)
    team.wait_for_commit()


def _outline(contents: Contents) -> str:
    """A digest of where every box goes."""
    import xxhash  # noqa: PLC0415  the same

    lines = (f"{s.name} {s.box} {s.file} {s.start} {contents.tensors[s.name].dtype}\n" for s in contents.slots)
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _write(
    conversion: Conversion, building: Path, options: ConvertOptions, files: tuple[str, ...], progress: Progress | None
) -> None:
    contents = conversion.contents
    check_space(building, sum(contents.sizes[file] for file in files), OUTPUT.option)
    window = window_bytes_for(options.memory_limit, options.workers)
    windows = plan(conversion.megatron, contents.wanted(files), window)
    with DcpWriter(building, contents, files, start_flush) as writer:
        execute(windows, writer, workers=options.workers, progress=progress)


def _finish(
    conversion: Conversion, building: Path, target: Path, options: ConvertOptions, progress: Progress | None
) -> None:
    """What is written once, after the weights; and the check."""
    model = conversion.model
    companions = building / SUBDIRECTORY
    companions.mkdir()
    write_companions(model, under_cast(model.index, options.dtype), companions)
    backend = {"sharded_backend": DIST_BACKEND, "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (building / DIST_METADATA).write_text(json.dumps(backend | common), encoding="utf-8")
    form = {"singleton_local_shards": False, "non_homogeneous_layers": not conversion.alike}
    state = {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0, "content_metadata": form}
    (building / COMMON).write_bytes(object_archive(state))
    conversion.contents.write_table(building)
    if options.test:
        _check(model, building, target, options, progress)


def check_written(model: HuggingFaceModel, directory: Path, options: ConvertOptions, named: Path | None = None) -> None:
    """Read a checkpoint as any reader would and compare it with the model that it was made of, bit for bit.

    named: what errors call the directory

    Raises DamagedError where they differ.
    """
    _check(model, directory, named or directory, options, None)


def _check(
    model: HuggingFaceModel, directory: Path, named: Path, options: ConvertOptions, progress: Progress | None
) -> None:
    written = prepare(directory, "megatron", ModelOptions(hf_model_path=model.companions))
    how = CompareOptions(dtype=options.dtype, memory_limit=options.memory_limit)
    report = compare(model.index, written.index, how, progress=progress)
    if report.ok:
        return
    first = report.differences[0]
    raise DamagedError(
        f"{named}: {first.name} is not what {model.companions} has (it differs in {first.kind}); "
        f"{len(report.differences)} of {report.tensors} tensors differ"
    )
