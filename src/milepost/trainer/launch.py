"""`milepost train`: from a call to torchrun's agent, which keeps the workers alive.

Imports no torch, so that a wrong config is refused at once; the process is then replaced by the agent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from milepost.checkpoint.diary.events import EVENTS
from milepost.checkpoint.remote.folder import url_of
from milepost.engines.deepspeed.install import check_installed
from milepost.engines.megatron import install as megatron_install
from milepost.errors import CallError, NotFoundError, WriteError
from milepost.trainer.config import load_config
from milepost.trainer.schema import DEEPSPEED, MEGATRON, TrainConfig
from milepost.wording import disk_error

RUN_ID = "MILEPOST_RUN_ID"
"""Environment variable: the same for all restarts of one launch."""

VERDICT_FILE = "MILEPOST_VERDICT_FILE"
"""Environment variable: where a worker leaves the exit status of an error that no restart can mend."""

EVENTS_FILE = "MILEPOST_EVENTS_FILE"
"""Environment variable, on one machine: the run's diary, in which the agent notes that somebody stopped the run."""

STOP_SIGNALS_VARIABLE = "MILEPOST_STOP_SIGNALS"
"""Environment variable: names of the signals that the agent hands on to its workers, with commas."""

SHUTDOWN_TIMEOUT = "MILEPOST_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds after which the agent kills workers that go on after such a signal."""

AGENT = "milepost.trainer.agent"
WORKER = "milepost.trainer.entry"
_MONITOR_SECONDS = 0.2  # how often the agent looks at its workers: a dead one is seen within so long


@dataclass(frozen=True)
class LaunchOptions:
    """The options of torchrun that `milepost train` takes. None leaves torchrun's default, or the config's number.

    nproc:         processes on this machine; default trainer.n_gpus_per_node
    nnodes:        machines, "2" or "1:4"; default trainer.nnodes
    node_rank:     of this machine, for the static rendezvous
    max_restarts:  how often the workers are restarted before the run is given up
    """

    nproc: int | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    max_restarts: int = 3


def launch(config_file: Path | None, overrides: Sequence[str], options: LaunchOptions) -> int:
    """Check the config, then become torchrun's agent. Under torchrun already, be one of its workers.

    Returns only in that second case, with the exit status. Raises ConfigError, NotFoundError or CallError for what can
    be known before a process is started.
    """
    if options.nproc is not None:
        overrides = [*overrides, f"trainer.n_gpus_per_node={options.nproc}"]
    config = load_config(config_file, overrides)
    check(config)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        make_folder(Path(config.trainer.default_local_dir).expanduser())
        become(command(config, config_file, overrides, options), environment(os.environ, config, options))
    from milepost.trainer import worker  # noqa: PLC0415  it imports torch

    return worker.main(worker_arguments(config_file, overrides))


def become(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that signals and the exit status are the agent's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(arguments[0], list(arguments), dict(env))


def check(config: TrainConfig) -> None:
    """Refuse paths that do not exist, and an engine that is not installed, before anything starts."""
    model, critic = config.actor_rollout_ref.model, config.critic.model
    named = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "critic.model.path": critic.path,
    }
    for key, value in named.items():
        if value is not None and not Path(value).expanduser().is_dir():
            raise NotFoundError(f"{key}={value}: no such directory; models are read from local directories")
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for file in files:
            if not Path(file).expanduser().is_file():
                raise NotFoundError(f"{key}: {file}: no such file")
    reward_file = (config.reward.path or "").rpartition(":")[0]
    if reward_file.endswith(".py") and not Path(reward_file).expanduser().is_file():
        raise NotFoundError(f"reward.path={config.reward.path}: no such file")
    trainer = config.trainer
    zeros = [
        role.deepspeed_config for role in (config.actor_rollout_ref.actor, config.critic) if role.strategy == DEEPSPEED
    ]
    if zeros:
        check_installed(offload_optimizer=any(zero.offload_optimizer for zero in zeros))
    if config.actor_rollout_ref.actor.strategy == MEGATRON:
        megatron_install.check_installed()
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            raise CallError("trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder")
        if url_of(trainer.resume_from_path) is None and not Path(trainer.resume_from_path).expanduser().is_dir():
            raise NotFoundError(f"trainer.resume_from_path={trainer.resume_from_path}: no such folder")


def make_folder(folder: Path) -> None:
    """Make the run's folder; refuse one that cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"trainer.default_local_dir={folder} cannot be made: {disk_error(error)}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WriteError(f"trainer.default_local_dir={folder} cannot be written: choose another place")


def worker_arguments(config_file: Path | None, overrides: Sequence[str]) -> list[str]:
    """The worker's own arguments: the same words, which every node reads for itself."""
    return [*([] if config_file is None else ["--config", str(config_file)]), "--", *overrides]


def command(
    config: TrainConfig, config_file: Path | None, overrides: Sequence[str], options: LaunchOptions
) -> list[str]:
    """The agent's command line: torchrun's options, then the worker and its arguments."""
    nnodes = options.nnodes or str(config.trainer.nnodes)
    arguments = [sys.executable, "-m", AGENT]
    named = {
        "nnodes": nnodes,
        "nproc-per-node": config.trainer.n_gpus_per_node,
        "max-restarts": options.max_restarts,
        "monitor-interval": _MONITOR_SECONDS,
        "node-rank": options.node_rank,
        "rdzv-backend": options.rdzv_backend,
        "rdzv-endpoint": options.rdzv_endpoint,
        "rdzv-id": options.rdzv_id,
        "rdzv-conf": options.rdzv_conf,
    }
    if nnodes == "1" and options.rdzv_endpoint is None:
        arguments.append("--standalone")
    elif options.rdzv_endpoint is None:
        raise CallError(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on every machine")
    elif options.rdzv_id is None:
        raise CallError(f"--nnodes {nnodes} needs --rdzv-id NAME, the same on every machine: it names the run")
    elif options.rdzv_backend is None:
        named["rdzv-backend"] = "c10d"
    arguments += [f"--{name}={value}" for name, value in named.items() if value is not None]
    return [*arguments, "-m", WORKER, *worker_arguments(config_file, overrides)]


def environment(base: Mapping[str, str], config: TrainConfig, options: LaunchOptions) -> dict[str, str]:
    """The agent's environment, which its workers inherit."""
    run = Path(config.trainer.default_local_dir).expanduser().absolute()
    threads = max(1, (os.cpu_count() or 1) // config.trainer.n_gpus_per_node)
    return {
        "OMP_NUM_THREADS": str(threads),  # else torchrun takes 1, and warns
        # Threads that wait by spinning take the cores from those that work: measured 20 times slower on busy cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        RUN_ID: options.rdzv_id or uuid4().hex,
        # Of several machines one may be stopped while the others train on: that is no end of the run.
        **({EVENTS_FILE: str(run / EVENTS)} if (options.nnodes or str(config.trainer.nnodes)) == "1" else {}),
        **base,
        STOP_SIGNALS_VARIABLE: ",".join(config.trainer.stop_signals),
        SHUTDOWN_TIMEOUT: f"{config.trainer.shutdown_timeout:g}",
        # With torch 2.13's shared store a job that shrank and grows again deadlocks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
