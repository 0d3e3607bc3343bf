"""PPO under Megatron: the same updates, log-probs, values and tokens as under FSDP2, whatever a model is cut into."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

from milepost.errors import CallError, ConfigError
from milepost.trainer.config import load_config
from milepost.trainer.config_text import render_yaml
from milepost.trainer.schema import ActorConfig, CriticConfig

ROOT = Path(__file__).parents[2]
MINI, TEMPERATURE = 3, 0.8
ACTOR = ActorConfig(
    ppo_mini_batch_size=MINI, ppo_micro_batch_size_per_gpu=1, ppo_epochs=2, entropy_coeff=0.01, use_kl_loss=True
)
CRITIC = CriticConfig(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, ppo_epochs=2, cliprange_value=0.2)
NEW = 5
RANKS = 4
CUT = {"tp2-pp2": (2, 2, None, 1), "tp2-ep2": (2, 1, None, 2), "vpp2": (1, 2, 2, 1), "ep2": (1, 1, None, 2)}
KIND = {"ep2": "qwen3_moe", "tp2-ep2": "qwen3_moe"}
"""The model of a layout; llama elsewhere."""


def _batch() -> Any:
    """Five sequences of 3 prompt and 4 response tokens, with 1 to 4 real response tokens."""
    import torch

    from milepost.trainer.batch import Experience

    generator = torch.Generator().manual_seed(11)

    def normal() -> torch.Tensor:
        return torch.randn(5, 4, generator=generator)

    mask = (torch.arange(4) < torch.tensor([4, 1, 3, 2, 4])[:, None]).long()
    prompts = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
    old = -3.5 + 0.3 * normal()
    return Experience(
        input_ids=torch.randint(3, 33, (5, 7), generator=generator),
        attention_mask=torch.cat([prompts, mask], 1),
        response_mask=mask,
        old_logprobs=old,
        ref_logprobs=old + 0.2 * normal(),
        old_values=0.3 * normal(),
        advantages=normal(),
        returns=normal(),
    )


def _reference(models: Path) -> dict[str, Any]:
    """One step's numbers under FSDP2, on one rank; what is drawn for a sequence as if it lay on four."""
    import megatron_engines as made

    from milepost.trainer.ranks import Ranks

    return {
        kind: _numbers(
            [made.make_fsdp(models / kind, critic=critic) for critic in (False, True)],
            Ranks(made.CPU, _Comm()),
            draw_as=RANKS,
        )
        for kind in ("llama", "qwen3_moe")
    }


def _run(models: Path) -> dict[str, Any]:
    """The same under each layout, on four ranks."""
    import megatron_engines as made

    from milepost.engines.megatron.parallel import Parallel
    from milepost.trainer.ranks import Ranks

    told: dict[str, Any] = {}
    for name, sizes in CUT.items():
        parallel = Parallel(*sizes)
        directory = models / KIND.get(name, "llama")
        actor = made.make(directory, parallel)
        critic = made.remake(directory, parallel, critic=True)
        told[name] = _numbers([actor, critic], Ranks(made.CPU, _Comm(), made.share()))
    return told


class _Comm:
    """As much of a communicator as `Ranks` asks for here."""

    @property
    def rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    @property
    def world_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size()


