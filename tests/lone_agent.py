"""torchrun's agent as milepost has made it, alone, with workers that take long to save: for tests of its signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranks import PRELOADED

WORKER = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def note(*_):
    (here / f"asked.{os.getpid()}").touch()
signal.signal(signal.SIGTERM, note)
(here / f"worker.{os.getpid()}").touch()
for _ in range(300):
    if (here / "may-end").exists():
        sys.exit(0)
    if (here / f"die.{os.getpid()}").exists():
        sys.exit(1)
    time.sleep(0.05)
(here / "outlived").touch()
time.sleep(600)
"""
"""Takes 15 seconds to save, or none once it may end; one that is to die does."""


def be_agent(here: Path, nproc: int, patience: float, *, signalled_in_start: bool = False, restarts: int = 0) -> None:
    """The agent of one machine, whose peers come when there is a file `more-machines`."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    from milepost.trainer import agent, launch

    class Meeting(RendezvousHandler):
        """Where this machine meets nobody: each round is complete at once."""

        def get_backend(self) -> str:
            return "alone"

        def next_rendezvous(self) -> RendezvousInfo:
            with (here / "rounds").open("a") as rounds:
                rounds.write("x")
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

        def num_nodes_waiting(self) -> int:
            return int((here / "more-machines").exists())

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def get_run_id(self) -> str:
            return "alone"

        def shutdown(self) -> bool:
            return True

    class Signalled(subprocess.Popen):  # type: ignore[type-arg]
        """The worst moment: the first worker is there, and nobody has noted its number yet."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            with (here / "started").open("a") as started:
                started.write(f"{self.pid}\n")
            os.kill(os.getpid(), signal.SIGTERM)

    rendezvous_handler_registry.register("alone", lambda parameters: Meeting())
    if signalled_in_start:
        subprocess_handler.Popen = Signalled  # type: ignore[misc]
    os.environ |= {launch.STOP_SIGNALS_VARIABLE: "SIGTERM", launch.SHUTDOWN_TIMEOUT: str(patience)}
    words = ["--rdzv-backend=alone", "--rdzv-endpoint=here", f"--nproc-per-node={nproc}", "--monitor-interval=0.05"]
    sys.exit(agent.main([*words, f"--max-restarts={restarts}", "--no-python", sys.executable, "-c", WORKER, str(here)]))


def started(here: Path, nproc: int = 1, patience: float = 60.0, **options: Any) -> Any:
    """The agent as a process of its own; `options` are more of `be_agent`'s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=be_agent, args=(here, nproc, patience), kwargs=options)
    process.start()
    return process
