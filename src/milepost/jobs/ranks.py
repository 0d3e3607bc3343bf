"""One merge shared out over the ranks of a launch: `torchrun --nproc-per-node 8 -m milepost merge DIR OUT`.

The ranks, on one node or several, need no process group: they meet in a directory beside the target, on the disk that
they share anyhow, and tell each other by small files what there is to know.

    .OUT.{launch}.ranks/
      rank-{r}      a rank's nonce; touched as long as the rank lives
      roll          rank 0: the nonces of all; a rank that finds its own here belongs to this meeting, not to an old one
      building      rank 0: the name of the directory to write into
      done-{r}      which files a rank has written
      failed-{r}    why a rank stopped
      left-{r}      the rank touches nothing any more
      committed     rank 0: the target stands

Rank 0 makes the directory, waits for all, and commits. Where one rank fails all end with an error, and rank 0 clears up
once the others have let go.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType, TracebackType
from typing import Any

from milepost.errors import CallError, CheckpointError, DamagedError, MilepostError, WriteError
from milepost.jobs.checksums import FileRecord
from milepost.jobs.output import EXPORT, Kind, output_directory, place_of, say_left
from milepost.wording import disk_error

_POLL = 0.1  # seconds between two looks at the meeting
_BEAT = 1.0  # seconds between two signs of life
_PATIENCE = 180.0  # seconds without a sign of life; network file systems show a change up to a minute late
_STOPPED = MappingProxyType({"status": 3, "why": "was stopped"})
_LETTING_GO = 10.0  # seconds that the others have to leave after an error


@dataclass(frozen=True)
class Launch:
    """One start of a program on several ranks; `key` is the same on each of them and on no others."""

    rank: int
    size: int
    key: str


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What torchrun says in the environment; None where there is but one rank."""
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if size < 2 or not 0 <= rank < size:
        return None
    import xxhash  # noqa: PLC0415  only a launch of several ranks needs it

    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    named = "\0".join(environment.get(name, "") for name in names)
    return Launch(rank, size, xxhash.xxh3_64_hexdigest(named.encode())[:8])


