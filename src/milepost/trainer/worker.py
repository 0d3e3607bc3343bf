"""What every rank of a run executes: `python -m milepost.trainer.entry [--config FILE] [key=value ...]`.

Started by torchrun (`milepost train`), whose environment says which rank this is; alone it is a world of one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist
import transformers

import milepost
from milepost.checkpoint.comm import TorchCommunicator, on_rank_0
from milepost.checkpoint.events import EVENTS, EventLog, read_events
from milepost.checkpoint.files import make_directory
from milepost.checkpoint.lock import exclusive
from milepost.engines import rng
from milepost.engines.cpu_compat import choose_cpu
from milepost.errors import CallError, MilepostError
from milepost.trainer.config import config_yaml, load_config
from milepost.trainer.launch import RUN_ID, VERDICT_FILE
from milepost.trainer.logging import TENSORBOARD_DIR, ConsoleLogger, Logger, TensorBoardLogger
from milepost.trainer.loop import PpoTrainer
from milepost.trainer.ranks import Ranks
from milepost.trainer.schema import DEEPSPEED, TrainConfig
from milepost.trainer.setup import build_trainer, run_directory

CONFIG_COPY = "config.yaml"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote worker")
"""In the words of gloo and NCCL."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit status. See `verdict` for how an error leaves the process."""
    if "RANK" in os.environ:
        die_with_parent()
    for number in _STOPS:
        signal.signal(number, _stop)
    verdict_file = os.environ.get(VERDICT_FILE)
    if verdict_file and Path(verdict_file).exists():
        return 0  # a restart, though another rank has already found that none can help
    parser = argparse.ArgumentParser(prog="python -m milepost.trainer.entry")
    parser.add_argument("--config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    root = Path()
    try:
        config = load_config(options.config, options.overrides)
        root = run_directory(config)
        device = choose_device(config)
        quiet(device)
        join(device)
        train(config, device)
    except MilepostError as error:
        return verdict(error, verdict_file)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:
        return 128 + signal.SIGTERM
    except Exception as error:  # noqa: BLE001  the one handler at the top
        return crash(error, root)
    finally:
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)  # there is nothing left to unwind
    leave(config)
    return 0


class Terminated(BaseException):
    """SIGTERM came: unwinds as Ctrl-C does, so that nothing half-written is left."""


