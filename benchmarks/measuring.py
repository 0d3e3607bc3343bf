"""Running commands side by side: wall time, CPU, memory of the whole process tree, bytes read and written."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.005


@dataclass(frozen=True)
class Sample:
    """One run of one command.

    wall, cpu:    seconds; cpu of the process and its children
    peak_rss:     largest resident memory of the tree, bytes, mapped files included
    peak_anon:    largest anonymous and shared memory of the tree, bytes
    """

    wall: float
    cpu: float
    peak_rss: int
    peak_anon: int


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: its name, its command, and what clears the way before each run."""

    name: str
    command: Sequence[str]
    before: Callable[[], None]


def run(command: Sequence[str], *, limit_seconds: float = 1800) -> Sample:
    """Run a command to its end and measure it. Raises CalledProcessError, with its stderr shown, where it fails."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        watch = _MemoryWatch(process.pid)
        try:
            _, stderr = process.communicate(timeout=limit_seconds)
        except BaseException:
            process.kill()
            raise
        wall = time.perf_counter() - begun
        watch.stop()
    if process.returncode:
        sys.stderr.write(stderr)
        raise subprocess.CalledProcessError(process.returncode, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return Sample(wall, cpu, watch.peak_rss, watch.peak_anon)


def alternate(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Sample]]:
    """Run all contenders in turn, `rounds` times: A B C A B C ..."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            contender.before()
            os.sync()
            samples[contender.name].append(run(contender.command))
            last = samples[contender.name][-1]
            print(f"  round {number + 1}  {contender.name:24} {last.wall:7.2f} s", file=sys.stderr, flush=True)
    return samples


def table(samples: Mapping[str, Sequence[Sample]], base: str) -> list[str]:
    """Medians as lines; the ratio of each wall time to that of `base`."""
    rows = [f"{'':26}{'wall s':>9}{'x':>8}{'cpu s':>9}{'peak RSS MB':>13}{'anonymous MB':>14}"]
    reference = statistics.median(sample.wall for sample in samples[base])
    for name, of_one in samples.items():
        wall = statistics.median(sample.wall for sample in of_one)
        cpu = statistics.median(sample.cpu for sample in of_one)
        rss = max(sample.peak_rss for sample in of_one) / 1e6
        anon = max(sample.peak_anon for sample in of_one) / 1e6
        rows.append(f"{name:26}{wall:9.2f}{wall / reference:8.2f}{cpu:9.2f}{rss:13.0f}{anon:14.0f}")
    return rows


def write_json(path: Path, **results: Mapping[str, Sequence[Sample]]) -> None:
    """Every sample, for later reading."""
    content = {
        case: {name: [asdict(sample) for sample in samples] for name, samples in by_name.items()}
        for case, by_name in results.items()
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


class _MemoryWatch:
    """Samples the memory of a process tree in a thread."""

    def __init__(self, pid: int) -> None:
        self.peak_rss = self.peak_anon = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

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


def _status(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