def share_out(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """Names for each rank, so that all have about as many bytes: the largest first, to whom has least."""
    shares: list[set[str]] = [set() for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        shares[rank].add(name)
        heapreplace(loads, (load + sizes[name], rank))
    return shares


class Team:
    """The ranks of one launch that write one target; a context manager, entered once all ranks have come.

    Whatever ends the context of one rank with an error ends that of all. With that of rank 0 the meeting goes.
    """

    def __init__(self, launch: Launch, target: Path, *, patience: float = _PATIENCE) -> None:
        self.rank, self.size = launch.rank, launch.size
        self._target = place_of(target)
        self._patience = patience
        self._place = self._target.with_name(f".{self._target.name}.{launch.key}.ranks")
        self._nonce = os.urandom(8).hex()
        self._ended = Event()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last sign of life, and when it was noticed
        self._looked = 0.0
        self._met = self.leads  # whether what lies at the meeting is today's
        self._rolled = False  # on rank 0: whether all had come
        self._heard: Any = None  # what another rank has failed with
        self._letting_go_until: float | None = None
        self._heart = Thread(target=self._live, name="milepost-sign-of-life", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks and commits."""
        return self.rank == 0

    def __enter__(self) -> Team:
        try:
            if self.leads:
                self._clear()
                self._come()
            self._heart.start()
            if self.leads:
                everyone = [f"rank-{rank}" for rank in range(self.size)]
                self._wait(lambda names: names.issuperset(everyone), others := range(1, self.size))
                self._say("roll", {str(rank): self._read(f"rank-{rank}") for rank in (0, *others)})
                self._rolled = True
            else:
                self._wait(self._enrolled, [0])
        except OSError as error:
            self._stay_away()
            raise WriteError(f"{self._place}: cannot be written: {disk_error(error)}") from None
        except BaseException:
            self._stay_away()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._fail(error)
            if self.leads:
                if error is None:
                    self._say("committed", True)
                self._let_go()
                self._leave()
            else:
                self._say(f"left-{self.rank}", True)
        except FileNotFoundError:
            if error is None:
                raise CallError(f"rank 0 of {self.size} ended before rank {self.rank}") from None
        except OSError as refused:
            if error is None:
                raise WriteError(f"{self._place}: cannot be written: {disk_error(refused)}") from None
        finally:
            self._ended.set()

    @contextmanager
    def directory(self, *, overwrite: bool, sources: Iterable[Path], kind: Kind = EXPORT) -> Iterator[Path]:
        """The one directory that all ranks fill; it has taken the target's place when the context has ended well."""
        if self.leads:
            with output_directory(self._target, overwrite=overwrite, sources=sources, kind=kind) as building:
                try:
                    self._say("building", building.name)
                    yield building
                except BaseException as error:
                    self._fail(error)
                    self._let_go()  # nobody may write into the directory while it is removed
                    raise
        else:
            self._wait(lambda names: "building" in names, [0])
            try:
                yield self._target.with_name(self._read("building"))
            except OSError as error:
                raise WriteError(f"{self._target}: cannot be written: {disk_error(error)}") from None

    def gather(
        self, directory: Path, plan: str, files: Mapping[str, int], records: Iterable[FileRecord]
    ) -> list[FileRecord]:
        """Wait until every rank has written its files, and check that all are there in their size.

        plan:     what this rank believes is to be written, in short; all must believe the same
        files:    name -> size of the files that this rank has written
        records:  their checksums, where they were asked for

        Returns the records of all ranks on rank 0; on the others an empty list, once rank 0 has committed or failed.
        """
        records = list(records)
        if not self.leads:
            said = {"plan": plan, "files": dict(files), "records": [asdict(record) for record in records]}
            self._say(f"done-{self.rank}", said)
            return []
        others = range(1, self.size)
        self._wait(lambda names: names.issuperset(f"done-{rank}" for rank in others), others)
        for rank in others:
            said = self._read(f"done-{rank}")
            if said["plan"] != plan:
                raise CheckpointError(
                    f"rank {rank} found another model than rank 0; do all nodes see the same checkpoint?"
                )
            for name, size in said["files"].items():
                path = directory / name
                if not path.is_file() or path.stat().st_size != size:
                    raise DamagedError(f"{path}: rank {rank} wrote {size} bytes that rank 0 does not see")
            records += [FileRecord(**record) for record in said["records"]]
        return records

    def wait_for_commit(self) -> None:
        """On a rank that does not lead: return once the target stands."""
        if not self.leads:
            self._wait(lambda names: "committed" in names, [0])

    def check(self) -> None:
        """Raise where another rank has failed. Cheap enough to be called after every window."""
        now = time.monotonic()
        if now - self._looked > _BEAT:
            self._looked = now
            self._raise_failure(self._names())

    def _come(self) -> None:
        self._place.mkdir(parents=True, exist_ok=True)
        self._say(f"rank-{self.rank}", self._nonce)

    def _enrolled(self, names: set[str]) -> bool:
        """Whether this meeting is today's. Until it is, rank 0 may still be clearing an old one away."""
        if "roll" in names and self._read("roll").get(str(self.rank)) == self._nonce:
            self._met = True
        elif f"rank-{self.rank}" not in names or self._read(f"rank-{self.rank}") != self._nonce:
            self._come()
        return self._met

    def _stay_away(self) -> None:
        """Undo what a rank did to come, where the meeting did not take place."""
        self._ended.set()
        if self.leads:
            self._leave()
        else:
            (self._place / f"rank-{self.rank}").unlink(missing_ok=True)
            with suppress(OSError):
                self._place.rmdir()  # the last one to go

    def _live(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                os.utime(self._place / f"rank-{self.rank}")
            except OSError:
                continue  # the meeting is being cleared or is gone: whoever waits there notices

    def _names(self) -> set[str]:
        try:
            return {path.name for path in self._place.iterdir()}
        except FileNotFoundError:
            return set()

    def _wait(self, ready: Callable[[set[str]], bool], on: Iterable[int]) -> None:
        """Until `ready` of the names at the meeting; the ranks `on` whom that depends must show that they live."""
        on = list(on)
        begun = time.monotonic()
        while True:
            names = self._names()
            if self._met:
                self._raise_failure(names)
            with suppress(FileNotFoundError):  # rank 0 is clearing an old meeting away
                if ready(names):
                    return
            silent = [rank for rank in on if self._silent_for(rank, begun) > self._patience]
            if silent:
                listed = ", ".join(map(str, silent))
                raise CallError(
                    f"rank {self.rank} of {self.size} waited {self._patience:.0f} s for rank {listed} at "
                    f"{self._place}; do all nodes see it? For a merge by one process unset RANK and WORLD_SIZE"
                )
            time.sleep(_POLL)

    def _silent_for(self, rank: int, begun: float) -> float:
        now = time.monotonic()
        try:
            sign = (self._place / f"rank-{rank}").stat().st_mtime_ns
        except OSError:
            sign = -1
        last, noticed = self._seen.get(rank, (-1, begun))
        if sign != last:
            noticed = now
        self._seen[rank] = (sign, noticed)
        return now - noticed

    def _raise_failure(self, names: set[str]) -> None:
        failed = sorted(name for name in names if name.startswith("failed-") and name != f"failed-{self.rank}")
        if failed:
            self._heard = self._read(failed[0])
        elif self._rolled and (gone := [rank for rank in range(self.size) if f"rank-{rank}" not in names]):
            self._heard = {**_STOPPED, "rank": gone[0]}  # before it had seen the roll
        else:
            return
        kind = {1: CheckpointError, 2: CallError}.get(self._heard["status"], MilepostError)
        raise kind(f"rank {self._heard['rank']} of {self.size}: {self._heard['why']}")

    def _fail(self, error: BaseException) -> None:
        """Say why this rank stops; of an error that came from another rank, that one's words."""
        if f"failed-{self.rank}" in self._names() or not self._place.exists():
            return
        own: dict[str, Any] = dict(_STOPPED)
        if isinstance(error, Exception):
            own = {"status": error.exit_status if isinstance(error, MilepostError) else 3, "why": str(error)}
        self._say(f"failed-{self.rank}", self._heard or own | {"rank": self.rank})

    def _let_go(self) -> None:
        """Wait, for a while, until the other ranks have left."""
        if self._letting_go_until is None:
            self._letting_go_until = time.monotonic() + _LETTING_GO
        while time.monotonic() < self._letting_go_until:
            names = self._names()
            if all(f"left-{rank}" in names or f"rank-{rank}" not in names for rank in range(1, self.size)):
                return
            time.sleep(_POLL)

    def _clear(self) -> None:
        """Remove the meeting, though ranks that came early may still be writing their names. OSError where it stays."""
        until = time.monotonic() + _LETTING_GO
        while self._place.exists():
            try:
                shutil.rmtree(self._place)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL)

    def _leave(self) -> None:
        """Remove the meeting at the end, when what was asked for is done or has failed for a reason of its own."""
        try:
            self._clear()
        except OSError as error:
            say_left(self._place, error)

    def _say(self, name: str, what: Any) -> None:
        """Write a file of the meeting; whoever sees it sees all of it."""
        draft = self._place / f".{name}.{self._nonce}"
        draft.write_text(json.dumps(what), encoding="utf-8")
        draft.replace(self._place / name)

    def _read(self, name: str) -> Any:
        return json.loads((self._place / name).read_bytes())
