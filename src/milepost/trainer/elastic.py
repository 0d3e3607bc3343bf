"""torchrun's agent, made to pass a stop on in order.

torchrun's own agent raises at a signal, ends its workers and with them the run. This one hands the signal to them and
watches on: they save and end as if well, and leave the exit status in a file. Before it ends workers by itself it says
so in another file, so that they do not take its SIGTERM for a scheduler's:

    "failed"   one of them has died: the others end at once
    "resize"   machines have come: they save, end, and start again with them
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from milepost.checkpoint.preemption import FAILED, RESIZE

_TORCHS_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_KILL_SECONDS = 10


class AgentStopped(BaseException):
    """The agent was asked to stop where no worker could save for it: there was none, or one had died, or they were
    only being started; or they had the signal, and did not end in time.

    number:       the signal
    had_workers:  whether they had it, and were killed since they did not end in time
    """

    def __init__(self, number: int, *, had_workers: bool = False) -> None:
        super().__init__(number)
        self.number = number
        self.had_workers = had_workers


class Agent(LocalElasticAgent):
    """See the module.

    stops:     the signals that are handed on
    closing:   the file for the workers
    patience:  seconds for which workers may go on after a stop, or after the machines have changed
    stopping:  the signal that was handed on, None for none
    """

    def __init__(
        self, spec: WorkerSpec, *, stops: Sequence[signal.Signals], closing: Path, patience: float, **rest: Any
    ) -> None:
        super().__init__(spec, **rest)
        self._stops = stops
        self._closing = closing
        self._patience = patience
        self._have_workers = False
        self._changing = False  # workers are being started or ended
        self._give_up = 0.0
        self.stopping: signal.Signals | None = None
        self._listen()

    def _listen(self) -> None:
        for number in self._stops:
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: object) -> None:
        if self.stopping is not None:
            return  # they have it, and are saving
        self.stopping = signal.Signals(number)
        if self._changing:
            return  # broken off in the middle, workers would be left that nobody knows; who changes them looks after it
        if not self._have_workers:
            raise AgentStopped(number)
        self._give_up = time.monotonic() + self._patience
        self._remaining_restarts = 0
        for pid in self._pids():
            if _is_running(pid):
                os.kill(pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._closing.unlink(missing_ok=True)
        self._changing = True
        found: dict[int, Any] = super()._start_workers(worker_group)
        self._have_workers = True
        self._changing = False
        self._listen()  # older torch takes SIGTERM when it starts workers
        if self.stopping is not None:  # while they were started: they have nothing to save yet
            self._shutdown(signal.SIGKILL, _KILL_SECONDS)
            raise AgentStopped(self.stopping)
        return found

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.stopping is None:
            super()._restart_workers(worker_group)
        elif worker_group.state != WorkerState.HEALTHY:
            raise AgentStopped(self.stopping)  # it came just after one of them had died
        # Else machines have come while workers save for a stop: they are let end.

    def _stop_workers(self, worker_group: WorkerGroup, *rest: Any) -> None:
        # After a death they are gone already; else machines have come, and there is something to save.
        if not self._closing.exists():
            self._say(RESIZE)
        asked_before = self.stopping is not None
        self._have_workers = False
        self._changing = True
        self._shutdown(signal.SIGTERM, int(self._patience))
        self._changing = False
        if self.stopping is not None and not asked_before:
            raise AgentStopped(self.stopping)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.stopping is not None and time.monotonic() > self._give_up:
            sys.stderr.write(
                f"milepost: the workers did not end within {self._patience:g} seconds of {self.stopping.name} "
                "(trainer.shutdown_timeout): killed\n"
            )
            self._shutdown(signal.SIGKILL, _KILL_SECONDS)
            raise AgentStopped(self.stopping, had_workers=True)
        # torch ends the others in the same call in which it sees that one has died.
        died = any(_ended_badly(pid) for pid in self._pids())
        if died:
            self._say(FAILED)
        asked_before, restarts = self.stopping is not None, self._remaining_restarts
        result: RunResult = super()._monitor_workers(worker_group)
        if died and restarts and self.stopping is not None and not asked_before:
            raise AgentStopped(self.stopping)  # meanwhile; else they would have been started again
        return result

    def _say(self, why: str) -> None:
        self._closing.parent.mkdir(exist_ok=True)  # what tidies up /tmp may have taken it away from a long run
        self._closing.write_text(why, encoding="utf-8")

    def _pids(self) -> list[int]:
        return [] if self._pcontext is None else list(self._pcontext.pids().values())


def _end_of(pid: int) -> os.waitid_result | None:
    """How a child has ended, None where it runs; it is left for others to wait for. Raises ChildProcessError where
    somebody has done so: its number may be another process's by now."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _is_running(pid: int) -> bool:
    try:
        return _end_of(pid) is None
    except ChildProcessError:
        return False


def _ended_badly(pid: int) -> bool:
    try:
        end = _end_of(pid)
    except ChildProcessError:
        return False
    return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)


def run_agent(
    arguments: Sequence[str], stops: Sequence[signal.Signals], closing: Path, patience: float
) -> signal.Signals | None:
    """Be the agent that torchrun's arguments describe, until the workers have ended well. Returns the signal that was
    handed on to them, None for none.

    Raises ChildFailedError where they kept failing, AgentStopped where it was stopped without them, and what torch
    raises.
    """
    kept = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if signal.Signals[name] not in stops]
    os.environ[_TORCHS_SIGNALS] = ",".join(kept)
    options = run.parse_args(list(arguments))  # type: ignore[no-untyped-call]
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", uuid4().hex
    config, command, worker_arguments = run.config_from_args(options)
    rendezvous = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    address, _, port = config.rdzv_endpoint.rpartition(":") if config.rdzv_backend == "static" else ("", "", "")
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(worker_arguments),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address or None,
        master_port=int(port) if port else None,
        local_addr=config.local_addr,
    )
    agent = Agent(
        spec,
        stops=stops,
        closing=closing,
        patience=patience,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
    )
    leave_open = False
    try:
        result = agent.run()
    except (AgentStopped, SignalException):
        leave_open = True  # the other machines go on
        raise
    finally:
        if not leave_open:
            rendezvous.shutdown()
    if result is not None and result.is_failed():
        raise ChildFailedError(config.role, result.failures)
    return agent.stopping
