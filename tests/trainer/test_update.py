"""The updates of actor and critic: those of plain torch on the whole mini-batch, however sequences lie on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import tiny_qwen2

from milepost.engines.fsdp import FsdpEngine, OptimizerSettings, Sharding
from milepost.trainer.batch import Experience, Spread
from milepost.trainer.models import ModelSource, load_critic, load_policy
from milepost.trainer.schema import ActorConfig, CriticConfig
from milepost.trainer.update import update_actor, update_critic

BATCH, MINI, EPOCHS = 5, 3, 2
TEMPERATURE = 0.8
LR = 3e-3
ACTOR = ActorConfig(
    ppo_mini_batch_size=MINI,
    ppo_micro_batch_size_per_gpu=1,
    ppo_epochs=EPOCHS,
    clip_ratio=0.1,
    clip_ratio_high=0.15,
    entropy_coeff=0.01,
    use_kl_loss=True,
    kl_loss_coef=0.05,
    kl_loss_type="mse",
)
CRITIC = CriticConfig(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, ppo_epochs=EPOCHS, cliprange_value=0.2)


def whole_batch() -> Experience:
    """Five sequences of 3 prompt and 4 response tokens, with responses of 1 to 4 real tokens."""
    generator = torch.Generator().manual_seed(11)

    def normal() -> torch.Tensor:
        return torch.randn(BATCH, 4, generator=generator)

    lengths = torch.tensor([4, 1, 3, 2, 4])
    mask = (torch.arange(4) < lengths[:, None]).long()
    ids = torch.randint(3, 33, (BATCH, 7), generator=generator)
    prompt_mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
    old = -3.5 + 0.3 * normal()
    return Experience(
        input_ids=ids,
        attention_mask=torch.cat([prompt_mask, mask], 1),
        response_mask=mask,
        old_logprobs=old,
        ref_logprobs=old + 0.2 * normal(),
        old_values=0.3 * normal(),
        advantages=normal(),
        returns=normal(),
    )


def settings() -> OptimizerSettings:
    return OptimizerSettings(LR, (0.9, 0.95), 0.01, lambda step: 0.5**step, 1.0)


def _update(directory: Path) -> dict[int, Any]:
    from torch.distributed.device_mesh import DeviceMesh

    rank, experience, results = torch.distributed.get_rank(), whole_batch(), {}
    for size in (1, 2, 4):
        mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("fsdp",))
        if rank >= size:
            continue
        group = mesh.get_group()

        def total(tensor: torch.Tensor, group: Any = group) -> torch.Tensor:
            torch.distributed.all_reduce(tensor, group=group)
            return tensor

        kwargs: dict[str, Any] = {"dtype": torch.float32, "sharding": Sharding(), "optimizer": settings(), "seed": 1}
        source, device = ModelSource(directory), torch.device("cpu")
        actor = load_policy(source, mesh, device, **kwargs)
        critic = load_critic(source, mesh, device, **kwargs)
        # On 4 ranks the mini-batches of 3 and 2 leave some ranks without a sequence.
        spread = Spread.of(BATCH, MINI, size)
        own = experience.select(list(spread.positions[rank])) if spread.positions[rank] else empty(experience)
        metrics = update_actor(actor, own, spread, ACTOR, TEMPERATURE, total)
        metrics |= update_critic(critic, own, spread, CRITIC, total)
        results[size] = (metrics, whole(actor), whole(critic), actor.lr)
    return results


def empty(experience: Experience) -> Experience:
    return Experience(**{name: getattr(experience, name)[:0] for name in Experience.__dataclass_fields__})


def whole(engine: FsdpEngine) -> dict[str, np.ndarray]:
    engine.release()
    return {name: weight.detach().full_tensor().numpy() for name, weight in engine.model.named_parameters()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[int, Any]:
    return run_ranks(_update, 4, directory)[0]


def test_the_actors_updates_are_those_of_plain_torch(directory: Path, results: dict[int, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    e = whole_batch()
    seen: dict[str, list[float]] = {
        "actor/pg_loss": [],
        "actor/pg_clipfrac": [],
        "actor/ppo_kl": [],
        "actor/kl_loss": [],
    }
    norms = []
    for _ in range(EPOCHS):
        for rows in ([0, 1, 2], [3, 4]):
            losses, clipped, kls, ref_kls, entropies = [], [], [], [], []
            for row in rows:
                positions = (e.attention_mask[row].cumsum(0) - 1).clamp(min=0)
                logits = model(
                    input_ids=e.input_ids[row : row + 1],
                    attention_mask=e.attention_mask[row : row + 1],
                    position_ids=positions[None],
                ).logits[0]
                for t in range(int(e.response_mask[row].sum())):
                    logp = torch.log_softmax(logits[2 + t] / TEMPERATURE, -1)
                    chosen = logp[e.input_ids[row, 3 + t]]
                    ratio = (chosen - e.old_logprobs[row, t]).exp()
                    advantage = e.advantages[row, t]
                    one, two = -advantage * ratio, -advantage * ratio.clamp(1 - 0.1, 1 + 0.15)
                    losses.append(torch.max(one, two))
                    clipped.append(float(two > one))
                    kls.append(float(e.old_logprobs[row, t] - chosen.detach()))
                    ref_kls.append((chosen - e.ref_logprobs[row, t]) ** 2 / 2)
                    entropies.append(-(logp.exp() * logp).sum())
            n = len(losses)
            loss = sum(losses) / n - 0.01 * sum(entropies) / n + 0.05 * sum(ref_kls) / n
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            for name, values in zip(seen, (losses, clipped, kls, ref_kls), strict=True):
                seen[name].append(sum(float(torch.as_tensor(value).detach()) for value in values) / n)
    expected = {name: sum(values) / 4 for name, values in seen.items()} | {
        "actor/grad_norm": sum(norms) / 4,
        "actor/lr": LR,
    }
    assert 0 < expected["actor/pg_clipfrac"] < 1
    for metrics, weights, _, next_lr in results.values():
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
        for name, weight in model.named_parameters():
            np.testing.assert_allclose(weights[name], weight.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=name)
        assert next_lr == LR * 0.5


def test_the_critics_updates_are_those_of_plain_torch(directory: Path, results: dict[int, Any]) -> None:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(directory, num_labels=1).eval()  # no dropout
    with torch.no_grad():
        head = torch.zeros(1, 16).normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
        model.score.weight.copy_(head)
        model.score.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    e, losses_seen, clipped_seen, norms = whole_batch(), [], [], []
    for _ in range(EPOCHS):
        for rows in ([0, 1], [2, 3], [4]):
            losses, clipped = [], []
            for row in rows:
                positions = (e.attention_mask[row].cumsum(0) - 1).clamp(min=0)
                values = model(
                    input_ids=e.input_ids[row : row + 1],
                    attention_mask=e.attention_mask[row : row + 1],
                    position_ids=positions[None],
                ).logits[0, :, 0]
                for t in range(int(e.response_mask[row].sum())):
                    value, old, target = values[2 + t], e.old_values[row, t], e.returns[row, t]
                    near = old + (value - old).clamp(-0.2, 0.2)
                    losses.append(torch.max((value - target) ** 2, (near - target) ** 2) / 2)
                    clipped.append(float((near - target) ** 2 > (value - target) ** 2))
            (sum(losses) / len(losses)).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses_seen.append(float(sum(losses).detach()) / len(losses))
            clipped_seen.append(sum(clipped) / len(clipped))
    assert sum(clipped_seen) > 0
    for metrics, _, weights, _ in results.values():
        assert metrics["critic/vf_loss"] == pytest.approx(np.mean(losses_seen), rel=2e-3)
        assert metrics["critic/vf_clipfrac"] == pytest.approx(np.mean(clipped_seen), rel=1e-6)
        assert metrics["critic/grad_norm"] == pytest.approx(np.mean(norms), rel=2e-3)
        for name, weight in model.named_parameters():
            np.testing.assert_allclose(weights[name], weight.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=name)


# Under DeepSpeed


def _three_ways(directory: Path, out: Path) -> dict[str, Any]:
    """The same updates of actor and critic: under FSDP2, under ZeRO-3, and in one engine of both, without clipping."""
    import math
    from dataclasses import replace

    import zero_engines as zero
    from torch.distributed.device_mesh import init_device_mesh

    from milepost.engines.deepspeed.setup import ZeroSettings, start
    from milepost.trainer import zero_models
    from milepost.trainer.update import update_joint

    rank, size, device = torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu")
    spread = Spread.of(BATCH, MINI, size)
    own = whole_batch().select(list(spread.positions[rank]))
    critic_config = replace(CRITIC, ppo_mini_batch_size=MINI, ppo_micro_batch_size_per_gpu=1)
    slow, fast = (replace(settings(), lr=lr, grad_clip=math.inf) for lr in (LR, 2 * LR))

    def total(tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def apart(actor: Any, critic: Any) -> dict[str, float]:
        return update_actor(actor, own, spread, ACTOR, TEMPERATURE, total) | update_critic(
            critic, own, spread, critic_config, total
        )

    source, layout = ModelSource(directory), ZeroSettings(3, torch.float32)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    kwargs: dict[str, Any] = {"dtype": torch.float32, "sharding": Sharding(), "seed": 1}
    fsdp = [
        load(source, mesh, device, optimizer=each, **kwargs)
        for load, each in ((load_policy, slow), (load_critic, fast))
    ]
    start(device)
    two = [
        load(source, device, layout, each, 1)
        for load, each in ((zero_models.load_policy, slow), (zero_models.load_critic, fast))
    ]
    joint = zero_models.load_joint(source, source, device, layout, (slow, fast), 1)
    results: dict[str, Any] = {
        "fsdp": (apart(*fsdp), [whole(engine) for engine in fsdp]),
        "two": (apart(*two), [zero.whole(engine) for engine in two]),
    }
    metrics = update_joint(joint, own, spread, ACTOR, critic_config, TEMPERATURE, total)
    both = zero.whole(joint)
    parts = [
        {name.removeprefix(prefix): value for name, value in both.items() if name.startswith(prefix)}
        for prefix in ("policy.", "value_model.")
    ]
    results["one"] = (metrics, parts)
    results["rates"] = joint.learning_rates
    joint.save(zero.Folder(out))
    return results


@pytest.fixture(scope="module")
def joint(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("joint") / "actor_critic"
    return out, run_ranks(_three_ways, 2, directory, out)[0]


def test_under_deepspeed_the_updates_are_those_of_fsdp2_and_one_engine_makes_those_of_two(
    joint: tuple[Path, dict[str, Any]],
) -> None:
    found = joint[1]
    expected, weights = found["fsdp"]
    assert found["rates"] == (LR * 0.5, 2 * LR * 0.5)
    for way in ("two", "one"):
        metrics, state = found[way]
        assert set(metrics) == set(expected)
        for name, value in expected.items():
            if way == "one" and name.endswith("grad_norm"):
                assert metrics[name] > max(expected["actor/grad_norm"], expected["critic/grad_norm"])
            else:
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (way, name)
        for ours, theirs in zip(state, weights, strict=True):
            for name, value in theirs.items():
                np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{way}: {name}")


@pytest.mark.parametrize(("role", "number"), [("policy", 0), ("value", 1)])
def test_each_model_of_one_engine_is_merged_by_itself(
    joint: tuple[Path, dict[str, Any]], tmp_path: Path, role: str, number: int
) -> None:
    import milepost

    milepost.merge(joint[0], tmp_path / role, role=role)
    index, state = milepost.open(tmp_path / role).index, joint[1]["one"][1][number]
    assert set(index) == {name for name in state if not name.startswith("optim/")}
    for name, entry in index.items():
        np.testing.assert_array_equal(entry.numpy(), state[name], err_msg=name)
    assert milepost.test(joint[0], tmp_path / role, role=role).ok
