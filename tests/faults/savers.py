"""Jobs of ranks that save, forked from a process that has torch loaded, so that each costs a fraction of a second.

`Savers` starts this file as a program with the shim preloaded, and hands it jobs. A job is a launcher, which is the
leader of a process group of its own, and its ranks, which talk over gloo through a store that lives in the launcher, as
under torchrun. Ranks use the real manager and report what it tells them through a pipe, which outlives them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from faults import shim
from faults.jobs import Job, Outcome

SAVED = "saved "
"""How the mark begins that a rank puts into the trace once `save` has returned; the step's number follows."""
TESTS = Path(__file__).parents[1]
_OTHERS = ("milepost-in-time", "milepost-prune", "milepost-step")
"""Threads that may still be at work where a save was given up."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Savers:
    """The program, and how to ask it.

    kinds:   of engines that it is to be ready for
    mounts:  give it mounts of its own, which vanish with it; takes root
    quiet:   drop what its processes say on stderr, such as warnings of files that could not be removed
    """

    def __init__(self, *kinds: str, mounts: bool = False, quiet: bool = False) -> None:
        self._built = tempfile.TemporaryDirectory(prefix="milepost-shim-")
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim.build(Path(self._built.name))),
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        alone = ["unshare", "-m"] if mounts else []
        self._process = subprocess.Popen(
            [*alone, sys.executable, "-m", "faults.savers", *kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for who asked
        )
        self._launcher: int | None = None

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def start(self, job: Job) -> int:
        """Start a job; the process id of its launcher, which leads its process group."""
        assert self._process.stdin is not None
        job.scratch.mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(job.to_json() + "\n")
        self._process.stdin.flush()
        self._launcher = int(self._answer()["launcher"])
        return self._launcher

    def outcome(self) -> Outcome:
        """Wait for the end of the job that was started last."""
        found = self._answer()
        self._launcher = None
        return Outcome(tuple(found["told"]), tuple(found["signals"]), tuple(found["statuses"]), found["overtime"])

    def run(self, job: Job) -> Outcome:
        """Do one job."""
        self.start(job)
        return self.outcome()

    def close(self) -> None:
        """End the program, and with it what it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._launcher is not None:  # whoever asked for it does not wait for it any more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(timeout=90)
        self._process.stdout.close()
        self._built.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the savers' program has ended; see its stderr"
        return json.loads(line)


def main(kinds: Sequence[str]) -> None:
    from faults import engines

    engines.preload(kinds)
    for line in sys.stdin:
        job = Job.from_json(line)
        read, write = os.pipe()
        launcher = os.fork()
        if launcher == 0:
            os.close(read)
            _launch(job, write)
        os.close(write)
        print(json.dumps({"launcher": launcher}), flush=True)
        told, overtime = _listen(read, launcher, job.seconds)
        os.waitpid(launcher, 0)
        ended = {said["rank"]: said for said in told if said["event"] == "ended"}
        signals, statuses = (
            [ended[rank][how] if rank in ended else None for rank in range(job.ranks)] for how in ("signal", "status")
        )
        answer = {"told": told, "signals": signals, "statuses": statuses, "overtime": overtime}
        print(json.dumps(answer), flush=True)