def _stop(number: int, _frame: object) -> NoReturn:
    # torchrun's agent passes on a signal that the terminal has sent already: the second must not break the clearing up.
    for again in _STOPS:
        signal.signal(again, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


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


def crash(error: Exception, root: Path) -> int:
    """Tell of an error that a restart may mend, in one line; torchrun sees the status and restarts all workers."""
    rank = os.environ.get("RANK", "0")
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("MILEPOST_DEBUG"):
        sys.stderr.write(trace)
    if any(words in str(error) for words in _PEER_GONE):
        sys.stderr.write(f"milepost: rank {rank}: another rank is gone, so this one stops\n")
        return MilepostError.exit_status
    file = root / f"crash_rank_{rank}.txt"
    where = f"traceback in {file}"
    try:
        file.write_text(trace)
    except OSError:
        where = "for a traceback set MILEPOST_DEBUG=1"
    said = (str(error).strip().splitlines() or [""])[0]
    sys.stderr.write(f"milepost: rank {rank}: {type(error).__name__}: {said} ({where})\n")
    return MilepostError.exit_status


def train(config: TrainConfig, device: torch.device) -> None:
    """Run the config as one rank of the process group, from the newest step on or afresh."""
    ranks = Ranks(device, TorchCommunicator())
    root = run_directory(config)
    with contextlib.ExitStack() as held:
        run_id, attempt = on_rank_0(ranks.comm, lambda: _enter(root, held))
        on_rank_0(ranks.comm, lambda: _try_to_write(root, config))
        _train(config, ranks, run_id, attempt)
        ranks.comm.close()


def _train(config: TrainConfig, ranks: Ranks, run_id: str, attempt: int) -> None:
    root = run_directory(config)
    events = EventLog(root / EVENTS) if ranks.rank == 0 else None
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
            if next_step > trainer.total_steps:
                print(
                    f"nothing to train: step {trainer.total_steps} was the last; for more raise "
                    "trainer.total_training_steps or trainer.total_epochs",
                    flush=True,
                )
            loggers += make_loggers(config, root, next_step, trainer.total_steps)
        trainer.run(next_step, events, loggers)
    except (KeyboardInterrupt, Terminated):
        # Under an agent this may be the death of another rank; the agent knows, and writes it.
        if events is not None and VERDICT_FILE not in os.environ:
            events.write("stop", reason="signal")
        raise
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


def choose_device(config: TrainConfig) -> torch.device:
    """This process's device, with arithmetic made repeatable on it if the config asks for that."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CallError("trainer.device=cuda: torch sees no GPU here; set trainer.device=cpu or auto")
    on_gpu = wanted != "cpu" and torch.cuda.is_available()
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        # On a GPU some operations have no repeatable form (the sums of top-p sampling): a warning is all one can get.
        torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")


def join(device: torch.device) -> None:
    """Enter the process group that torchrun's environment describes; without one, a group of this process alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]


def leave(config: TrainConfig) -> None:
    """Leave the process group once all is done. The process must then end without clearing up."""
    if DEEPSPEED in (config.actor_rollout_ref.actor.strategy, config.critic.strategy):
        # What DeepSpeed holds of the group makes taking it apart abort or hang, one time in four.
        dist.barrier()
    else:
        dist.destroy_process_group()


def resume(trainer: PpoTrainer) -> None:
    """Go on from where the config says."""
    config = trainer.config.trainer
    path = config.resume_from_path
    trainer.manager.resume(config.resume_mode, None if path is None else Path(path).expanduser())


def make_loggers(config: TrainConfig, root: Path, next_step: int, total_steps: int) -> list[Logger]:
    """What `trainer.logger` asks for; on rank 0."""
    loggers: list[Logger] = []
    if "console" in config.trainer.logger:
        loggers.append(ConsoleLogger(total_steps, next_step, earlier_rewards(read_events(root / EVENTS), next_step)))
    if "tensorboard" in config.trainer.logger:
        loggers.append(TensorBoardLogger(root / TENSORBOARD_DIR, next_step))
    return loggers


def earlier_rewards(events: Sequence[Mapping[str, Any]], next_step: int) -> list[float]:
    """The mean rewards of the steps before `next_step` as the diary has them, in order; odd lines are left out."""
    rewards: dict[int, float] = {}
    for event in events:
        step, reward = event.get("step"), event.get("reward")
        if event["event"] == "step" and isinstance(step, int) and isinstance(reward, int | float):
            rewards[step] = float(reward)
    return [rewards[step] for step in sorted(rewards) if step < next_step]


def die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun's agent dies: an orphan would train on and write into the run."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), signal.SIGKILL)


def quiet(device: torch.device) -> None:
    """Let transformers speak of errors only: every rank would say the same. FSDP2 warns of in-place changes to what
    a model returns; nothing here makes any. DeepSpeed, which transformers imports where it is installed, warns of a
    machine without an accelerator."""
    if device.type == "cpu":
        choose_cpu()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    # It tells of Apex and Transformer Engine, which are not used, and calls torch by names that torch will drop.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _enter(root: Path, held: contextlib.ExitStack) -> tuple[str, int]:
    """Take the run's folder for this run alone until `held` closes; the run's id and number of earlier starts."""
    make_directory(root)
    run_id, attempt = _identify(root)
    held.enter_context(exclusive(root, run_id))
    return run_id, attempt


def _try_to_write(root: Path, config: TrainConfig) -> None:
    """Put the whole config into the run's folder: for the record, and to find out early that it cannot be written."""
    part = root / f".{CONFIG_COPY}.tmp"
    part.write_text(config_yaml(config))
    part.replace(root / CONFIG_COPY)


def _identify(root: Path) -> tuple[str, int]:
    """The run's id, the same for all restarts of one launch, and how many starts of it there have been.

    Counted in the diary: torchrun's own count leaves out restarts for a node that came or went.
    """
    run_id = os.environ.get(RUN_ID) or uuid4().hex
    starts = [event for event in read_events(root / EVENTS) if event["event"] == "start"]
    return run_id, sum(event.get("run_id") == run_id for event in starts)
