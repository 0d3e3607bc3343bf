"""TRL's PPO: save the policy, and the value model, from whatever engine they are in.

    class MyTrainer(PolicySaveMixin, PPOTrainer): ...

TRL keeps policy and value model in one wrapper, and to save the policy puts it in the engine's place. What follows asks
the policy for what only the engine has, and fails under ZeRO-3 (`AttributeError: 'MistralForCausalLM' object has no
attribute 'zero_gather_16bit_weights_on_model_save'`, with transformers 5 `'MistralConfig' object has no attribute
'get'`); under DDP the wrapper itself is saved, as no model. `save_model`, and through it each checkpoint in
mid-training, here takes both models out of the engine, by `milepost.save_policy`.

For `trl.experimental.ppo.PPOTrainer` of TRL 1.x, `trl.PPOTrainer` before, and `trl.PPOv2Trainer` of TRL 0.11.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from milepost.integrations.folder import into_directory
from milepost.integrations.live import submodule, unwrap
from milepost.integrations.methods import STREAM, PolicyOptions
from milepost.integrations.policy import write_policy

POLICY, VALUE = "policy.", "value_model."
VALUE_MODEL = "value_model"
"""The folder for the value model, inside the policy's."""

_ARGUMENTS = "training_args.bin"


class PolicySaveMixin:
    """Stands before TRL's trainer among the bases of a class: a `save_model` that works under every engine.

    The policy goes into the output directory, with its tokenizer, and the value model into `value_model/` in it: no
    other file holds it once training is over. `save_method` is one of `milepost.save_policy`.
    """

    save_method = STREAM

    model: Any
    args: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save policy and value model; every rank calls it. Other files in `output_dir` stay as they are."""
        target = Path(output_dir or self.args.output_dir)
        # TRL before 0.12 calls it tokenizer.
        processing_class = self.__dict__.get("processing_class") or self.__dict__.get("tokenizer")
        # The value model first: where the policy is, all is.
        for prefix, place in ((VALUE, target / VALUE_MODEL), (POLICY, target)):
            options = PolicyOptions(prefix=prefix, method=self.save_method, processing_class=processing_class)
            write_policy(self.model, place, options, partial(into_directory, place))
        if self.args.process_index == 0:
            import torch  # noqa: PLC0415

            torch.save(self.args, target / _ARGUMENTS)
        if self.args.push_to_hub and not _internal_call:
            trainer: Any = self
            trainer.push_to_hub(commit_message="Model save", revision=getattr(self.args, "hub_revision", None))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's card, of the policy. TRL asks the engine for the config, which DDP does not show: a checkpoint in
        mid-training ended there."""
        engine, self.model = self.model, submodule(unwrap(self.model), POLICY)
        try:
            card: Any = super()
            card.create_model_card(*args, **kwargs)
        finally:
            self.model = engine