def _numbers(engines: list[Any], ranks: Any, draw_as: int | None = None) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from milepost.trainer.batch import Spread
    from milepost.trainer.data import PromptBatch
    from milepost.trainer.forward import evaluate, policy_forward, value_forward
    from milepost.trainer.rollout import Sampling, SpecialTokens, generate
    from milepost.trainer.update import update_actor, update_critic

    actor, critic = engines
    whole = _batch()
    spread = Spread.of(5, MINI, ranks.data_size)
    rows = list(spread.positions[ranks.data_rank])
    own = type(whole)(**{name: getattr(whole, name)[rows] for name in type(whole).__dataclass_fields__})
    rounds = spread.micro_batches(ranks.data_rank, 0, spread.size, 2)

    def logprobs(model: Any, micro: Any) -> torch.Tensor:
        return torch.stack(policy_forward(model, micro, TEMPERATURE, entropy=True), dim=-1)

    def together(value: Any) -> dict[int, Any]:
        """Sequence -> what the ranks that have it say of it, which is the same."""
        return gathered(dict(zip(rows, value.tolist(), strict=True)))

    def gathered(said_here: dict[int, Any]) -> dict[int, Any]:
        shares: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(shares, said_here)
        found: dict[int, Any] = {}
        for share in shares:
            for row, said in share.items():
                assert found.setdefault(row, said) == said
        return {row: found[row] for row in sorted(found)}

    def answers(sampling: Sampling, mine: list[int]) -> dict[int, Any]:
        ids, mask = whole.input_ids[mine, :3], whole.attention_mask[mine, :3]
        prompts = PromptBatch(ids, mask, ["?"] * len(mine), [None] * len(mine), [], [])
        got = generate(
            actor.model, prompts, sampling, SpecialTokens((1, 2), 0), device=ranks.device, ranks=ranks.world_size
        )
        width = got.response_mask.shape[1]
        padded = torch.zeros(len(mine), 2, NEW, dtype=torch.long)
        padded[:, 0, :width], padded[:, 1, :width] = got.responses * got.response_mask, got.response_mask
        return dict(zip(mine, padded.tolist(), strict=True))

    def drawn() -> dict[int, Any]:
        """What is drawn for a sequence depends on which others are on its rank."""
        shares = [rows] if draw_as is None else map(list, Spread.of(5, MINI, draw_as).positions)
        found: dict[int, Any] = {}
        for share in shares:
            torch.manual_seed(7)
            found |= answers(Sampling(NEW, temperature=1.5, top_k=20, top_p=0.9), share)
        return gathered(found)

    told: dict[str, Any] = {
        "logprobs": together(evaluate(actor.model, logprobs, own, rounds, channels=(2,))),
        "values": together(evaluate(critic.model, value_forward, own, rounds)),
        "greedy": gathered(answers(Sampling(NEW, do_sample=False), rows)),
        "sampled": drawn(),
    }
    told["metrics"] = update_actor(actor, own, spread, ACTOR, TEMPERATURE, ranks.sum)
    told["metrics"] |= update_critic(critic, own, spread, CRITIC, ranks.sum)
    told["after"] = together(evaluate(actor.model, logprobs, own, rounds, channels=(2,)))
    reward = ranks.agreed(torch.tensor([float(ranks.rank)]))
    told["agreed"] = (ranks.rank, float(reward))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("megatron.core")
    import megatron_engines as made

    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3_moe"):
        made.save_model(root / kind, kind)
    (wanted,) = run_ranks(_reference, 1, root)
    return [{**rank, **wanted} for rank in run_ranks(_run, RANKS, root)]


