"""The updates of a PPO step: epochs of mini-batches of micro-batches, for the actor and for the critic.

One engine that holds both makes both at once. Their weights are apart, so the gradient of the sum of the two losses is
the two gradients side by side, and Adam treats each weight by itself: with no clipping it is what two engines do. Only
the clipping sees one norm over both. To take turns instead would be wrong: each update of the one would move the other
too, by its weight decay and by what is left in its moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from milepost.engines.base import EagerEngine, Outputs, PipelineEngine, TrainingEngine
from milepost.trainer.advantages import AllReduce, masked_sum
from milepost.trainer.batch import Experience, Spread
from milepost.trainer.forward import (
    Model,
    already,
    joint_forward,
    pipeline_inputs,
    policy_forward,
    value_forward,
)
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
    engine: TrainingEngine,
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

    def terms(model: Model, micro: Experience) -> Terms:
        logprobs, entropy = policy_forward(model, micro, temperature, entropy=config.entropy_coeff != 0)
        return _policy_terms(logprobs, entropy, micro, config)

    return _update(engine, ("actor",), experience, spread, _passes(config), terms, all_reduce)


def update_critic(
    engine: TrainingEngine, experience: Experience, spread: Spread, config: CriticConfig, all_reduce: AllReduce
) -> dict[str, float]:
    """One step's updates of the critic. Returns metrics as `update_actor` does."""

    def terms(model: Model, micro: Experience) -> Terms:
        return _value_terms(value_forward(model, micro), micro, config)

    return _update(engine, ("critic",), experience, spread, _passes(config), terms, all_reduce)


def update_joint(
    engine: TrainingEngine,
    experience: Experience,
    spread: Spread,
    actor: ActorConfig,
    critic: CriticConfig,
    temperature: float,
    all_reduce: AllReduce,
) -> dict[str, float]:
    """One step's updates of policy and value model in one engine, in the passes of the actor's config.

    Its parameter groups are the policy's and the value model's, in this order. Returns the metrics of both updates.
    """

    def terms(model: Model, micro: Experience) -> Terms:
        logprobs, entropy, values = joint_forward(model, micro, temperature, entropy=actor.entropy_coeff != 0)
        policy_loss_, metrics = _policy_terms(logprobs, entropy, micro, actor)
        value_loss_, more = _value_terms(values, micro, critic)
        return policy_loss_ + value_loss_, metrics | more

    return _update(engine, ("actor", "critic"), experience, spread, _passes(actor), terms, all_reduce)


def _passes(config: ActorConfig | CriticConfig) -> Passes:
    return Passes(config.ppo_epochs, config.ppo_mini_batch_size, config.ppo_micro_batch_size_per_gpu)


def _policy_terms(logprobs: Tensor, entropy: Tensor | None, micro: Experience, config: ActorConfig) -> Terms:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    mask = micro.response_mask
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


def _value_terms(values: Tensor, micro: Experience, config: CriticConfig) -> Terms:
    value = value_loss(values, micro.old_values, micro.returns, micro.response_mask, config.cliprange_value)
    return value.loss, {
        "critic/vf_loss": value.loss,
        "critic/vf_clipfrac": value.clipped,
        "critic/vpred_mean": masked_sum(values, micro.response_mask),
    }


def _update(
    engine: TrainingEngine,
    roles: Sequence[str],
    experience: Experience,
    spread: Spread,
    passes: Passes,
    terms: Callable[[Model, Experience], Terms],
    all_reduce: AllReduce,
) -> dict[str, float]:
    """Optimizer updates with the mean over the tokens that a mini-batch has on all ranks together.

    Each micro-batch's sums are divided by that global count; engines average gradients over the data-parallel ranks,
    which the factor data_size undoes. So the gradient is that of the whole mini-batch on one rank, however its
    sequences are spread.

    roles:  of the engine's parameter groups, in order: what metrics are named after
    """
    rates = engine.learning_rates
    minis = [
        spread.micro_batches(engine.data_rank, low, low + passes.mini_batch_size, passes.micro_batch_size)
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
            for metrics in _gradients(engine, [experience.select(rows) for rows in micros], terms, count):
                for name, total in metrics.items():
                    tally.add(name, total / count, 1 / (engine.data_size * len(micros)))
            norms.append(engine.step())
    engine.model.eval()
    engine.advance_schedule()
    finite = [norm for norm in norms if math.isfinite(norm)]
    means = tally.means(all_reduce)
    for role, rate in zip(roles, rates, strict=True):
        means |= {
            f"{role}/grad_norm": sum(finite) / len(finite) if finite else math.nan,
            f"{role}/lr": rate,
            f"milepost/{role}_skipped_updates": float(len(norms) - len(finite)),
        }
    return means


def _gradients(
    engine: TrainingEngine, micros: Sequence[Experience], terms: Callable[[Model, Experience], Terms], count: float
) -> Iterator[dict[str, Any]]:
    """Add the gradients of the micro-batches of one update; the metrics of each."""
    scale = engine.data_size / count

    def scaled(number: int, outputs: Outputs) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = terms(already(outputs), micros[number])
        return loss * scale, {name: float(total.detach()) for name, total in metrics.items()}

    if isinstance(engine, PipelineEngine):
        yield from engine.forward_backward([pipeline_inputs(micro) for micro in micros], scaled)
        return
    eager = cast(EagerEngine, engine)
    for number, micro in enumerate(micros, 1):
        loss, metrics = terms(eager.forward, micro)
        eager.backward(loss * scale, last=number == len(micros))
        yield {name: total.detach() for name, total in metrics.items()}
