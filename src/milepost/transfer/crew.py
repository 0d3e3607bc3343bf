"""Threads that share a stream of work: each takes the next item once it is free.

A stream is drawn on only as fast as its items are done. (The pools of `concurrent.futures` take all items at once, and
add a tenth to the start of a small merge, by the import alone.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

Item = TypeVar("Item")
_NO_MORE = object()


def in_threads(
    items: Iterable[Item], make_worker: Callable[[], Callable[[Item], int]], workers: int, told: Callable[[int], None]
) -> None:
    """Do every item in one of `workers` threads; returns once all are done.

    make_worker:  called once in each thread; makes what does an item, with memory of its own, and says how much it was
    told:         called in the caller's thread with what a worker said, item by item

    The first error, of a worker, of the stream or of `told`, stops the work and is raised once the items in flight have
    ended; so is Ctrl-C.
    """
    stream = iter(items)
    drawing, stopped = Lock(), Event()
    news: SimpleQueue[int | BaseException | None] = SimpleQueue()  # how much was done; an error; None: a worker left

    def work() -> None:
        try:
            do = make_worker()
            while not stopped.is_set():
                with drawing:
                    item = next(stream, _NO_MORE)
                if item is _NO_MORE:
                    break
                news.put(do(item))  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            stopped.set()
            news.put(error)
        finally:
            news.put(None)

    threads = [Thread(target=work, name=f"milepost-{number}") for number in range(workers)]
    try:
        for thread in threads:
            thread.start()
        left = 0
        while left < workers:
            heard = news.get()
            if isinstance(heard, BaseException):
                raise heard
            if heard is None:
                left += 1
            else:
                told(heard)
    finally:
        stopped.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
