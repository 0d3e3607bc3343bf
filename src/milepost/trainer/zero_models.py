"""From a Hugging Face model directory to a DeepSpeed engine, as `trainer.models` does it for FSDP2.

Policy and critic are two engines, or one around `PolicyAndValueWrapper`, whose state dict is that of the wrappers of
other PPO trainers: `policy.*` and `value_model.*`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from milepost.engines.deepspeed.engine import DeepSpeedEngine
from milepost.engines.deepspeed.setup import ZeroSettings, initialize
from milepost.engines.optim import OptimizerSettings
from milepost.mapping.wrappers import POLICY, VALUE_MODEL
from milepost.trainer.models import ModelSource, critic_on_meta, fill_from_directory, policy_on_meta, tied_names


class PolicyAndValueWrapper(nn.Module):
    """A causal language model and a token classifier with one label, trained together.

    One forward gives the logits of the first and the values of the second, on the same sequences.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = value_model

    def forward(self, logits_to_keep: int, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Logits of the last `logits_to_keep` positions, [B, logits_to_keep, vocab_size], and values, [B, P + T, 1]."""
        return self.policy(logits_to_keep=logits_to_keep, **inputs).logits, self.value_model(**inputs).logits


def load_policy(
    source: ModelSource, device: torch.device, zero: ZeroSettings, optimizer: OptimizerSettings, seed: int
) -> DeepSpeedEngine:
    """A causal language model that is trained."""
    model = policy_on_meta(source, zero.dtype)
    aliases = tied_names(model)
    engine = initialize(model, device, zero, [("", optimizer)], seed=seed, companions=source.directory)
    fill_from_directory(engine, model, source.directory, aliases, seed)
    return _ready(engine)


def load_critic(
    source: ModelSource, device: torch.device, zero: ZeroSettings, optimizer: OptimizerSettings, seed: int
) -> DeepSpeedEngine:
    """A token classifier with one label on the same backbone. A head that the directory lacks is made from `seed`."""
    model = critic_on_meta(source, zero.dtype)
    aliases = tied_names(model)
    engine = initialize(
        model,
        device,
        zero,
        [("", optimizer)],
        seed=seed,
        companions=source.directory,
        config_text=model.config.to_json_string(),
    )
    fill_from_directory(engine, model, source.directory, aliases, seed)
    return _ready(engine)


def load_joint(
    policy: ModelSource,
    critic: ModelSource,
    device: torch.device,
    zero: ZeroSettings,
    optimizers: tuple[OptimizerSettings, OptimizerSettings],
    seed: int,
) -> DeepSpeedEngine:
    """Both in one engine: a parameter group each, of policy and value model, and one clipping over both."""
    wrapper = PolicyAndValueWrapper(policy_on_meta(policy, zero.dtype), critic_on_meta(critic, zero.dtype))
    parts = ((POLICY, wrapper.policy, policy), (VALUE_MODEL, wrapper.value_model, critic))
    aliases = {name: tied_names(model) for name, model, _ in parts}
    groups = [(f"{name}.", optimizer) for (name, _, _), optimizer in zip(parts, optimizers, strict=True)]
    engine = initialize(wrapper, device, zero, groups, seed=seed, companions=policy.directory)
    for name, model, source in parts:
        fill_from_directory(engine, model, source.directory, aliases[name], seed, f"{name}.")
    return _ready(engine)


def _ready(engine: DeepSpeedEngine) -> DeepSpeedEngine:
    engine.finish_load()
    engine.model.eval()
    return engine
