"""Running commands side by side: wall time, CPU, memory of the whole process tree, bytes read and written.

Commands run as an installed program does: with compiled modules (the environment's PYTHONDONTWRITEBYTECODE is dropped,
and a first round, which is not counted, compiles them).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_SAMPLE_SECONDS = 0.005


@dataclass(frozen=True)
class Sample:
    """One run of one command.

    wall, cpu:    seconds; cpu of the process and its children
    peak_rss:     largest resident memory of the tree, bytes, mapped files included
    peak_anon:    largest anonymous and shared memory of the tree, bytes
    read, wrote:  bytes that passed through its calls (0 where the system does not tell)
    flush:        seconds that it then took to flush what it left behind to disk; 0 where nothing was to be flushed
    """

    wall: float
    cpu: float
    peak_rss: int
    peak_anon: int
    read: int = 0
    wrote: int = 0
    flush: float = 0.0


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: its name, its command, what clears the way before each run, and where it writes."""

    name: str
    command: Sequence[str]
    before: Callable[[], None]
    output: Path | None = None


def run(command: Sequence[str], *, limit_seconds: float = 1800) -> Sample:
    """Run a command to its end and measure it. Raises CalledProcessError, with its stderr shown, where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as process,
    ):
        watch = MemoryWatch(process.pid)
        late = threading.Timer(limit_seconds, process.kill)
        late.start()
        try:
            # Ended and not yet reaped: its counters, and those of its children, can still be read.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            wall = time.perf_counter() - begun
            counters = _counters(process.pid)
        except BaseException:
            process.kill()
            raise
        finally:
            late.cancel()
            watch.stop()
            process.wait()
        stderr.seek(0)
        said = stderr.read()
    if process.returncode:
        sys.stderr.write(said)
        raise subprocess.CalledProcessError(process.returncode, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return Sample(wall, cpu, watch.peak_rss, watch.peak_anon, counters.get("rchar", 0), counters.get("wchar", 0))


def alternate(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Sample]]:
    """Run all contenders in turn, `rounds` times: A B C A B C ...; a round before them is not counted."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            contender.before()
            os.sync()
            sample = run(contender.command)
            sample = replace(sample, flush=_flush(contender.output))
            if number:
                samples[contender.name].append(sample)
            print(f"  round {number}  {contender.name:28} {sample.wall:7.2f} s", file=sys.stderr, flush=True)
    return samples


def _flush(output: Path | None) -> float:
    begun = time.perf_counter()
    for path in () if output is None else output.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - begun


def table(samples: Mapping[str, Sequence[Sample]], base: str) -> list[str]:
    """Medians as lines, memory at its largest; two ratios to `base`: of wall times, and of wall times with the flush of
    what was left unflushed."""
    head = f"{'':28}{'wall s':>8}{'x':>7}{'flush s':>9}{'x':>7}{'cpu s':>8}"
    rows = [f"{head}{'peak RSS MB':>13}{'anonymous MB':>14}{'read MB':>9}{'wrote MB':>10}"]
    reference = statistics.median(sample.wall for sample in samples[base])
    flushed_reference = statistics.median(sample.wall + sample.flush for sample in samples[base])
    for name, of_one in samples.items():
        wall = statistics.median(sample.wall for sample in of_one)
        flush = statistics.median(sample.flush for sample in of_one)
        flushed = statistics.median(sample.wall + sample.flush for sample in of_one)
        read, wrote = (statistics.median(getattr(sample, one) for sample in of_one) / 1e6 for one in ("read", "wrote"))
        cpu = statistics.median(sample.cpu for sample in of_one)
        rss = max(sample.peak_rss for sample in of_one) / 1e6
        anon = max(sample.peak_anon for sample in of_one) / 1e6
        times = f"{wall:8.2f}{wall / reference:7.2f}{flush:9.2f}{flushed / flushed_reference:7.2f}{cpu:8.2f}"
        rows.append(f"{name:28}{times}{rss:13.0f}{anon:14.0f}{read:9.0f}{wrote:10.0f}")
    return rows


def write_json(path: Path, **results: Mapping[str, Sequence[Sample]]) -> None:
    """Every sample, for later reading."""
    content = {
        case: {name: [asdict(sample) for sample in samples] for name, samples in by_name.items()}
        for case, by_name in results.items()
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


class MemoryWatch:
    """Samples the memory of a process tree in a thread: the most that is resident, and the most that is anonymous or
    shared, in bytes."""

    def __init__(self, pid: int) -> None:
        self.peak_rss = self.peak_anon = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._done.set()
        self._thread.join()

    @staticmethod
    def now(pid: int) -> int:
        """Anonymous and shared memory at this moment."""
        fields = [_status(one) for one in _tree(pid)]
        return sum(one.get("RssAnon", 0) + one.get("RssShmem", 0) for one in fields)

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            rss = anon = 0
            for pid in _tree(self._pid):
                fields = _status(pid)
                rss += fields.get("VmRSS", 0)
                anon += fields.get("RssAnon", 0) + fields.get("RssShmem", 0)
            self.peak_rss = max(self.peak_rss, rss)
            self.peak_anon = max(self.peak_anon, anon)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text()
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _counters(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _status(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
