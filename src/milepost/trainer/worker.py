"""What every rank of a run executes: `python -m milepost.trainer.entry [--config FILE] [key=value ...]`.

Started by torchrun (`milepost train`), whose environment says which rank this is; alone it is a world of one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist
import transformers

import milepost
from milepost.checkpoint.comm import TorchCommunicator, on_rank_0
from milepost.checkpoint.diary.events import EVENTS, EventLog, read_events
from milepost.checkpoint.files import make_directory
from milepost.checkpoint.lock import exclusive
from milepost.checkpoint.preemption import (
    CLOSING,
    RESIZE,
    Durations,
    Preemption,
    Stop,
    StopSignals,
    Terminated,
    deadline_of,
)
from milepost.checkpoint.probe import probe_root
from milepost.engines import rng
from milepost.engines.cpu_compat import choose_cpu
from milepost.errors import CallError, LostRankError, MilepostError, UploadError
from milepost.trainer.config import config_yaml, load_config
from milepost.trainer.earlier import earlier_durations, earlier_phases, earlier_rewards
from milepost.trainer.ending import crash, done, stopped, told, verdict
from milepost.trainer.launch import RUN_ID, VERDICT_FILE
from milepost.trainer.logging import TENSORBOARD_DIR, ConsoleLogger, Logger, TensorBoardLogger
from milepost.trainer.loop import PpoTrainer, Stopped
from milepost.trainer.ranks import Ranks
from milepost.trainer.schema import DEEPSPEED, TrainConfig
from milepost.trainer.setup import build_trainer, run_directory
from milepost.trainer.stall import END, FOLDER, LOGGING, MODELS, RESUME, START, StallLimits, StallWatch

CONFIG_COPY = "config.yaml"
_MEETING_SECONDS = 1800.0  # in which ranks come to the same save or resume
_LINGER = 5.0
_TO_PART = 10.0  # seconds that a process which stops needs for itself at the end


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit status. See `verdict` for how an error leaves the process."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:  # also one that came while an error was being told of
        return 128 + signal.SIGTERM


def _main(arguments: Sequence[str] | None) -> int:
    signal.signal(signal.SIGINT, _interrupt)
    verdict_file = os.environ.get(VERDICT_FILE)
    if verdict_file and Path(verdict_file).exists():
        return 0  # a restart, though another rank has already found that none can help
    parser = argparse.ArgumentParser(prog="python -m milepost.trainer.entry")
    parser.add_argument("--config", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    root = Path()
    ending: Stopped | None = None
    numbers: list[int] = [signal.SIGINT]
    try:
        config = load_config(options.config, options.overrides)
        signals = StopSignals(
            config.trainer.stop_signals, None if not verdict_file else Path(verdict_file).with_name(CLOSING)
        )
        signals.install()
        numbers += [*signals.numbers, signal.SIGTERM]
        root = run_directory(config)
        device = choose_device(config)
        quiet(device)
        join(device)
        ending = train(config, device, signals)
    except LostRankError as error:
        return crash(error, root)
    except MilepostError as error:
        return verdict(error, verdict_file)
    except Exception as error:  # noqa: BLE001  the one handler at the top
        return crash(error, root)
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # all is said and done: nothing may break the end
    leave(config)
    return 0 if ending is None else stopped(ending, signals, verdict_file)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    # torchrun's agent passes on a signal that the terminal has sent already: the second must not break the clearing up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def train(config: TrainConfig, device: torch.device, signals: StopSignals | None = None) -> Stopped | None:
    """Run the config as one rank of the process group, from the newest step on or afresh. Returns why it was stopped,
    None where it came to its end."""
    # Here every rank makes every call: one that does not come hangs, which the watch over phases is for. Ranks wait for
    # one another longer than for their files, so that it is told which file it was.
    ranks = Ranks(device, TorchCommunicator(3 * config.trainer.save_timeout, _MEETING_SECONDS))
    root = run_directory(config)
    signals = StopSignals(()) if signals is None else signals
    with contextlib.ExitStack() as held:
        stalls = held.enter_context(contextlib.closing(watch_for_stalls(config, ranks)))
        with stalls.phase(START):
            preemption = watch_for_stops(config, ranks, signals)
            probe_root(ranks.comm, root)
            run_id, attempt = on_rank_0(ranks.comm, lambda: _enter(root, held))
            on_rank_0(ranks.comm, lambda: _try_to_write(root, config))
        ending = _train(config, ranks, run_id, attempt, preemption, stalls)
        ranks.comm.close()
    return ending


def _train(
    config: TrainConfig, ranks: Ranks, run_id: str, attempt: int, preemption: Preemption, stalls: StallWatch
) -> Stopped | None:
    root = run_directory(config)
    events = EventLog(root / EVENTS) if ranks.rank == 0 else None
    with stalls.phase(START):
        durations, phases = on_rank_0(ranks.comm, lambda: _earlier(root))
        stalls.remember(phases)
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
    trainer: PpoTrainer | None = None
    try:
        with stalls.phase(MODELS):
            trainer = build_trainer(
                config, ranks, run_id=run_id, attempt=attempt, preemption=preemption, durations=Durations(durations)
            )
            rng.seed_all(config.trainer.seed, 0, ranks.world_size, ranks.rank)
        with stalls.phase(RESUME):
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
            with stalls.phase(LOGGING):
                loggers += make_loggers(config, root, next_step, trainer.total_steps)
        ending = trainer.run(next_step, events, loggers, stalls)
    except BaseException as error:
        _linger(trainer)
        if events is not None:
            # A lost rank is a kill, after which a restart goes on, and no stop.
            if isinstance(error, KeyboardInterrupt | Terminated):
                _note_signal(events)
            elif isinstance(error, MilepostError) and not isinstance(error, LostRankError):
                events.write("stop", reason="error", error=str(error))
        raise
    finally:
        with stalls.phase(LOGGING):
            for logger in loggers:
                logger.close()
    with stalls.phase(END):
        try:
            return _close(config, trainer, next_step, ending)
        except (KeyboardInterrupt, Terminated):
            if events is not None:
                _note_signal(events)
            raise


def _note_signal(events: EventLog) -> None:
    """A signal breaks the run off. Under an agent it may be the death of another rank; the agent knows, and writes
    it."""
    if VERDICT_FILE not in os.environ:
        events.write("stop", reason="signal")


def _close(config: TrainConfig, trainer: PpoTrainer, next_step: int, ending: Stopped | None) -> Stopped | None:
    """The run is over: what is on its way arrives, and the diary has its end. A stop that comes now leaves uploads to
    the next start. Returns why the run was stopped, None where it came to its end."""
    rank = trainer.ranks.rank
    if ending is None:
        step = max(next_step - 1, trainer.total_steps)
        try:
            trainer.manager.close(step=step, meanwhile=lambda: trainer.preemption.poll(0.0))
        except Stop as stop:
            ending = Stopped(stop, step, saved=True)
        else:
            if rank == 0 and step >= next_step:
                print(done(run_directory(config), step, next(iter(trainer.models.roles))), flush=True)
            return None
    why = ending.why
    # Uploads get what is left until the agent ends this process.
    patience = max(0.0, config.trainer.shutdown_timeout - _TO_PART - (time.monotonic() - why.since))
    try:
        trainer.manager.close(why.reason, patience=patience, signal=why.signal, step=ending.step, saved=ending.saved)
    except UploadError as error:  # it is durable here: that the network fails changes nothing about the stop
        if rank == 0:
            sys.stderr.write(f"milepost: {error}; the next start uploads it\n")
    if rank == 0 and why.reason != RESIZE:
        print(told(ending), flush=True)
    return ending


def _earlier(root: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    events = read_events(root / EVENTS)
    return earlier_durations(events), earlier_phases(events)


def _linger(trainer: PpoTrainer | None) -> None:
    """Before an end in a hurry: what all ranks have written already may still become a step."""
    if trainer is not None:
        trainer.manager.linger(_LINGER)


def watch_for_stalls(config: TrainConfig, ranks: Ranks) -> StallWatch:
    """A watch on this rank's phases, if the config asks for one; else one that watches nothing."""
    trainer, root = config.trainer, run_directory(config)
    limits = StallLimits(
        trainer.stall_factor,
        trainer.stall_floor,
        trainer.stall_once,
        2 * trainer.save_timeout,  # a save may wait for the one before it
        restart=trainer.stall_action == "restart",
    )
    return StallWatch(
        None if trainer.stall_action == "off" else limits,
        root / FOLDER,
        EventLog(root / EVENTS),
        ranks.rank,
        ranks.world_size,
    )


def watch_for_stops(config: TrainConfig, ranks: Ranks, signals: StopSignals) -> Preemption:
    """Where the ranks agree to stop: on these signals, and before the deadline that the config names."""
    variable = config.trainer.esi_deadline_env
    deadline = ranks.each(lambda: deadline_of(variable, os.environ))
    if variable is not None and deadline is None and ranks.rank == 0:
        sys.stderr.write(f"milepost: trainer.esi_deadline_env: ${variable} is not set, so no deadline is watched\n")
    return Preemption(signals, ranks.highest, deadline, config.trainer.esi_redundant_time)


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
    part.write_text(config_yaml(config), encoding="utf-8")
    part.replace(root / CONFIG_COPY)


def _identify(root: Path) -> tuple[str, int]:
    """The run's id, the same for all restarts of one launch, and how many starts of it there have been.

    Counted in the diary: torchrun's own count leaves out restarts for a node that came or went.
    """
    run_id = os.environ.get(RUN_ID) or uuid4().hex
    starts = [event for event in read_events(root / EVENTS) if event["event"] == "start"]
    return run_id, sum(event.get("run_id") == run_id for event in starts)
