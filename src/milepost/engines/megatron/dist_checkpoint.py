"""Megatron's dist checkpoint, written by Megatron's own code, in steps that all ranks end alike.

`megatron.core.dist_checkpointing.save` lets rank 0 alone write common.pt, .metadata and metadata.json between
collectives: where its disk is full it raises, and the others wait for it in the next one. Here the same steps are gone
through with a word between them, so that what goes wrong on one rank is raised on all. Source: megatron-core 0.16,
`dist_checkpointing/serialization.py`, `strategies/torch.py`, `strategies/state_dict_saver.py`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from milepost.engines import cpu_compat
from milepost.errors import MilepostError, WriteError

T = TypeVar("T")
_CORE = "megatron.core.dist_checkpointing"
_COMMON = "common.pt"
_HIDDEN = ("inline_container", "basic_ios", "[Errno ")
"""In a RuntimeError these tell of a disk: torch's archive writer, its streams, an OSError that Megatron only quotes."""


def write_dist(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into a new folder. All ranks call it together.

    If it fails on any rank, every rank raises: WriteError where it was the disk, else MilepostError.
    """
    first = dist.get_rank() == 0
    serialization = importlib.import_module(f"{_CORE}.serialization")
    together(folder, lambda: folder.mkdir(parents=True) if first else None)
    # (Collectives; what they find is found on every rank.)
    sharded, common = importlib.import_module(f"{_CORE}.state_dict_utils").save_preprocess(state, True)
    together(folder, lambda: torch.save(common, folder / _COMMON) if first else None)
    strategy = _strategy()
    with cpu_compat.written_in_this_process():
        request = strategy.async_save(sharded, folder)
        writer, metadata, _ = strategy.planned
        written = together(folder, lambda: _write_own(request, writer))
    config = importlib.import_module(f"{_CORE}.core")

    def end() -> None:
        writer.finish(metadata, written)
        serialization.save_config(config.CheckpointingConfig(strategy.backend, strategy.version), str(folder))

    together(folder, lambda: end() if first else None)


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


def _write_own(request: Any, writer: Any) -> Any:
    """Write this rank's files, and return where each of its tensors lies in them."""
    if request.async_fn is not None:
        rank, _, results = request.async_fn_args
        request.async_fn(rank, request.preload_fn(), results)
        outcome = results.get()
        if isinstance(outcome, Exception):
            raise outcome
        results.put(outcome)
    found = writer.retrieve_write_results()
    if isinstance(found, tuple):  # an error and its traceback, as torch passes them on
        raise found[0]
    return found


def _strategy() -> Any:
    """Megatron's way of saving, which keeps what it has planned: the writer, the table of contents, on rank 0, and how
    ranks talk."""
    usual: Any = importlib.import_module(f"{_CORE}.strategies.torch").TorchDistSaveShardedStrategy

    class Planning(usual):  # type: ignore[misc]  # a class of a package that is not always there
        planned: tuple[Any, Any, Any]

        def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: tuple[Any, Any, Any]) -> Any:
            self.planned = save_state_dict_ret
            return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    # One writer a rank: Megatron forks a process for each, from this one with all that it holds.
    return Planning("torch_dist", 1, thread_count=1)
