"""Megatron's dist checkpoint: planned by Megatron's own code, written through the files of a step.

`megatron.core.dist_checkpointing.save` lets rank 0 alone write common.pt, .metadata and metadata.json between
collectives: where its disk is full it raises, and the others wait for it in the next one. Its writers are processes
that are forked with all that this one holds, and what is a view of a larger buffer it copies first. Here the same steps
are gone through with a word between them, so that what goes wrong on one rank is raised on all, and a rank's tensors go
into its file in one copy, after which training may go on. Source: megatron-core 0.16,
`dist_checkpointing/serialization.py`, `strategies/torch.py`, `strategies/filesystem_async.py`,
`strategies/state_dict_saver.py`, `strategies/fully_parallel.py`.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from milepost.engines.base import RoleFiles
from milepost.errors import MilepostError, WriteError

T = TypeVar("T")
_CORE = "megatron.core.dist_checkpointing"
_COMMON = "common.pt"
_FORM = ("torch_dist", 1)  # the only one that Megatron still writes
_HIDDEN = ("inline_container", "basic_ios", "[Errno ")
"""In a RuntimeError these tell of a disk: torch's archive writer, its streams, an OSError that Megatron only quotes."""


def write_dist(state: dict[str, Any], files: RoleFiles, folder: str) -> None:
    """Write a sharded state dict into a new folder among the files of a role. All ranks call it together.

    If it fails on any rank, every rank raises: WriteError where it was the disk, else MilepostError.
    """
    place = files.directory / folder
    first = dist.get_rank() == 0
    # (Collectives; what they find is found on every rank.)
    sharded, common = importlib.import_module(f"{_CORE}.state_dict_utils").save_preprocess(state, True)
    _share_out(sharded)
    writer, metadata = _planned(sharded, place)
    written = together(place, lambda: _write_own(writer, files, folder))

    def end() -> None:
        files.save(f"{folder}/{_COMMON}", common)
        core = importlib.import_module(f"{_CORE}.core")
        with tempfile.TemporaryDirectory() as scratch:
            writer.path = Path(scratch)
            writer.finish(metadata, written)
            core.save_config(core.CheckpointingConfig(*_FORM), scratch)
            for path in sorted(Path(scratch).iterdir()):
                with path.open("rb") as source, files.create(f"{folder}/{path.name}") as file:
                    shutil.copyfileobj(source, file)

    together(place, lambda: end() if first else None)


def together(place: Path, act: Callable[[], T]) -> list[T]:
    """Do `act` on every rank and return what each rank's returned; if it raises on any, all raise.

    place: what an error is about
    """
    raised: Exception | None = None
    outcome: tuple[Any, type[MilepostError] | None, str] = None, None, ""
    try:
        outcome = act(), None, ""
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        raised = error
        outcome = None, *_in_words(place, error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    failed = [(rank, kind, message) for rank, (_, kind, message) in enumerate(outcomes) if kind is not None]
    if raised is not None and outcome[1] is not None:
        raise outcome[1](outcome[2]) from raised
    for rank, kind, message in failed:
        raise kind(message if kind is MilepostError else f"rank {rank} could not write its part: {message}")
    return [value for value, _, _ in outcomes]


def _in_words(place: Path, error: Exception) -> tuple[type[MilepostError], str]:
    """What an error is to the ranks that hear of it. Raises nothing: they wait for this one."""
    if isinstance(error, MilepostError):
        return type(error), str(error)
    said = (str(error).splitlines() or [""])[0]
    if not _of_the_disk(error):
        return MilepostError, f"rank {dist.get_rank()}: {type(error).__name__}{said and ': ' + said}"
    if isinstance(error, OSError) and error.errno is not None:
        return WriteError, f"{error.filename or place}: {os.strerror(error.errno)}"
    # torch's writer makes of a full disk "unexpected pos", whatever the file system said
    return WriteError, f"{place}: could not be written{_room(place.parent)}: {said or type(error).__name__}"


def _of_the_disk(error: BaseException | None) -> bool:
    """Whether it is an OSError, or one led to it, or torch's archive writer raised it: that hides the OSError."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        hidden = isinstance(error, RuntimeError) and any(words in str(error) for words in _HIDDEN)
        if isinstance(error, OSError) or hidden:
            return True
        error = error.__cause__ or error.__context__
    return False


def _room(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError:  # the file system is gone, which may be what is told of
        return ""
    return f" ({room.f_bavail * room.f_frsize / 1e6:.1f} MB are free there)"


def _share_out(sharded: dict[str, Any]) -> None:
    """Let each tensor that data-parallel ranks all have be written by one of them, so that all write about as many
    bytes: else the first of them would write everything."""
    group = importlib.import_module("megatron.core.parallel_state").get_data_parallel_group(with_context_parallel=True)
    shares = importlib.import_module(f"{_CORE}.exchange_utils").determine_main_replica_uniform_distribution(
        sharded, group
    )
    strategies = importlib.import_module(f"{_CORE}.strategies.fully_parallel")
    strategies.distribute_main_replicas_with_precomputed_distribution(sharded, group, shares)


def _planned(sharded: dict[str, Any], place: Path) -> tuple[Any, Any]:
    """Which rank writes what: a writer that holds this rank's `parts`, and on rank 0 the table of contents."""
    strategies = importlib.import_module(f"{_CORE}.strategies.torch")
    saver = importlib.import_module(f"{_CORE}.strategies.state_dict_saver")
    named, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = _writer()(place, thread_count=1)
    planner = strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    found = saver.save_state_dict_async_plan(
        strategies.mcore_to_pyt_state_dict(named, False), writer, None, 0, planner=planner
    )
    return writer, found[0][1]


def _writer() -> Any:
    """Megatron's writer, which keeps what is to be written instead of copying it."""
    usual: Any = importlib.import_module(f"{_CORE}.strategies.filesystem_async").FileSystemWriterAsync

    class Keeping(usual):  # type: ignore[misc]  # a class of a package that is not always there
        name: str
        parts: list[tuple[Any, Any]]

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan  # the usual one makes the folder: a disk that refuses it would keep this rank from the others

        def prepare_write_data(self, plan: Any, planner: Any) -> None:
            self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            self.parts = [(item, planner.resolve_data(item)) for item in plan.items]

    return Keeping


def _write_own(writer: Any, files: RoleFiles, folder: str) -> list[WriteResult]:
    """Write this rank's file, small objects first, and return where each part lies in it."""
    parts = sorted(writer.parts, key=lambda part: part[0].type is not WriteItemType.BYTE_IO)
    if not parts:
        return []
    values = (data.getbuffer() if isinstance(data, io.BytesIO) else data for _, data in parts)
    places = files.save_row(f"{folder}/{writer.name}", values)
    return [
        WriteResult(item.index, length, _StorageInfo(writer.name, start, length))
        for (item, _), (start, length) in zip(parts, places, strict=True)
    ]
