"""The two updates of a PPO step: epochs of mini-batches of micro-batches, for the actor and for the critic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.engines.fsdp import FsdpEngine
from milepost.trainer.advantages import AllReduce, masked_sum
from milepost.trainer.batch import Experience, Spread
from milepost.trainer.forward import policy_forward, value_forward
from milepost.trainer.kl import kl_estimate
from milepost.trainer.losses import policy_loss, value_loss
from milepost.trainer.metrics import Tally
from milepost.trainer.schema import ActorConfig, CriticConfig

Terms = tuple[Tensor, dict[str, Tensor]]
"""The loss to differentiate and the metrics, each a sum over the real tokens of a micro-batch."""


@dataclass(frozen=True)
class Passes:
    """How often and in which portions the batch of a step is gone through.

    epochs:            times
    mini_batch_size:   sequences per optimizer update, over all ranks
    micro_batch_size:  sequences per forward and backward of one rank
    """

    epochs: int
    mini_batch_size: int
    micro_batch_size: int


def update_actor(
    engine: FsdpEngine,
    experience: Experience,
    spread: Spread,
    config: ActorConfig,
    temperature: float,
    all_reduce: AllReduce,
) -> dict[str, float]:
    """One step's updates of the policy.

    loss = clipped surrogate - entropy_coeff * entropy [+ kl_loss_coef * KL to the reference], all token means over the
    mini-batch. Returns metrics, named as verl names them: means over tokens, then over updates.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

    def terms(micro: Experience) -> Terms:
        mask = micro.response_mask
        logprobs, entropy = policy_forward(engine.model, micro, temperature, entropy=config.entropy_coeff != 0)
        policy = policy_loss(micro.old_logprobs, logprobs, micro.advantages, mask, low, high)
        loss = policy.loss
        metrics = {"actor/pg_loss": policy.loss, "actor/pg_clipfrac": policy.clipped, "actor/ppo_kl": policy.kl}
        if entropy is not None:
            loss = loss - config.entropy_coeff * masked_sum(entropy, mask)
        if config.use_kl_loss:
            kl = masked_sum(kl_estimate(logprobs, micro.ref_logprobs, config.kl_loss_type), mask)
            loss = loss + config.kl_loss_coef * kl
            metrics["actor/kl_loss"] = kl
        return loss, metrics

    passes = Passes(config.ppo_epochs, config.ppo_mini_batch_size, config.ppo_micro_batch_size_per_gpu)
    return _update(engine, "actor", experience, spread, passes, terms, all_reduce)


def update_critic(
    engine: FsdpEngine, experience: Experience, spread: Spread, config: CriticConfig, all_reduce: AllReduce
) -> dict[str, float]:
    """One step's updates of the critic. Returns metrics as `update_actor` does."""

    def terms(micro: Experience) -> Terms:
        values = value_forward(engine.model, micro)
        value = value_loss(values, micro.old_values, micro.returns, micro.response_mask, config.cliprange_value)
        return value.loss, {
            "critic/vf_loss": value.loss,
            "critic/vf_clipfrac": value.clipped,
            "critic/vpred_mean": masked_sum(values, micro.response_mask),
        }

    passes = Passes(config.ppo_epochs, config.ppo_mini_batch_size, config.ppo_micro_batch_size_per_gpu)
    return _update(engine, "critic", experience, spread, passes, terms, all_reduce)


def _update(
    engine: FsdpEngine,
    role: str,
    experience: Experience,
    spread: Spread,
    passes: Passes,
    terms: Callable[[Experience], Terms],
    all_reduce: AllReduce,
) -> dict[str, float]:
    """Optimizer updates with the mean over the tokens that a mini-batch has on all ranks together.

    Each micro-batch's sums are divided by that global count; FSDP averages gradients over ranks, which the factor
    world_size undoes. So the gradient is that of the whole mini-batch on one rank, however its sequences are spread.
    """
    learning_rate = engine.lr
    minis = [
        spread.micro_batches(engine.rank, low, low + passes.mini_batch_size, passes.micro_batch_size)
        for low in range(0, spread.size, passes.mini_batch_size)
    ]
    lengths = experience.response_mask.sum(-1)
    own = [sum((lengths[rows].sum() for rows in micros if rows), lengths.new_zeros(())) for micros in minis]
    tokens = all_reduce(torch.stack(own).double()).tolist()
    tally = Tally()
    norms: list[float] = []
    engine.model.train()
    for _ in range(passes.epochs):
        for micros, count in zip(minis, tokens, strict=True):
            for number, rows in enumerate(micros, 1):
                loss, metrics = terms(experience.select(rows))
                engine.backward(loss * (engine.world_size / count), last=number == len(micros))
                for name, total in metrics.items():
                    tally.add(name, total.detach() / count, 1 / (engine.world_size * len(micros)))
            norms.append(engine.step())
    engine.model.eval()
    engine.advance_schedule()
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        **tally.means(all_reduce),
        f"{role}/grad_norm": sum(finite) / len(finite) if finite else math.nan,
        f"{role}/lr": learning_rate,
        f"milepost/{role}_skipped_updates": float(len(norms) - len(finite)),
    }
