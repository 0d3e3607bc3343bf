"""What the embedded run sets where nobody says otherwise.

The defaults of `schema.py` are those for a real model. Where no model is named, `milepost train` trains a tiny one to
add, which wants short texts, a high learning rate and few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MODEL_PATH = "actor_rollout_ref.model.path"
"""The key that, where it is null, makes a run an embedded one."""

EMBEDDED: Mapping[str, Any] = MappingProxyType(
    {
        "data.max_prompt_length": 16,
        "data.max_response_length": 6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.actor.ppo_epochs": 2,
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
        "actor_rollout_ref.actor.deepspeed_config.dtype": "fp32",
        "critic.optim.lr": 1e-3,
        "critic.fsdp_config.dtype": "fp32",
        "trainer.experiment_name": "additions",
        "trainer.total_training_steps": 30,
        "trainer.save_freq": 5,
        "trainer.test_freq": 5,
    }
)
