"""The training loop: PPO step by step, validated, saved and told."""

from __future__ import annotations

import time
from collections.abc import Sequence

from milepost.checkpoint.events import EventLog
from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.manifest import read_manifest
from milepost.trainer.batch import Spread
from milepost.trainer.data import PromptBatch, PromptDataset, collate
from milepost.trainer.experience import Collector, Models
from milepost.trainer.kl import KLController
from milepost.trainer.logging import Logger
from milepost.trainer.metrics import Stopwatch
from milepost.trainer.ranks import Ranks
from milepost.trainer.sampler import GlobalSampler
from milepost.trainer.schema import TrainConfig
from milepost.trainer.update import update_actor, update_critic, update_joint
from milepost.trainer.validate import Validator


class PpoTrainer:
    """All that a run consists of, put together by `milepost.trainer.setup`.

    validator:    None where there are no held-out prompts
    total_steps:  the last step
    restarts:     how many starts of the same launch came before this one
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
        total_steps: int,
        restarts: int = 0,
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
        self.total_steps = total_steps
        self.restarts = restarts

    def run(self, next_step: int, events: EventLog | None, loggers: Sequence[Logger]) -> None:
        """Train from `next_step` to the last step. All ranks call it together.

        Args:
            events: the run's diary on rank 0, None elsewhere.
            loggers: where metrics go on rank 0, none elsewhere.
        """
        schedule = self.config.trainer
        if next_step == 1 and schedule.val_before_train:
            self._validate(0, events, loggers)
        for step in range(next_step, self.total_steps + 1):
            last = step == self.total_steps
            watch = Stopwatch()
            begun = time.perf_counter()
            metrics = self.step(step, watch)
            metrics |= self._speed(metrics, time.perf_counter() - begun) | watch.metrics()
            if events is not None:
                events.write(
                    "step",
                    step=step,
                    reward=metrics["critic/score/mean"],
                    seconds=metrics["timing_s/step"],
                    metrics=metrics,
                )
            if last or (schedule.test_freq > 0 and step % schedule.test_freq == 0):
                with watch.time("testing"):
                    self._validate(step, events, loggers)
            if last or (schedule.save_freq > 0 and step % schedule.save_freq == 0):
                with watch.time("save_checkpoint"):
                    folder = self.manager.save(step, metrics)
                metrics |= {
                    "milepost/stall_s": watch.seconds["save_checkpoint"],
                    "milepost/saved_bytes": float(read_manifest(folder).nbytes),
                }
            for logger in loggers:
                logger.step(step, metrics | watch.metrics())

    def step(self, step: int, watch: Stopwatch) -> dict[str, float]:
        """One PPO step on the next prompts; returns its metrics over all ranks, without timings."""
        config, ranks = self.config, self.ranks
        epoch = self.sampler.epoch
        batch = self.sampler.next_batch(config.data.train_batch_size)
        spread = Spread.of(len(batch), config.actor_rollout_ref.actor.ppo_mini_batch_size, ranks.data_size)
        own = [batch[position] for position in spread.positions[ranks.data_rank]]
        prompts = ranks.each(lambda: self._prompts(own))
        experience, metrics = self.collector.collect(prompts, spread, watch)
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

    def _validate(self, step: int, events: EventLog | None, loggers: Sequence[Logger]) -> None:
        if self.validator is None:
            return
        metrics = self.validator.run(self.models.policy)
        if events is not None:
            events.write("validation", step=step, metrics=metrics)
        for logger in loggers:
            logger.validation(step, metrics)
