"""The torch DCP layout: what `torch.distributed.checkpoint.save` writes, read without torch and any process group.

A role directory is a DCP folder itself, or has one for the weights and one for the optimizer in it (`FOLDERS`). What
each file says: `milepost.layouts.dcp.metadata`; what each key means: `milepost.layouts.dcp.names`.

Opening reads `.metadata`, and a few samples of each file to tell copies. The header of a part is read when the chunks
of its tensor are first looked at, since only it says at which byte the elements begin and in which order they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError
from milepost.index import OPTIMIZER_PREFIX, Chunk, TensorEntry, TensorIndex
from milepost.layouts.dcp.copies import refuse_copies
from milepost.layouts.dcp.metadata import Span, StoredTensor, holds_dcp, read_contents
from milepost.layouts.dcp.names import name_tensors, top_parts
from milepost.layouts.dcp.shards import holds_shards, read_shards
from milepost.layouts.inert import TensorRef
from milepost.layouts.lazy import LazyChunks
from milepost.layouts.torchfile import TorchFile


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a trainer puts weights and moments inside a role's directory."""

    writer: str
    weights: str
    moments: str


FOLDERS = (
    Folder("accelerate or HF Trainer", "pytorch_model_fsdp_0", "optimizer_0"),
    Folder("NeMo-RL", "weights", "optimizer"),
    Folder("NeMo-RL with Automodel", "weights/model", "optimizer/optim"),
    Folder("NeMo Automodel", "model", "optim"),
)


class DcpLayout:
    """Reader of torch DCP folders."""

    name = "dcp"

    def recognises(self, directory: Path) -> bool:
        """Whether DCP files lie here, or in one of the folders that a known trainer makes."""
        return _holds(directory) or _folder(directory) is not None

    def open(self, directory: Path) -> TensorIndex:
        """The index: weights by their names in the model, moments as `optim/<weight>/<moment>`; other state, such as
        hyperparameters and counters, by its key in `objects`, read when asked for."""
        folder = _folder(directory)
        if folder is None:
            return _open(directory)
        weights = _open(directory / folder.weights)
        if not _holds(directory / folder.moments):
            return weights
        moments = _open(directory / folder.moments)
        return TensorIndex(
            {**weights.weights().entries, **{n: e for n, e in moments.items() if n.startswith(OPTIMIZER_PREFIX)}},
            self.name,
            weights.files + moments.files,
            max(weights.world_size, moments.world_size),
            _Joined(weights.objects, moments.objects),
        )

    def describe(self, directory: Path) -> str:
        """What was recognised, in words."""
        folder = _folder(directory)
        if folder is not None:
            moments = f"moments in {folder.moments}" if _holds(directory / folder.moments) else "no moments"
            return f"a folder of {folder.writer}: weights in {folder.weights}, {moments}"
        if holds_shards(directory):
            return "sharded safetensors of torch DCP"
        paths = read_contents(directory).paths
        parts = top_parts(paths)
        if "train_state" in parts and any(len(path) == 1 for path in paths.values()):
            return f"a step of torchtitan: model, {', '.join(parts)}"
        if not parts and "tok_embeddings.weight" in paths:
            return "a model of torchtitan"
        return "a torch DCP folder" + (f" of {', '.join(parts)}" if parts else " of plain tensors")


def archives(index: TensorIndex) -> Iterator[Span]:
    """Where the archive of every part of an opened DCP checkpoint lies, for checks of their bytes."""
    for directory in dict.fromkeys(path.parent for path in index.files if path.name.endswith(".metadata")):
        contents = read_contents(directory)
        tensors = (span for stored in contents.tensors.values() for span in stored.spans)
        # several keys may name one archive
        yield from dict.fromkeys((*tensors, *contents.objects.values(), *(copy for *_, copy in contents.replicas)))


def _holds(directory: Path) -> bool:
    return holds_dcp(directory) or holds_shards(directory)


def _folder(directory: Path) -> Folder | None:
    if _holds(directory):
        return None
    return next((folder for folder in FOLDERS if _holds(directory / folder.weights)), None)


def _open(directory: Path) -> TensorIndex:
    if not holds_dcp(directory):
        entries, files = read_shards(directory)
        return TensorIndex(entries, DcpLayout.name, files, len(files))
    contents = read_contents(directory)
    try:
        names = name_tensors(contents.paths, {key: stored.shape for key, stored in contents.tensors.items()})
    except DamagedError as error:
        raise DamagedError(f"{directory}: {error}") from None
    entries = {name: _entry(contents.tensors[key]) for name, key in names.tensors.items()}
    refuse_copies(contents)
    others = {key: _entry(contents.tensors[key]) for key in names.others}
    return TensorIndex(
        entries,
        DcpLayout.name,
        contents.metadata + contents.data,
        contents.world_size,
        _Objects(contents.objects, others),
    )


def _entry(stored: StoredTensor) -> TensorEntry:
    return TensorEntry(stored.dtype, stored.shape, LazyChunks(partial(_chunks, stored), len(stored.boxes)))


def _archive(span: Span) -> TorchFile:
    return TorchFile(span.file, (span.start, span.length))


def _chunks(stored: StoredTensor) -> Iterator[Chunk]:
    """The chunks of one tensor. Reads the header of each."""
    for box, span in zip(stored.boxes, stored.spans, strict=True):
        file = _archive(span)
        ref = file.root
        if not isinstance(ref, TensorRef) or (ref.dtype, ref.shape) != (stored.dtype, box.sizes):
            held = f"{ref.dtype}{list(ref.shape)}" if isinstance(ref, TensorRef) else "no tensor"
            raise DamagedError(
                f"{span}: holds {held} where .metadata says {stored.dtype}{list(box.sizes)}; "
                "the files are of different saves"
            )
        yield file.chunk(ref, box.offsets)


class _Objects(Mapping[str, Any]):
    """State that is neither weight nor moment, by key; each read when asked for."""

    def __init__(self, spans: Mapping[str, Span], tensors: Mapping[str, TensorEntry]) -> None:
        self.spans = spans
        self.tensors = tensors

    def __getitem__(self, key: str) -> Any:
        if key in self.tensors:
            return self.tensors[key].numpy()
        file = _archive(self.spans[key])
        return file.plain(file.root)

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.spans

    def __iter__(self) -> Iterator[str]:
        return iter((*self.tensors, *self.spans))

    def __len__(self) -> int:
        return len(self.tensors) + len(self.spans)


class _Joined(Mapping[str, Any]):
    """Two mappings as one; nothing of them is read before it is asked for."""

    def __init__(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        self._owner = {key: part for part in (second, first) for key in part}

    def __getitem__(self, key: str) -> Any:
        return self._owner[key][key]

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)
