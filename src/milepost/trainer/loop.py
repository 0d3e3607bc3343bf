"""The training loop: PPO step by step, validated, saved and told."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.checkpoint.commit import SavedStep
from milepost.checkpoint.diary.events import EventLog
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.preemption import Durations, Preemption, Stop
from milepost.engines import rng
from milepost.errors import CallError, EarlierStepError, LostRankError, MilepostError, UploadError, WriteError
from milepost.trainer.batch import Spread
from milepost.trainer.data import PromptBatch, PromptDataset, collate
from milepost.trainer.experience import Collector, Models
from milepost.trainer.kl import KLController
from milepost.trainer.logging import Logger
from milepost.trainer.metrics import Stopwatch
from milepost.trainer.ranks import Ranks
from milepost.trainer.sampler import GlobalSampler
from milepost.trainer.schema import TrainConfig
from milepost.trainer.stall import AGREEING, LOGGING, SAVING, StallWatch
from milepost.trainer.update import update_actor, update_critic, update_joint
from milepost.trainer.validate import Validator

_GOES_ON = "; training goes on (trainer.on_save_error=warn)"


@dataclass(frozen=True)
class Stopped:
    """A run that was asked to stop, and did.

    why:    what asked
    step:   the last finished step
    saved:  whether that one is on disk
    """

    why: Stop
    step: int
    saved: bool


class PpoTrainer:
    """All that a run consists of, put together by `milepost.trainer.setup`.

    validator:    None where there are no held-out prompts
    preemption:   where ranks agree to stop
    total_steps:  the last step
    restarts:     how many starts of the same launch came before this one
    durations:    of earlier sessions, by "step", "update" and "save"
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        models: Models,
        collector: Collector,
        controller: KLController,
        dataset: PromptDataset,
        sampler: GlobalSampler,
        validator: Validator | None,
        manager: CheckpointManager,
        preemption: Preemption,
        total_steps: int,
        restarts: int = 0,
        durations: Durations | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.models = models
        self.collector = collector
        self.controller = controller
        self.dataset = dataset
        self.sampler = sampler
        self.validator = validator
        self.manager = manager
        self.preemption = preemption
        self.total_steps = total_steps
        self.restarts = restarts
        self.durations = Durations() if durations is None else durations
        self._finished = 0
        self._metrics: dict[str, float] = {}
        self._held_out: tuple[int, dict[str, float]] = (0, {})
        self._undo: Callable[[], None] | None = None
        self._save_is_due = False
        self._failed_saves = 0
        self._saved: list[SavedStep] = []

    def run(
        self, next_step: int, events: EventLog | None, loggers: Sequence[Logger], stalls: StallWatch
    ) -> Stopped | None:
        """Train from `next_step` to the last step. All ranks call it together.

        Asked to stop, all of them go back to the last finished step, save it unless it is saved, and return what
        happened; None where the run came to its end.

        Args:
            events: the run's diary on rank 0, None elsewhere.
            loggers: where metrics go on rank 0, none elsewhere.
            stalls: who watches for a phase that hangs.
        """
        self._finished = next_step - 1
        try:
            self._run(next_step, events, loggers, stalls)
        except Stop as stop:
            return self._stop(stop, next_step, loggers, stalls)
        return None

    def _run(self, next_step: int, events: EventLog | None, loggers: Sequence[Logger], stalls: StallWatch) -> None:
        schedule, longest = self.config.trainer, self.durations.longest
        if next_step == 1 and schedule.val_before_train:
            with stalls.phase(AGREEING):
                self.preemption.poll(0.0)
            self._validate(0, Stopwatch(stalls.phase), events)
            self._log_validation(0, loggers, stalls)
        for step in range(next_step, self.total_steps + 1):
            last = step == self.total_steps
            stalls.step = step
            watch = Stopwatch(stalls.phase)
            begun = time.perf_counter()
            with watch.time(AGREEING):
                self.preemption.poll(longest("step", "save"))
            self._undo = self._remembered()
            first = self.sampler.position
            metrics = self.step(step, watch)
            self._finished, self._undo = step, None
            seconds = time.perf_counter() - begun
            self.durations.add("step", seconds)
            metrics |= self._speed(metrics, seconds) | watch.metrics()
            self._metrics = metrics
            if events is not None:
                events.write(
                    "step",
                    step=step,
                    reward=metrics["critic/score/mean"],
                    seconds=metrics["timing_s/step"],
                    prompts=[first, self.sampler.position],
                    metrics=metrics,
                )
            if schedule.test_freq > 0 and (last or step % schedule.test_freq == 0):
                self.preemption.needed = longest("save")
                self._validate(step, watch, events)
                self._log_validation(step, loggers, stalls)
            wanted = last or self._save_is_due or (schedule.save_freq > 0 and step % schedule.save_freq == 0)
            metrics |= self._record(step, metrics, watch, wanted=wanted, last=last)
            self._log_saved(loggers, stalls)
            with stalls.phase(LOGGING):
                for logger in loggers:
                    logger.step(step, metrics | watch.metrics())

    def _record(
        self, step: int, metrics: dict[str, float], watch: Stopwatch, *, wanted: bool, last: bool
    ) -> dict[str, float]:
        """Save a step if that is wanted, and look after one that is on its way to the disk; the metrics of both.

        Where an earlier one turns out not to have got there, this step takes its place."""
        measured: dict[str, float] = {}

        def save() -> None:
            # An upload that failed is another step's matter: this one is saved.
            with watch.time(SAVING), contextlib.suppress(UploadError):
                blocking = last or not self.config.trainer.async_save
                self.manager.save(step, self._measured(step, metrics), blocking=blocking)
            self._save_is_due = False

        if wanted:
            self._attempt(save, step, last=last)
        if wanted or self.config.trainer.async_save:
            well = self._attempt(lambda: self._hear(watch), step, last=last, in_its_place=not wanted)
            if not well and not wanted:
                self._attempt(save, step, last=last)
        if SAVING in watch.seconds:
            measured["milepost/stall_s"] = watch.seconds[SAVING]
        if self._failed_saves:
            measured["milepost/failed_saves"] = float(self._failed_saves)
        return measured

    def _attempt(self, act: Callable[[], None], step: int, *, last: bool, in_its_place: bool = False) -> bool:
        """Save, or ask after a save; whether all is well.

        After a save that a disk refused training goes on if the config says so, and the next step is to be saved. The
        last one has no next. An upload that failed has been logged, and noted in the diary, by who tried it: the step
        is durable here, it is tried again, and what has not arrived at the end of the run is an error then.

        in_its_place:  whether this step is about to be saved for the one that was not
        """
        try:
            act()
        except EarlierStepError as error:  # this step is saved
            if not last and self.config.trainer.on_save_error == "raise":
                raise
            self._save_is_due = False
            self._tell_of_failure(step, error, "" if last else _GOES_ON)
        except MilepostError as error:
            misused = isinstance(error, CallError) and not isinstance(error, WriteError)
            if misused or isinstance(error, LostRankError):
                raise
            if last:
                done = f"step {step} is the last one, and without it the run is not done"
                raise type(error)(
                    f"{error}; {done}: the same command goes on from the newest step that is saved"
                ) from error
            if self.config.trainer.on_save_error == "raise":
                raise
            self._save_is_due = True
            which = "this step is saved in its place" if in_its_place else "the next step is to be saved"
            self._tell_of_failure(step, error, f"{_GOES_ON}, and {which}")
        else:
            return True
        return False

    def _tell_of_failure(self, step: int, error: MilepostError, what_now: str) -> None:
        self._failed_saves += 1
        if self.ranks.rank == 0:
            sys.stderr.write(f"milepost: after step {step} a save failed: {error}{what_now}\n")

    def _hear(self, watch: Stopwatch) -> None:
        """Take note of the steps that have become durable. Uploads that failed are another matter: see `_attempt`."""
        with watch.time("poll_saves"), contextlib.suppress(UploadError):
            for saved in self.manager.poll():
                self.durations.add("save", saved.seconds)
                self._saved.append(saved)

    def _log_saved(self, loggers: Sequence[Logger], stalls: StallWatch) -> None:
        """Tell the loggers of what has become durable, at the steps that it is about."""
        saved, self._saved = self._saved, []
        with stalls.phase(LOGGING):
            for step in saved:
                for logger in loggers:
                    logger.saved(
                        step.step, {"milepost/saved_bytes": float(step.nbytes), "milepost/write_s": step.seconds}
                    )

    def _remembered(self) -> Callable[[], None]:
        """What puts back all that a step changes before its first update, so that the step can be left undone and done
        again, bit for bit."""
        generators, position = rng.capture(), self.sampler.state_dict()

        def undo() -> None:
            rng.restore(generators)
            self.sampler.load_state_dict(position)

        return undo

    def _stop(self, stop: Stop, first: int, loggers: Sequence[Logger], stalls: StallWatch) -> Stopped:
        """Save the last finished step, unless it is on disk already."""
        if self._undo is not None:
            self._undo()
        step = self._finished
        if step < first:
            return Stopped(stop, step, saved=step > 0)
        watch = Stopwatch(stalls.phase)
        saved = True
        try:
            with watch.time(SAVING), contextlib.suppress(UploadError):
                # An upload that failed is tried again at the end of the run, and the step is durable here.
                self.manager.save(step, self._measured(step, self._metrics))
        except LostRankError:
            raise
        except EarlierStepError as error:  # this one is saved
            if self.ranks.rank == 0:
                sys.stderr.write(f"milepost: before it, a save had failed: {error}\n")
        except MilepostError as error:
            if self.ranks.rank == 0:
                sys.stderr.write(f"milepost: stopped on {stop.words}, but {error}\n")
            saved = False
        if saved:
            self._hear(watch)
            self._log_saved(loggers, stalls)
        return Stopped(stop, step, saved=saved)

    def step(self, step: int, watch: Stopwatch) -> dict[str, float]:
        """One PPO step on the next prompts; returns its metrics over all ranks, without timings."""
        config, ranks = self.config, self.ranks
        epoch = self.sampler.epoch
        batch = self.sampler.next_batch(config.data.train_batch_size)
        spread = Spread.of(len(batch), config.actor_rollout_ref.actor.ppo_mini_batch_size, ranks.data_size)
        own = [batch[position] for position in spread.positions[ranks.data_rank]]
        with watch.time("data"):
            prompts = ranks.each(lambda: self._prompts(own))
        self.preemption.needed = self.durations.longest("update", "save")
        experience, metrics = self.collector.collect(prompts, spread, watch)
        # From here on there is no way back: half of an update is no state to save.
        with watch.time(AGREEING):
            self.preemption.poll()
        begun = time.perf_counter()
        self.controller.update(metrics["actor/reward_kl_penalty"], len(batch))
        actor, temperature = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.temperature
        if self.models.joint:
            with watch.time("update_actor"):
                metrics |= update_joint(
                    self.models.actor, experience, spread, actor, config.critic, temperature, ranks.sum
                )
        else:
            with watch.time("update_critic"):
                metrics |= update_critic(self.models.critic, experience, spread, config.critic, ranks.sum)
            if step > config.trainer.critic_warmup:
                with watch.time("update_actor"):
                    metrics |= update_actor(self.models.actor, experience, spread, actor, temperature, ranks.sum)
        self.durations.add("update", time.perf_counter() - begun)
        return {
            **metrics,
            "training/global_step": float(step),
            "training/epoch": float(epoch),
            "milepost/restarts": float(self.restarts),
        }

    def _prompts(self, numbers: Sequence[int]) -> PromptBatch:
        data = self.config.data
        return collate(
            [self.dataset[number] for number in numbers],
            self.collector.judge.tokenizer,
            data.max_prompt_length,
            data.truncation,
            data.apply_chat_template_kwargs,
        )

    def _speed(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """verl's perf/throughput is tokens of prompts and responses per second and process."""
        tokens = metrics["perf/total_num_tokens"]
        return {
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self.ranks.world_size,
        }

    def _measured(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """What is saved with a step: its metrics, and those of a validation after it, by which steps may be kept."""
        validated, held_out = self._held_out
        return metrics | held_out if validated == step else metrics

    def _validate(self, step: int, watch: Stopwatch, events: EventLog | None) -> None:
        if self.validator is None:
            return
        begun = time.perf_counter()
        with watch.time("testing"):
            metrics = self.validator.run(self.models.policy)
        self._held_out = step, metrics
        if events is not None:
            events.write("validation", step=step, seconds=time.perf_counter() - begun, metrics=metrics)

    def _log_validation(self, step: int, loggers: Sequence[Logger], stalls: StallWatch) -> None:
        if self.validator is not None:
            with stalls.phase(LOGGING):
                for logger in loggers:
                    logger.validation(step, self._held_out[1])
