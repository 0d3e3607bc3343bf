"""Generation and log-probs on two real FSDP2 ranks, against plain transformers on single unpadded prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_qwen2

from milepost.engines import rng
from milepost.engines.fsdp import OptimizerSettings, Sharding
from milepost.trainer.batch import Sequences, Spread
from milepost.trainer.data import PromptBatch
from milepost.trainer.forward import in_micro_batches, policy_forward, value_forward
from milepost.trainer.models import ModelSource, load_critic, load_policy, special_tokens
from milepost.trainer.rollout import Sampling, SpecialTokens, generate, response_mask

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 30], [7], [12, 3, 8, 8, 21], [4, 4]]
TOKENS = SpecialTokens(eos=(1, 2), pad=0)
TEMPERATURE = 0.7


def test_the_mask_ends_with_the_first_token_that_ends_a_response() -> None:
    responses = torch.tensor([[5, 1, 0, 0], [5, 6, 7, 8], [2, 1, 5, 1], [9, 2, 2, 0]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert response_mask(responses, (1, 2)).tolist() == expected


def batch_of(prompts: list[list[int]]) -> PromptBatch:
    width = max(map(len, prompts), default=1)
    ids = [[0] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    shape = (len(prompts), width)
    nothing: list[Any] = [None] * len(prompts)
    return PromptBatch(
        torch.tensor(ids, dtype=torch.int64).reshape(shape),
        torch.tensor(mask, dtype=torch.int64).reshape(shape),
        ["" for _ in prompts],
        nothing,
        [{} for _ in prompts],
        list(range(len(prompts))),
    )


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))


def unpadded(sequences: Sequences) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row, padding taken away."""
    rows = []
    split = sequences.input_ids.shape[1] - sequences.response_mask.shape[1]
    for ids, mask in zip(sequences.input_ids.tolist(), sequences.attention_mask.tolist(), strict=True):
        kept = [
            [token for token, real in zip(ids[a:b], mask[a:b], strict=True) if real]
            for a, b in ((0, split), (split, None))
        ]
        rows.append((kept[0], kept[1]))
    return rows


def greedily(model: Any, prompt: list[int], longest: int) -> list[int]:
    """The likeliest tokens one by one, from the logits alone."""
    ids = list(prompt)
    while len(ids) < len(prompt) + longest:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in TOKENS.eos:
            break
    return ids[len(prompt) :]


def _on_two_ranks(directory: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    rank = torch.distributed.get_rank()
    optimizer = OptimizerSettings(1e-3, (0.9, 0.99), 0.0, lambda step: 1.0, 1.0)
    source, device_mesh = ModelSource(directory), mesh()
    kwargs: dict[str, Any] = {"dtype": torch.float32, "sharding": Sharding(), "optimizer": optimizer, "seed": 1}
    engine = load_policy(source, device_mesh, CPU, **kwargs)
    critic = load_critic(source, device_mesh, CPU, **kwargs)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    seen: dict[str, Any] = {"special": special_tokens(source, _Tokenizer())}

    greedy = Sampling(6, do_sample=False)
    # All prompts on one rank, none on the other; then spread.
    for name, prompts in (("crowded", PROMPTS if rank == 0 else []), ("spread", PROMPTS[rank::2])):
        sequences = generate(engine.model, batch_of(prompts), greedy, TOKENS, device=CPU, ranks=2)
        with torch.no_grad():
            expected = [(prompt, greedily(plain, prompt, 6)) for prompt in prompts]
        assert unpadded(sequences) == expected, name
        assert sequences.response_mask.shape == sequences.responses.shape
    assert not engine.model.training

    rng.seed_all(rank)
    sampled = generate(
        engine.model, batch_of(PROMPTS[rank::2] * 3), Sampling(6, temperature=TEMPERATURE), TOKENS, device=CPU, ranks=2
    )
    spread = Spread.of(12, 12, 2)
    rounds = spread.micro_batches(rank, 0, 12, 4)

    def logprobs_of(micro: Sequences) -> torch.Tensor:
        return policy_forward(engine.model, micro, TEMPERATURE)[0]

    def entropy_of(micro: Sequences) -> torch.Tensor:
        entropy = policy_forward(engine.model, micro, TEMPERATURE, entropy=True)[1]
        assert entropy is not None
        return entropy

    logprobs = in_micro_batches(logprobs_of, sampled, rounds)
    entropy = in_micro_batches(entropy_of, sampled, rounds)
    values = in_micro_batches(lambda micro: value_forward(critic.model, micro), sampled, rounds)
    critic.release()
    head = {n.partition(".")[2]: p.detach().full_tensor() for n, p in critic.model.named_parameters() if "score" in n}
    plain_critic = AutoModelForTokenClassification.from_pretrained(directory, num_labels=1)
    plain_critic.score.load_state_dict(head)
    for row, (prompt, response) in enumerate(unpadded(sampled)):
        with torch.no_grad():
            ids = torch.tensor([prompt + response])
            distribution = torch.log_softmax(plain(input_ids=ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE, -1)
            value = plain_critic(input_ids=ids).logits[0, len(prompt) - 1 : -1, 0]
        length = len(response)
        chosen = distribution[range(length), response]
        torch.testing.assert_close(logprobs[row, :length], chosen, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            entropy[row, :length], -(distribution.exp() * distribution).sum(-1), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(values[row, :length], value, rtol=1e-4, atol=1e-5)
    seen["sampled"] = [response for _, response in unpadded(sampled)]

    # One likeliest token left in is greedy; so is almost no temperature.
    for sampling in (Sampling(6, top_k=1), Sampling(6, top_p=1e-6), Sampling(6, temperature=1e-4)):
        rng.seed_all(rank)
        again = generate(engine.model, batch_of(PROMPTS[rank::2]), sampling, TOKENS, device=CPU, ranks=2)
        assert [r for _, r in unpadded(again)] == [r for _, r in unpadded(sequences)]
    return seen


class _Tokenizer:
    eos_token_id = 1
    pad_token_id = 0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_on_two_ranks, 2, tiny_qwen2(tmp_path_factory.mktemp("model")))


def test_generation_and_log_probs_are_those_of_plain_transformers_without_padding(seen: list[dict[str, Any]]) -> None:
    assert len(seen[0]["sampled"]) == len(seen[1]["sampled"]) == 6


def test_sampling_draws_other_tokens_each_time_and_stops_at_either_end_token(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        responses = [tuple(response) for response in rank["sampled"]]
        assert len(set(responses)) > 2
        for response in responses:
            assert not set(response[:-1]) & set(TOKENS.eos)
            assert len(response) == 6 or response[-1] in TOKENS.eos


def test_all_end_tokens_of_a_model_directory_are_known(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["special"] == TOKENS
