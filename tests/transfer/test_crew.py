"""Threads that share a stream: every item once, memory of a worker's own, and a clean end whatever goes wrong."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from milepost.transfer.crew import in_threads


def _doubling() -> Callable[[int], int]:
    return lambda item: 2 * item


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_item_is_done_once_and_told_in_the_callers_thread(workers: int) -> None:
    heard: list[tuple[int, int]] = []
    in_threads(range(200), _doubling, workers, lambda done: heard.append((done, threading.get_ident())))
    assert sorted(done for done, _ in heard) == list(range(0, 400, 2))
    assert {thread for _, thread in heard} == {threading.get_ident()}


def test_nothing_to_do() -> None:
    in_threads([], _doubling, 3, lambda _: pytest.fail("nothing was done"))


def test_a_worker_is_made_once_a_thread() -> None:
    made: list[str] = []

    def make() -> Callable[[int], int]:
        made.append(threading.current_thread().name)
        return lambda item: item

    in_threads(range(100), make, 3, lambda _: None)
    assert sorted(made) == ["milepost-0", "milepost-1", "milepost-2"]


def test_an_error_of_who_listens_stops_the_work() -> None:
    drawn: list[int] = []

    def stream() -> Iterator[int]:
        for number in range(10_000):
            drawn.append(number)
            yield number

    def listen(_: int) -> None:
        raise ValueError("no more")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no more"):
        in_threads(stream(), _slow, 2, listen)
    assert threading.active_count() == before
    assert len(drawn) < 1000


def _slow() -> Callable[[int], int]:
    pause = threading.Event()

    def do(item: int) -> int:
        pause.wait(0.002)
        return item

    return do


def test_an_error_while_a_worker_is_made_is_raised() -> None:
    def make() -> Callable[[int], int]:
        raise MemoryError("no room for its buffers")

    with pytest.raises(MemoryError, match="no room"):
        in_threads(range(5), make, 2, lambda _: None)


def test_ctrl_c_ends_the_work_and_leaves_no_thread() -> None:
    before = threading.active_count()
    sent = threading.Event()

    def make() -> Callable[[int], int]:
        slow = _slow()

        def do(item: int) -> int:
            if item == 20 and not sent.is_set():
                sent.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return slow(item)

        return do

    with pytest.raises(KeyboardInterrupt):
        in_threads(range(1_000_000), make, 2, lambda _: None)
    assert threading.active_count() == before
