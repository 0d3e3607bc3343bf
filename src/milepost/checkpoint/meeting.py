"""A meeting of all ranks with a time limit, before a call that would else wait for ever for a rank that never comes.

A collective that one rank enters alone hangs: the others are elsewhere, and nothing says so. Here the ranks first sign
in at the store through which torch.distributed started. What becomes of a meeting is decided once, by an atomic write
of the first rank that knows: all are there, or the time is over. So no rank goes on while another gives up.
"""

from __future__ import annotations

import time
from typing import Any

from milepost.errors import CallError
from milepost.wording import counted, named_ranks

_FIRST_LOOK, _LATER_LOOKS = 0.0005, 0.01  # seconds between two looks: ever longer, for most ranks come at once
_GO = "go"


def meet(store: Any, place: str, number: int, rank: int, size: int, what: str, patience: float) -> None:
    """Return once all ranks have come to meeting `number`, which is each rank's own count.

    store:     torch.distributed's
    place:     where in it; of these ranks alone
    what:      the call that is to follow, as the user knows it
    patience:  seconds to wait for the last rank

    Raises CallError on every rank that came: it names those that did not, or that came for another call.
    """
    verdict, *seats = _keys(place, number, size)
    store.set(seats[rank], what)
    deadline, pause = time.monotonic() + patience, _FIRST_LOOK
    while not store.check([verdict]):
        if store.check(seats):
            store.compare_set(verdict, "", _judge(store, seats))
        elif time.monotonic() > deadline:
            missing = [r for r, seat in enumerate(seats) if not store.check([seat])]
            store.compare_set(
                verdict,
                "",
                f"{named_ranks(missing)} of {size} did not come within {counted(round(patience), 'second')}",
            )
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LATER_LOOKS)
    decided = store.get(verdict).decode()
    if decided != _GO:
        raise CallError(f"{what}: {decided}; every rank must make this call, so do not put it under `if rank == 0`")
    if rank == 0 and number:
        # All are here, so nobody is still in the meeting before: a run of many saves leaves little at the store.
        for key in _keys(place, number - 1, size):
            store.delete_key(key)


def meet_all(what: str, patience: float) -> None:
    """The same for all ranks of torch.distributed and a call that keeps nothing from one time to the next, so that no
    rank counts its meetings: the store does. Returns at once where there is but one rank."""
    import torch.distributed as dist  # noqa: PLC0415  a process without ranks needs none

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    store, place = dist.distributed_c10d._get_default_store(), f"milepost/{what}"
    last = f"{place}/last"
    number = int(store.get(last)) if store.check([last]) else 0
    while store.check(_keys(place, number, 0)):  # this one is decided
        number += 1
    try:
        meet(store, place, number, dist.get_rank(), dist.get_world_size(), what, patience)
    finally:
        # A rank comes to the next one only after this, so no later write is of an earlier meeting.
        store.set(last, str(number))


def _keys(place: str, number: int, size: int) -> list[str]:
    return [f"{place}/{number}/{name}" for name in ("verdict", *range(size))]


def _judge(store: Any, seats: list[str]) -> str:
    calls = [store.get(seat).decode() for seat in seats]
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    return _GO if other is None else f"rank 0 calls {calls[0]}, rank {other} {calls[other]}"
