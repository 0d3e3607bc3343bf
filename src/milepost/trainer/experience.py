"""The first half of a PPO step: roll out, judge, and turn scores into advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from milepost.engines.fsdp import FsdpEngine
from milepost.trainer.advantages import gae, masked_sum, masked_whiten
from milepost.trainer.batch import Experience, Sequences, Spread
from milepost.trainer.data import PromptBatch
from milepost.trainer.forward import in_micro_batches, policy_forward, value_forward
from milepost.trainer.kl import KLController, apply_kl_penalty, sequence_mean
from milepost.trainer.metrics import Stopwatch, Tally
from milepost.trainer.ranks import Ranks
from milepost.trainer.reward import RewardFunction, score_responses
from milepost.trainer.rollout import Sampling, SpecialTokens, generate
from milepost.trainer.schema import AlgorithmConfig


@dataclass(frozen=True)
class Models:
    """The models of a run. The reference is the policy's start, frozen; None where no KL is asked for."""

    actor: FsdpEngine
    critic: FsdpEngine
    reference: FsdpEngine | None


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
    ) -> None:
        self._models = models
        self.judge = judge
        self._sampling = sampling
        self._tokens = tokens
        self._sizes = sizes
        self._algorithm = algorithm
        self._controller = controller
        self._ranks = ranks

    def collect(self, prompts: PromptBatch, spread: Spread, watch: Stopwatch) -> tuple[Experience, dict[str, float]]:
        """Answer the prompts and work out what each token was worth.

        Args:
            prompts: this rank's, in the order of `spread.positions[rank]`.
            spread: of the global batch.

        Returns:
            The experience, and metrics over all ranks under verl's names.
        """
        actor, ranks = self._models.actor, self._ranks
        with watch.time("gen"):
            sequences = generate(
                actor.model, prompts, self._sampling, self._tokens, device=ranks.device, ranks=ranks.world_size
            )
        with watch.time("reward"):
            judged = ranks.each(lambda: self.judge.scores(prompts, self.judge.texts(sequences)))
            scores = torch.tensor(judged, dtype=torch.float32, device=ranks.device)
        with watch.time("old_log_prob"):
            old_logprobs, entropy = self._policy(actor, sequences, spread, self._sizes.policy, entropy=True)
        with watch.time("ref"):
            ref_logprobs = old_logprobs
            if self._models.reference is not None:
                ref_logprobs, _ = self._policy(self._models.reference, sequences, spread, self._sizes.reference)
                self._models.reference.release()
        with watch.time("values"):
            critic = self._models.critic
            old_values = self._in_micro_batches(
                lambda micro: value_forward(critic.model, micro), sequences, spread, self._sizes.values
            )
        with watch.time("adv"):
            return self._judge_tokens(sequences, scores, old_logprobs, ref_logprobs, old_values, entropy)

    def _policy(
        self, engine: FsdpEngine, sequences: Sequences, spread: Spread, size: int, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (zeros unless asked for), each [B, T], in one pass."""

        def both(micro: Sequences) -> Tensor:
            logprobs, entropies = policy_forward(engine.model, micro, self._sampling.temperature, entropy=entropy)
            return torch.stack([logprobs, torch.zeros_like(logprobs) if entropies is None else entropies], dim=-1)

        logprobs, entropies = self._in_micro_batches(both, sequences, spread, size, channels=(2,)).unbind(-1)
        return logprobs, entropies

    def _in_micro_batches(
        self,
        function: Callable[[Sequences], Tensor],
        sequences: Sequences,
        spread: Spread,
        size: int,
        channels: tuple[int, ...] = (),
    ) -> Tensor:
        rounds = spread.micro_batches(self._ranks.rank, 0, spread.size, size)
        return in_micro_batches(function, sequences, rounds, channels)

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
        tally.add("perf/total_num_tokens", tokens + lengths, 1 / self._ranks.world_size)
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
