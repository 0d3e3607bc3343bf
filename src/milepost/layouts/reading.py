"""The headers of all ranks' files, read one after the other, or by several processes where there are very many.

A process that only reads checkpoints may fork; one that trains may not: its threads hold locks that a child would
inherit locked for good. There, and for files that take a few seconds at most, everything is read in this process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.errors import MilepostError
from milepost.layouts.headers import Header, read_header
from milepost.layouts.torchfile import TorchFile

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Items = Callable[[TorchFile], Iterable[tuple[str, Any]]]
MANY = 50_000
"""Tensors times ranks from which on processes are worth their start: about five seconds of one."""


_WORKERS = 16  # each holds one file's object graph, hundreds of megabytes for a hundred thousand tensors


def read_headers(files: Sequence[TorchFile], items: Items) -> Iterator[Header]:
    """The header of each rank's file, in rank order; `items`: the names and values of a file that count."""
    count = len(files)
    first = read_header(files[0], items(files[0]), 0, count)
    yield first
    workers = min(os.cpu_count() or 1, count - 1)
    if workers > 1 and count * len(first.names) >= MANY and _may_fork():
        yield from _in_processes(files, items, first, min(workers, _WORKERS))
    else:
        for rank in range(1, count):
            yield _read(files, items, rank, first)


def _may_fork() -> bool:
    trains = "torch" in sys.modules
    return not trains and threading.active_count() == 1 and hasattr(os, "fork")


def _read(files: Sequence[TorchFile], items: Items, rank: int, first: Header) -> Header:
    file = files[rank]
    header = read_header(file, items(file), rank, len(files))
    # A million ranks' names are the same ones.
    return replace(header, names=first.names) if header.names == first.names else header


def _in_processes(files: Sequence[TorchFile], items: Items, first: Header, workers: int) -> Iterator[Header]:
    import multiprocessing  # noqa: PLC0415  few checkpoints are so large, and it takes long to import

    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for worker in range(workers):
            receiving, sending = context.Pipe(duplex=False)
            ranks = range(1 + worker, len(files), workers)
            process = context.Process(target=_work, args=(files, items, ranks, first, sending), daemon=True)
            process.start()
            sending.close()
            pipes.append(receiving)
            # In this order at the end: a worker that still writes finds its pipe closed, and ends.
            stack.callback(process.join)
            stack.callback(receiving.close)
        for rank in range(1, len(files)):
            try:
                answer, names_are_the_same = pipes[(rank - 1) % workers].recv()
            except EOFError:
                # The worker ended without a word, killed for want of memory perhaps: what it left is read here.
                answer, names_are_the_same = _read(files, items, rank, first), False
            if isinstance(answer, MilepostError):
                raise answer
            yield replace(answer, names=first.names) if names_are_the_same else answer


def _work(files: Sequence[TorchFile], items: Items, ranks: range, first: Header, pipe: Connection) -> None:
    """Send the header of each rank, without names where they are those of the first, or else the first error."""
    try:
        for rank in ranks:
            header = _read(files, items, rank, first)
            same = header.names is first.names
            pipe.send((replace(header, names=()) if same else header, same))
    except MilepostError as error:
        pipe.send((error, False))
    except (BrokenPipeError, KeyboardInterrupt):
        return  # the reading was ended from elsewhere
