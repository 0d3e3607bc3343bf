"""What every rank of a run executes: `python -m milepost.trainer.worker [--config FILE] [key=value ...]`.

Started by torchrun (`milepost train`), whose environment says which rank this is; alone it is a world of one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
import transformers

import milepost
from milepost.checkpoint.comm import TorchCommunicator, on_rank_0
from milepost.checkpoint.events import EVENTS, EventLog, read_events
from milepost.engines import rng
from milepost.errors import CallError, MilepostError
from milepost.trainer.config import config_yaml, load_config
from milepost.trainer.launch import RUN_ID, VERDICT_FILE
from milepost.trainer.logging import TENSORBOARD_DIR, ConsoleLogger, Logger, TensorBoardLogger
from milepost.trainer.loop import PpoTrainer
from milepost.trainer.ranks import Ranks
from milepost.trainer.schema import TrainConfig
from milepost.trainer.setup import build_trainer

CONFIG_COPY = "config.yaml"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit status. See `verdict` for how an error leaves the process."""
    die_with_parent()
    verdict_file = os.environ.get(VERDICT_FILE)
    if verdict_file and Path(verdict_file).exists():
        return 0  # a restart, though another rank has already found that none can help
    parser = argparse.ArgumentParser(prog="python -m milepost.trainer.worker")
    parser.add_argument("--config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    try:
        train(load_config(options.config, options.overrides))
    except MilepostError as error:
        return verdict(error, verdict_file)
    dist.destroy_process_group()
    return 0


def verdict(error: MilepostError, verdict_file: str | None) -> int:
    """Tell the user of an error that no restart can mend, and return the exit status.

    torchrun restarts whatever fails, so under `milepost train` the worker writes the status into a file, ends as if
    well, and `milepost.trainer.agent` ends the run with that status. Who creates the file speaks for all ranks.
    """
    if os.environ.get("MILEPOST_DEBUG"):
        traceback.print_exception(error)
    if verdict_file is None:
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stderr.write(f"milepost: {error}\n")
        return error.exit_status
    try:
        with Path(verdict_file).open("x") as file:
            file.write(str(error.exit_status))
    except FileExistsError:
        return 0
    sys.stderr.write(f"milepost: {error}\n")
    return 0


def train(config: TrainConfig) -> None:
    """Run the config on this rank, from its newest step on or afresh."""
    quiet()
    device = join(config)
    ranks = Ranks(device, TorchCommunicator())
    root = Path(config.trainer.default_local_dir)
    events = EventLog(root / EVENTS) if ranks.rank == 0 else None
    run_id, attempt = on_rank_0(ranks.comm, lambda: _identify(root))
    if events is not None:
        events.write(
            "start",
            run_id=run_id,
            attempt=attempt,
            pid=os.getpid(),
            host=socket.gethostname(),
            world_size=ranks.world_size,
            nproc=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            engine=config.actor_rollout_ref.actor.strategy,
            version=milepost.__version__,
        )
    loggers: list[Logger] = []
    try:
        trainer = build_trainer(config, ranks, run_id=run_id, attempt=attempt)
        rng.seed_all(config.trainer.seed, 0, ranks.world_size, ranks.rank)
        resume(trainer)
        next_step = trainer.manager.report.next_step
        if ranks.rank == 0:
            print("\n".join(trainer.manager.report.lines()), flush=True)
            (root / CONFIG_COPY).write_text(config_yaml(config))
            loggers += make_loggers(config, root, next_step, trainer.total_steps)
        trainer.run(next_step, events, loggers)
    except MilepostError as error:
        if events is not None:
            events.write("stop", reason="error", error=str(error))
        raise
    finally:
        for logger in loggers:
            logger.close()
    if events is not None:
        events.write("stop", step=max(next_step - 1, trainer.total_steps), reason="done")
    trainer.manager.close()
    ranks.comm.close()


def join(config: TrainConfig) -> torch.device:
    """Enter the process group and make this process's arithmetic repeatable; returns its device."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CallError("trainer.device=cuda: torch sees no GPU here; set trainer.device=cpu or auto")
    on_gpu = wanted != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        # On a GPU some operations have no repeatable form (the sums of top-p sampling): a warning is all one can get.
        torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    return device


def resume(trainer: PpoTrainer) -> None:
    """Go on from where the config says."""
    config = trainer.config.trainer
    path = config.resume_from_path
    trainer.manager.resume(config.resume_mode, None if path is None else Path(path).expanduser())


def make_loggers(config: TrainConfig, root: Path, next_step: int, total_steps: int) -> list[Logger]:
    """What `trainer.logger` asks for; on rank 0."""
    loggers: list[Logger] = []
    if "console" in config.trainer.logger:
        steps = {e["step"]: e["reward"] for e in read_events(root / EVENTS) if e["event"] == "step"}
        rewards = [steps[step] for step in sorted(steps) if step < next_step]
        loggers.append(ConsoleLogger(total_steps, next_step, rewards))
    if "tensorboard" in config.trainer.logger:
        loggers.append(TensorBoardLogger(root / TENSORBOARD_DIR, next_step))
    return loggers


def die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun's agent dies: an orphan would train on and write into the run."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGKILL)


def quiet() -> None:
    """Let transformers speak of errors only: every rank would say the same."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _identify(root: Path) -> tuple[str, int]:
    """The run's id, the same for all restarts of one launch, and how many starts of it there have been.

    Counted in the diary: torchrun's own count leaves out restarts for a node that came or went.
    """
    run_id = os.environ.get(RUN_ID) or uuid4().hex
    starts = [event for event in read_events(root / EVENTS) if event["event"] == "start"]
    return run_id, sum(event.get("run_id") == run_id for event in starts)


if __name__ == "__main__":
    sys.exit(main())
