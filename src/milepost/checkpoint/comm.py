"""How the ranks of a run talk while a step is saved or resumed: small objects, gathered on all of them.

A save must never end well on one rank and badly on another. `together` is the one way in which ranks do something
that can fail: each does its part, all learn how all fared, and if one failed every rank raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from milepost.checkpoint.background import Background
from milepost.checkpoint.meeting import meet
from milepost.errors import CallError, LostRankError, MilepostError, WriteError
from milepost.wording import counted

T = TypeVar("T")
_BEAT = 5.0  # seconds
PATIENCE = 30.0
"""Seconds in which the ranks, which train in step, come to the same save or resume."""


class Communicator(Protocol):
    """The ranks that save and resume together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, counted from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def timeout_seconds(self) -> float | None:
        """How long a rank waits for another that is busy with its files; None: for ever."""

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def meet(self, what: str) -> None:
        """Begin a call that all ranks make, known to the user as `what`.

        Raises CallError, naming them, where some do not come in time: a collective that they never enter would wait
        for ever."""

    def another(self) -> Communicator:
        """The same ranks over a channel of their own, for calls from another thread. All ranks make it together."""

    def close(self) -> None:
        """Give back what the communicator holds."""


class SingleProcess:
    """One rank, with nobody to talk to."""

    rank = 0
    world_size = 1
    timeout_seconds = None

    def all_gather(self, value: T) -> list[T]:
        """The one value."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def meet(self, what: str) -> None:
        """Nobody to meet."""

    def another(self) -> Communicator:
        """Nobody to mix up."""
        return self

    def close(self) -> None:
        """Nothing is held."""


class TorchCommunicator:
    """The ranks of torch.distributed, over a gloo group of its own.

    Gloo, so that small objects need no device memory and cannot mix with the training's collectives. All ranks make it
    together. `timeout_seconds` bounds how long a rank waits for another that is still writing its files,
    `patience_seconds` how long for one that has not yet made the call that this one is in.
    """

    def __init__(self, timeout_seconds: float = 1800.0, patience_seconds: float = PATIENCE) -> None:
        import torch.distributed as dist  # noqa: PLC0415  a run without ranks needs no torch here

        self._dist = dist
        self.timeout_seconds = timeout_seconds
        self._patience = patience_seconds
        self._meetings = 0
        with _told_of_lost_ranks():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, pickled on the way. LostRankError where one of them has ended."""
        values: list[Any] = [None] * self.world_size
        with _told_of_lost_ranks():
            self._dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here. LostRankError where one of them has ended."""
        with _told_of_lost_ranks():
            self._dist.barrier(group=self._group)

    def meet(self, what: str) -> None:
        """Meet at the store of torch.distributed, under the name of this communicator's group. LostRankError where the
        process that holds the store has ended."""
        number, self._meetings = self._meetings, self._meetings + 1
        store, place = self._dist.distributed_c10d._get_default_store(), f"milepost/{self._group.group_name}"
        with _told_of_lost_ranks():
            meet(store, place, number, self.rank, self.world_size, what, self._patience)

    def another(self) -> Communicator:
        """Another gloo group: collectives of two groups do not meet, whatever thread they come from."""
        return TorchCommunicator(self.timeout_seconds, self._patience)

    def close(self) -> None:
        """Give up the group."""
        if self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)


@contextlib.contextmanager
def _told_of_lost_ranks() -> Iterator[None]:
    """What gloo, or the store, says of a connection that broke or a time that is over, in words."""
    import torch.distributed as dist  # noqa: PLC0415  who has ranks has it

    try:
        yield
    except RuntimeError as error:
        said = re.search(
            r"(Connection \w+ by peer|Timed out|Application timeout|Broken pipe|Connection refused)",
            str(error),
            re.IGNORECASE,
        )
        if said is None and "gloo" not in str(error) and not isinstance(error, dist.DistNetworkError):
            raise
        why = f" ({said[1]})" if said else ""
        raise LostRankError(
            f"another rank has ended or does not answer{why}: what it said last, and the launcher's log, tell why"
        ) from error


def default_communicator(timeout_seconds: float = 1800.0) -> Communicator:
    """The ranks of torch.distributed where it is initialised, else this process alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchCommunicator(timeout_seconds)
    return SingleProcess()


@dataclass(frozen=True)
class _Outcome:
    """What one rank brings back: a value, or the kind and text of its error."""

    value: Any = None
    error: type[MilepostError] | None = None
    message: str = ""


def together(comm: Communicator, act: Callable[[], T]) -> list[T]:
    """Do `act` on every rank and return what each rank's returned.

    If it raises on any rank, every rank raises the first failing rank's error: its milepost class where it has one,
    `WriteError` for an OSError, `MilepostError` for anything else. Where there are several ranks the message names it.
    """
    raised: Exception | None = None
    try:
        outcome = _Outcome(act())
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        raised = error
        outcome = _Outcome(error=_kind(error), message=_sentence(error))
    outcomes = comm.all_gather(outcome)
    failed = [(rank, o) for rank, o in enumerate(outcomes) if o.error is not None]
    if failed:
        rank, first = failed[0]
        assert first.error is not None
        where = f"rank {rank}: " if comm.world_size > 1 else ""
        more = f" ({counted(len(failed) - 1, 'more rank')} failed too)" if len(failed) > 1 else ""
        raise first.error(f"{where}{first.message}{more}") from raised
    return [o.value for o in outcomes]


def agree(comm: Communicator, root: Path, **what: Any) -> None:
    """Raise on every rank, before anything is written, unless all were given the same root and the same `what`."""
    views = comm.all_gather((os.path.abspath(root), what))  # noqa: PTH100  resolve() would follow links
    for rank, (folder, other) in enumerate(views):
        if folder != views[0][0]:
            raise CallError(
                f"the ranks were given different folders: rank 0 {views[0][0]}, rank {rank} {folder}; "
                "all must save to the same one"
            )
        for name, value in other.items():
            if value != views[0][1][name]:
                raise CallError(f"the ranks disagree about {name}: rank 0 {views[0][1][name]}, rank {rank} {value}")


def on_all(comm: Communicator, act: Callable[[], T]) -> T:
    """Do `act` on every rank and return each rank's own result there; if it raises on any, all raise."""
    results: list[T] = []
    together(comm, lambda: results.append(act()))
    return results[0]


def on_rank_0(comm: Communicator, act: Callable[[], T]) -> T:
    """Do `act` on rank 0 alone and return its result on every rank; if it raises, every rank raises."""
    results: list[Any] = together(comm, act if comm.rank == 0 else lambda: None)
    value: T = results[0]
    return value


def on_rank_0_at_length(comm: Communicator, act: Callable[[], T]) -> T:
    """`on_rank_0` for what may take longer than ranks wait for each other: meanwhile they meet every few seconds."""
    if comm.rank > 0:
        while not comm.all_gather(True)[0]:
            pass
        return on_rank_0(comm, act)
    call = Background(act, "milepost-rank-0")
    while not comm.all_gather(call.wait(_BEAT))[0]:
        pass
    return on_rank_0(comm, call.result)


def _kind(error: Exception) -> type[MilepostError]:
    if isinstance(error, MilepostError):
        return type(error)
    return WriteError if isinstance(error, OSError) else MilepostError


def _sentence(error: Exception) -> str:
    if isinstance(error, MilepostError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
