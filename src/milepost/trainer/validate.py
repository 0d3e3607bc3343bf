"""Validation: answers to held-out prompts, judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from milepost.engines import rng
from milepost.trainer.data import PromptDataset, collate
from milepost.trainer.experience import Judge
from milepost.trainer.metrics import Tally
from milepost.trainer.ranks import Ranks
from milepost.trainer.rollout import Sampling, SpecialTokens, generate
from milepost.trainer.sampler import rank_slice
from milepost.trainer.schema import DataConfig


class Validator:
    """Answers every held-out prompt once. All ranks call it together, each answering its share."""

    def __init__(
        self,
        dataset: PromptDataset,
        judge: Judge,
        sampling: Sampling,
        tokens: SpecialTokens,
        data: DataConfig,
        ranks: Ranks,
        turn: Callable[[], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._judge = judge
        self._sampling = sampling
        self._tokens = tokens
        self._data = data
        self._ranks = ranks
        self._turn = turn

    def run(self, policy: Any) -> dict[str, float]:
        """Mean reward, `val/test_score/<data set>`; the share of answers that are the ground truth to the letter,
        `val/exact_match/<data set>`, where there are ground truths; mean length of the answers in tokens.

        Sampling here leaves the generators as they were: training does not depend on when it is validated.
        """
        tally = Tally()
        size = self._data.val_batch_size or len(self._dataset)
        with rng.isolated():
            for start in range(0, len(self._dataset), size):
                self._answer(policy, list(range(start, min(start + size, len(self._dataset)))), tally)
        return tally.means(self._ranks.sum)

    def _answer(self, policy: Any, numbers: list[int], tally: Tally) -> None:
        own = [self._dataset[number] for number in rank_slice(numbers, self._ranks.data_rank, self._ranks.data_size)]
        prompts = self._ranks.each(
            lambda: collate(
                own,
                self._judge.tokenizer,
                self._data.max_prompt_length,
                self._data.truncation,
                self._data.apply_chat_template_kwargs,
            )
        )
        sequences = generate(
            policy,
            prompts,
            self._sampling,
            self._tokens,
            device=self._ranks.device,
            ranks=self._ranks.world_size,
            turn=self._turn,
        )
        responses = self._judge.texts(sequences)
        judged = self._ranks.each(lambda: self._judge.scores(prompts, responses))
        scores = self._ranks.agreed(torch.tensor(judged, dtype=torch.float64, device=self._ranks.device)).tolist()
        pairs = list(zip(responses, prompts.ground_truths, strict=True))
        known = [(response, truth) for response, truth in pairs if truth is not None]
        exact = sum(response.strip() == truth.strip() for response, truth in known)
        name = self._dataset.name
        tally.add(f"val/test_score/{name}", sum(scores), len(scores))
        tally.add(f"val/exact_match/{name}", exact, len(known))
        tally.add("val/response_length/mean", sequences.response_mask.sum(), len(scores))