def _listen(read: int, launcher: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Everything that is said until nobody is left who could say more; whether they had to be ended."""
    content, deadline, overtime = b"", time.monotonic() + seconds, False
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            part = os.read(read, 1 << 16)
            if not part:
                break
            content += part
        elif not overtime:
            overtime, deadline = True, time.monotonic() + 5
            os.killpg(launcher, signal.SIGKILL)
        else:  # a process that even SIGKILL does not end waits for its file system
            break
    os.close(read)
    return [json.loads(line) for line in content.splitlines()], overtime


def _launch(job: Job, pipe: int) -> NoReturn:
    """The launcher: starts the ranks, gives them a store, and waits for them."""
    os.setpgid(0, 0)
    doors, ranks = [], {}
    for rank in range(job.ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            _rank(job, rank, read, pipe)
        os.close(read)
        doors.append(write)
        ranks[pid] = rank
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks
    store = None
    if job.ranks > 1:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for door in doors:
        os.write(door, f"{0 if store is None else store.port}\n".encode())
    stopped: set[int] = set()
    while ranks:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            code = os.waitstatus_to_exitcode(status)
            _say(pipe, ranks.pop(pid), "ended", signal=max(0, -code), status=code if code >= 0 else None)
        if ranks and set(ranks) <= stopped:  # those that hang are ended once the others are done with them
            for left in ranks:
                os.kill(left, signal.SIGKILL)
    os._exit(0)


def _rank(job: Job, rank: int, door: int, pipe: int) -> NoReturn:
    if not job.orphans:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    port = int(os.read(door, 16) or b"0")
    if job.interrupts:
        _end(job, rank, port, pipe)
    try:
        _work(job, rank, port, pipe)
    except BaseException as error:  # noqa: BLE001  whatever it is, the test must hear of it
        _say(pipe, rank, "error", why=f"{type(error).__name__}: {error}", seconds=0.0, step=0, raw=True)
    finally:
        os._exit(0)


def _end(job: Job, rank: int, port: int, pipe: int) -> NoReturn:
    """Be a rank that signals break off, and end as a worker ends; alone as somebody's own loop does, whose interpreter
    clears up."""
    from milepost.checkpoint.preemption import CLOSING, FAILED, StopSignals, Terminated

    os.dup2(os.open(job.scratch / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    closing = job.scratch / CLOSING
    closing.write_text(FAILED)
    StopSignals((), closing).install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        _work(job, rank, port, pipe)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Terminated:
        status = 128 + signal.SIGTERM
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # as a worker does: nothing may break the end
            signal.signal(number, signal.SIG_IGN)
    if job.ranks > 1:
        os._exit(status)
    sys.exit(status)


def _work(job: Job, rank: int, port: int, pipe: int) -> None:
    from faults import engines, mutants

    if job.ranks > 1:
        from datetime import timedelta

        import torch.distributed as dist

        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": str(rank)}
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timedelta(seconds=60))
    mutants.apply(job.mutant)
    run = engines.run(job, rank)
    rules = job.rules if job.at_rank in (None, rank) and not job.each else ()
    shim.watch(job.root, rules, job.scratch / "calls", job.trace, job.mount)
    mode = "auto" if job.resume_from is None else "resume_path"
    resumed = run.manager.resume(mode, job.resume_from) or 0
    _say(pipe, rank, "resumed", step=resumed, holds=not resumed or run.is_at(resumed))
    if job.each:
        _sweep(job, rank, run, pipe)
        return
    step, left = run.manager.report.next_step, job.steps
    while left is None or left > 0:
        if not _save(job, run, step, rank, pipe):
            if not job.again:
                return
            (job.scratch / f"told{rank}").touch()
            while not (job.scratch / "go").exists():
                time.sleep(0.01)
            if not _save(job, run, step, rank, pipe):
                return
        step, left = step + 1, None if left is None else left - 1
    run.manager.close()
    (job.scratch / "done").touch()
    _say(pipe, rank, "closed", step=step - 1)


def _sweep(job: Job, rank: int, run: Any, pipe: int) -> None:
    """Save with the rule at one call after another, until it is at a call that is not made; then once without."""
    import torch.distributed as dist

    from faults import state

    def together() -> None:
        if job.ranks > 1:
            dist.barrier()

    rule, *others = job.rules
    broken = job.at_rank in (None, rank)
    step = run.manager.report.next_step
    for k in itertools.count(1, job.each):
        rules = [replace(rule, k=k), *others] if broken else []
        together()
        calls = job.scratch / f"calls{k}."
        shim.watch(job.root, rules, calls)
        broken_off = False
        try:
            saved = _save(job, run, step, rank, pipe)
        except KeyboardInterrupt:
            saved, broken_off = False, True
        together()
        if rules and rule.act == "hang":
            shim.release(calls)
        while any(thread.name.startswith(_OTHERS) for thread in threading.enumerate()):
            time.sleep(0.001)
        if broken_off:  # it may have its name all the same, and then is whole
            saved = state.newest(job.root) >= step
        shim.watch(job.root, (), calls)
        together()
        if rank == 0:
            found = state.faults_of(job.root, state.Promise(step if saved else step - 1, 0))
            if not saved and state.newest(job.root) >= step:
                found.append(f"step {step} is there, though all were told that it was not saved")
            swept_by_next_start = rule.act.startswith(("hang", "signal"))
            if (
                not saved
                and not swept_by_next_start
                and any(path.name.startswith(".global_step") for path in job.root.iterdir())
            ):
                found.append("a temporary folder was left")
            _say(pipe, rank, "point", step=step, k=k, saved=saved, why="; ".join(found))
        step += saved
        if shim.counted(calls) < k:
            break
    _save(job, run, step, rank, pipe)
    run.manager.close()
    _say(pipe, rank, "closed", step=step)


def _save(job: Job, run: Any, step: int, rank: int, pipe: int) -> bool:
    from milepost.errors import MilepostError

    begun = time.monotonic()
    try:
        run.reach(step)
        run.manager.save(step, blocking=job.blocking)
        if not job.blocking:
            run.reach(step + 1)  # what is written is the state at the call
            run.manager.wait()
    except Exception as error:  # noqa: BLE001  what a rank is told is what is looked at
        raw, why = not isinstance(error, MilepostError), f"{type(error).__name__}: {error}"
        _say(pipe, rank, "error", step=step, why=why, seconds=time.monotonic() - begun, raw=raw)
        return False
    shim.mark(f"{SAVED}{step}")
    _say(pipe, rank, "saved", step=step, seconds=time.monotonic() - begun)
    return True


def _say(pipe: int, rank: int, event: str, **fields: Any) -> None:
    """One line, at once: shorter than a pipe's buffer, it cannot be mixed with another rank's."""
    fields["why"] = str(fields.get("why", ""))[:2000]
    os.write(pipe, (json.dumps({"rank": rank, "event": event, **fields}) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
