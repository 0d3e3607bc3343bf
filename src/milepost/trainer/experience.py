"""The first half of a PPO step: roll out, judge, and turn scores into advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from milepost.engines.base import TrainingEngine
from milepost.trainer.advantages import gae, masked_sum, masked_whiten
from milepost.trainer.batch import Experience, Sequences, Spread
from milepost.trainer.data import PromptBatch
from milepost.trainer.forward import Model, evaluate, policy_forward, value_forward
from milepost.trainer.kl import KLController, apply_kl_penalty, sequence_mean
from milepost.trainer.metrics import Stopwatch, Tally
from milepost.trainer.ranks import Ranks
from milepost.trainer.reward import RewardFunction, score_responses
from milepost.trainer.rollout import Sampling, SpecialTokens, generate
from milepost.trainer.schema import AlgorithmConfig

JOINT = "actor_critic"
"""The role of an engine that holds policy and value model."""


@dataclass(frozen=True)
class Models:
    """The models of a run.

    actor, critic:  the engines of policy and value model; one and the same where one engine holds both
    reference:      the policy's start, frozen; None where no KL is asked for
    """

    actor: TrainingEngine
    critic: TrainingEngine
    reference: TrainingEngine | None

    @property
    def joint(self) -> bool:
        """Whether one engine holds policy and value model."""
        return self.actor is self.critic

    @property
    def policy(self) -> Any:
        """The policy itself, for forwards without gradients."""
        return self.actor.model.policy if self.joint else self.actor.model

    @property
    def value_model(self) -> Any:
        """The value model itself, for forwards without gradients."""
        return self.critic.model.value_model if self.joint else self.critic.model

    @property
    def roles(self) -> Mapping[str, TrainingEngine]:
        """The engines that are trained, by the role under which a step holds them."""
        return {JOINT: self.actor} if self.joint else {"actor": self.actor, "critic": self.critic}


@dataclass(frozen=True)
class Judge:
    """Reads a response as text and scores it."""

    tokenizer: PreTrainedTokenizerBase
    reward: RewardFunction

    def texts(self, sequences: Sequences) -> list[str]:
        """Each response as text, special tokens left out."""
        rows = zip(sequences.responses.tolist(), sequences.response_mask.sum(-1).tolist(), strict=True)
        return [str(self.tokenizer.decode(tokens[:length], skip_special_tokens=True)) for tokens, length in rows]

    def scores(self, prompts: PromptBatch, responses: Sequence[str]) -> list[float]:
        """What the reward function says of each response."""
        return score_responses(self.reward, prompts.prompts, responses, prompts.ground_truths, prompts.extras)


@dataclass(frozen=True)
class ForwardSizes:
    """Sequences per forward of one rank, for the policy's and the reference's log-probs and for the values."""

    policy: int
    reference: int
    values: int


class Collector:
    """Makes the experience of a step. All ranks call it together, each with its own prompts."""

    def __init__(
        self,
        models: Models,
        judge: Judge,
        sampling: Sampling,
        tokens: SpecialTokens,
        sizes: ForwardSizes,
        algorithm: AlgorithmConfig,
        controller: KLController,
        ranks: Ranks,
        turn: Callable[[], None] | None = None,
    ) -> None:
        self._models = models
        self.judge = judge
        self._sampling = sampling
        self._tokens = tokens
        self._sizes = sizes
        self._algorithm = algorithm
        self._controller = controller
        self._ranks = ranks
        self._turn = turn

    def collect(self, prompts: PromptBatch, spread: Spread, watch: Stopwatch) -> tuple[Experience, dict[str, float]]:
        """Answer the prompts and work out what each token was worth.

        Args:
            prompts: this rank's, in the order of `spread.positions[rank]`.
            spread: of the global batch.

        Returns:
            The experience, and metrics over all ranks under verl's names.
        """
        models, ranks = self._models, self._ranks
        with watch.time("gen"):
            sequences = generate(
                models.policy,
                prompts,
                self._sampling,
                self._tokens,
                device=ranks.device,
                ranks=ranks.world_size,
                turn=self._turn,
            )
        with watch.time("reward"):
            judged = ranks.each(lambda: self.judge.scores(prompts, self.judge.texts(sequences)))
            scores = ranks.agreed(torch.tensor(judged, dtype=torch.float32, device=ranks.device))
        with watch.time("old_log_prob"):
            old_logprobs, entropy = self._policy(models.policy, sequences, spread, self._sizes.policy, entropy=True)
        with watch.time("ref"):
            ref_logprobs = old_logprobs
            if models.reference is not None:
                ref_logprobs, _ = self._policy(models.reference.model, sequences, spread, self._sizes.reference)
                models.reference.release()
        with watch.time("values"):
            old_values = self._evaluate(models.value_model, value_forward, sequences, spread, self._sizes.values)
        with watch.time("adv"):
            return self._judge_tokens(sequences, scores, old_logprobs, ref_logprobs, old_values, entropy)

    def _policy(
        self, model: Any, sequences: Sequences, spread: Spread, size: int, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (zeros unless asked for), each [B, T], in one pass."""

        def both(ready: Model, micro: Sequences) -> Tensor:
            logprobs, entropies = policy_forward(ready, micro, self._sampling.temperature, entropy=entropy)
            return torch.stack([logprobs, torch.zeros_like(logprobs) if entropies is None else entropies], dim=-1)

        logprobs, entropies = self._evaluate(model, both, sequences, spread, size, channels=(2,)).unbind(-1)
        return logprobs, entropies

    def _evaluate(
        self,
        model: Any,
        function: Callable[[Model, Sequences], Tensor],
        sequences: Sequences,
        spread: Spread,
        size: int,
        channels: tuple[int, ...] = (),
    ) -> Tensor:
        rounds = spread.micro_batches(self._ranks.data_rank, 0, spread.size, size)
        return evaluate(model, function, sequences, rounds, channels)

    def _judge_tokens(
        self,
        sequences: Sequences,
        scores: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        old_values: Tensor,
        entropy: Tensor,
    ) -> tuple[Experience, dict[str, float]]:
        algorithm, mask = self._algorithm, sequences.response_mask
        coefficient = self._controller.value if algorithm.use_kl_in_reward else 0.0
        rewards, kl = apply_kl_penalty(scores, old_logprobs, ref_logprobs, mask, coefficient, kind=algorithm.kl_penalty)
        advantages, returns = gae(rewards, old_values, mask, algorithm.gamma, algorithm.lam)
        if algorithm.whiten_advantages:
            advantages = masked_whiten(advantages, mask, self._ranks.sum)
        count, tokens = len(scores), mask.sum()
        lengths = sequences.attention_mask.sum() - tokens
        tally = Tally()
        tally.add("critic/score/mean", scores.sum(), count)
        tally.add("critic/rewards/mean", rewards.sum(), count)
        tally.add("critic/advantages/mean", masked_sum(advantages, mask), tokens)
        tally.add("critic/returns/mean", masked_sum(returns, mask), tokens)
        tally.add("critic/values/mean", masked_sum(old_values, mask), tokens)
        tally.add("actor/entropy", masked_sum(entropy, mask), tokens)
        tally.add("actor/reward_kl_penalty", sequence_mean(kl, mask).sum(), count)
        tally.add("response_length/mean", tokens, count)
        tally.add("prompt_length/mean", lengths, count)
        # Not a mean but a total: counted once for the whole world.
        tally.add("perf/total_num_tokens", tokens + lengths, 1 / self._ranks.data_size)
        metrics = tally.means(self._ranks.sum)
        metrics["actor/reward_kl_penalty_coeff"] = coefficient
        experience = Experience(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            response_mask=mask,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            old_values=old_values,
            advantages=advantages,
            returns=returns,
        )
        return experience, metrics