@pytest.mark.parametrize("layout", CUT)
def test_log_probs_values_and_updates_are_those_of_fsdp(told: list[dict[str, Any]], layout: str) -> None:
    """At the real response tokens: what a model says of padding means nothing."""
    wanted = told[0][KIND.get(layout, "llama")]
    mask = _batch().response_mask.numpy()
    for rank in told:
        found = rank[layout]
        for what in ("logprobs", "values", "after"):
            assert list(found[what]) == [0, 1, 2, 3, 4]
            ours, theirs = (np.array(list(said[what].values()))[mask == 1] for said in (found, wanted))
            np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=3e-5, err_msg=what)
        assert set(found["metrics"]) == set(wanted["metrics"])
        for name, value in wanted["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("layout", CUT)
def test_the_likeliest_answers_are_those_of_transformers(told: list[dict[str, Any]], layout: str) -> None:
    assert told[0][layout]["greedy"] == told[0][KIND.get(layout, "llama")]["greedy"]
    assert len({str(answer) for answer in told[0][layout]["greedy"].values()}) > 1


@pytest.mark.parametrize("layout", CUT)
def test_drawn_answers_are_the_same_on_every_rank_of_a_model(told: list[dict[str, Any]], layout: str) -> None:
    """`together` has compared them. Where sequences lie as under FSDP2 they are transformers' too."""
    assert all(rank[layout]["sampled"] == told[0][layout]["sampled"] for rank in told)
    if layout == "ep2":
        assert told[0][layout]["sampled"] == told[0]["qwen3_moe"]["sampled"]


def test_a_reward_is_one_for_all_ranks_of_a_model(told: list[dict[str, Any]]) -> None:
    assert [rank["tp2-pp2"]["agreed"] for rank in told] == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0)]
    assert [rank["tp2-ep2"]["agreed"] for rank in told] == [(0, 0.0), (1, 0.0), (2, 2.0), (3, 2.0)]
    assert [rank["ep2"]["agreed"] for rank in told] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


# The config


def test_the_config_to_start_from_is_made_from_the_schema() -> None:
    path = ROOT / "configs" / "ppo_megatron_trainer.yaml"
    assert path.read_text() == render_yaml("megatron")
    model = ["actor_rollout_ref.model.path=/models/m"]
    config = load_config(path, model)
    assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == ("megatron", "megatron")
    assert config == load_config(None, [*model, "actor_rollout_ref.actor.strategy=megatron"])


def test_the_critic_is_cut_as_the_actor() -> None:
    config = load_config(
        None,
        ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"],
    )
    assert asdict(config.critic.megatron) == asdict(config.actor_rollout_ref.actor.megatron)
    assert config.critic.megatron.tensor_model_parallel_size == 2


def test_every_size_of_the_config_is_the_engines() -> None:
    pytest.importorskip("megatron.core")
    from milepost.engines.megatron.parallel import Parallel
    from milepost.trainer.megatron_setup import parallel_of

    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "virtual_pipeline_model_parallel_size": 4,
        "expert_model_parallel_size": 5,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": "true",
        "override_transformer_config.num_layers_in_first_pipeline_stage": 6,
        "override_transformer_config.num_layers_in_last_pipeline_stage": 7,
        "override_transformer_config.account_for_loss_in_pipeline_split": "true",
    }
    section = "actor_rollout_ref.actor.megatron"
    said = ["actor_rollout_ref.actor.strategy=megatron", *(f"{section}.{key}={n}" for key, n in sizes.items())]
    wanted = Parallel(2, 3, 4, 5, 1, sequence=True, first=6, last=7, count_loss=True)
    config = load_config(None, said)
    assert parallel_of(config.actor_rollout_ref.actor.megatron) == wanted
    assert parallel_of(config.critic.megatron) == wanted


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.strategy=fsdp2"], "both must be it"),
        (
            ["critic.megatron.pipeline_model_parallel_size=2"],
            "critic.megatron.pipeline_model_parallel_size=2 must be as",
        ),
        (
            ["critic.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=1"],
            "num_layers_in_first_pipeline_stage=1 must be as",
        ),
        (["actor_rollout_ref.actor.megatron.dtype=fp16"], "actor_rollout_ref.actor.megatron.dtype"),
        (["actor_rollout_ref.actor.checkpoint.megatron_format=zarr"], r"classic\|dist"),
        (["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=0"], "tensor_model_parallel_size"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["actor_rollout_ref.actor.strategy=megatron", *overrides])


def test_a_missing_megatron_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from milepost.engines.megatron.install import check_installed

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", absent)
        with pytest.raises(CallError, match=r"pip install 'milepost\[megatron\]'"):
            check_installed()
    monkeypatch.setattr(metadata, "version", lambda _: "0.15.3")
    with pytest.raises(CallError, match=r"0\.15\.3 is too old"):
        check_installed()
