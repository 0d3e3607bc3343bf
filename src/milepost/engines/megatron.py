"""Megatron-Core as an engine: tensor, pipeline and expert parallelism, AdamW, a schedule.

Megatron's models and schedules compute (`engines.megatron_model`, `engines.megatron_pipeline`); weights and moments are
shown as boxes of Hugging Face's tensors (`engines.megatron_state`), so a resume from any layout fills them.
`engines.megatron_save` writes the files.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from milepost.engines import megatron_save, rng
from milepost.engines.base import RNG, Inputs, LiveTensor, Outputs, RoleFiles
from milepost.engines.megatron_gradients import Gradients
from milepost.engines.megatron_model import on_device
from milepost.engines.megatron_pipeline import PipelineModel, Results
from milepost.engines.megatron_state import cut_parameters, held_tensors, named_tensors, padding, show
from milepost.engines.optim import OptimizerSettings, load_schedule_objects, schedule_objects
from milepost.errors import CallError, MismatchError
from milepost.index import Box, moment_name
from milepost.mapping import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
TRACKER = "rng_tracker_states"
"""Megatron's own random states (dropout inside of tensor-parallel regions), beside those of `engines.rng`."""


class MegatronEngine:
    """One role's model under Megatron, with AdamW and a schedule unless it is frozen. Satisfies
    `milepost.engines.base.PipelineEngine`.

    Args:
        model: chunks of `megatron_model.build_chunks`, whose values are still to be written.
        config: the parsed config.json that it was built for.
        optimizer: settings, or None for a model that is never updated.
        form: "classic" or "dist": in which of Megatron's forms a save is written.
        seed: what new random streams are derived from when a checkpoint has none for this rank.
        companions: Hugging Face model directory whose small files travel with each save, byte for byte; None: none.
        config_text: contents for `config.json` where the model's own differs from that of `companions`.

    Raises CallError where Megatron cannot train the model as it is cut.
    """

    layout = "megatron"

    def __init__(
        self,
        model: PipelineModel,
        config: Config,
        *,
        optimizer: OptimizerSettings | None = None,
        form: str = megatron_save.CLASSIC,
        seed: int = 0,
        companions: Path | None = None,
        config_text: str | None = None,
    ) -> None:
        state = importlib.import_module("megatron.core.parallel_state")
        self.model = model
        self.config = config
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.data_rank: int = state.get_data_parallel_rank()
        self.data_size: int = state.get_data_parallel_world_size()
        self.form = form
        self._seed = seed
        self._companions = companions
        self._config_text = config_text
        self._tensors = named_tensors(model.chunks, config)
        self._held = held_tensors(self._tensors, config)
        self._steps: dict[str, torch.Tensor] = {}
        self._grad_clip = math.inf
        self.optimizer: torch.optim.AdamW | None = None
        self.scheduler: LambdaLR | None = None
        self._gradients: Gradients | None = None
        if optimizer is not None:
            if model.parallel.tensor > 1 and model.chunks[0].config.num_moe_experts:
                raise CallError(
                    "Megatron trains experts under tensor parallelism with sequence parallelism only, which milepost "
                    "has not: set tensor_model_parallel_size=1 and cut by expert_model_parallel_size and "
                    "pipeline_model_parallel_size"
                )
            trained = {name: t for name, t in self._tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
            # Named parameters: the names in the file spare a reader guessing them from the model's order.
            self.optimizer = torch.optim.AdamW(
                list(trained.items()), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
            )
            self.scheduler = LambdaLR(self.optimizer, optimizer.lr_factor)
            self._grad_clip = optimizer.grad_clip
            self._gradients = Gradients(trained, cut_parameters(self._tensors, config))

    # What a save or a resume sees

    def tensors(self) -> Mapping[str, LiveTensor]:
        """Every weight, persistent buffer and moment of the model, with the boxes that this rank holds. What Megatron
        holds in one parameter (queries, keys and values) is three here; tied weights appear once."""
        live = show(self._held, self._tensors)
        if self.optimizer is None:
            return live
        self._make_moments()
        for moment in _MOMENTS:
            moments = {name: self.optimizer.state[p][moment] for name, p in self._parameters().items()}
            for name, tensor in show(self._trained_held(), moments).items():
                key = moment_name(name, moment)
                live[key] = LiveTensor(key, tensor.shape, tensor.dtype, tensor.boxes)
        for name, held in self._trained_held().items():
            # AdamW counts once for a parameter; each tensor in it shows a count of its own, which `finish_load` puts
            # together again.
            key = moment_name(name, "step")
            boxes: tuple[tuple[Box, torch.Tensor], ...] = ()
            if held.parameter is not None:
                count = self._steps.setdefault(name, torch.zeros((), dtype=torch.float32))
                count.copy_(self.optimizer.state[self._parameters()[held.parameter]]["step"])
                boxes = ((Box((), ()), count),)
            live[key] = LiveTensor(key, (), "float32", boxes)
        return live

    def objects(self) -> Mapping[str, Any]:
        """Schedule, optimizer hyperparameters, and this rank's generators."""
        return {
            **schedule_objects(self.optimizer, self.scheduler),
            "rng": {self.rank: self.generators()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        """Take over schedule, hyperparameters and generators, and say what had to be made fresh."""
        remarks = load_schedule_objects(self.optimizer, self.scheduler, objects)
        step = 0 if self.scheduler is None else self.scheduler.last_epoch
        saved = objects.get("rng") or {}
        tracker = saved.get(self.rank, {}).get(TRACKER) if len(saved) == self.world_size else None
        remarks[RNG] = self._take_over(saved, step, tracker)
        return {part: why for part, why in remarks.items() if why}

    def finish_load(self) -> None:
        """Put the counts of steps back into the optimizer, and zeros into what pads the vocabulary.

        Raises MismatchError where tensors that are one parameter here have counted different steps.
        """
        first: dict[str, str] = {}
        for name, held in self._trained_held().items() if self.optimizer is not None else ():
            if held.parameter is None or name not in self._steps:
                continue
            other = first.setdefault(held.parameter, name)
            if not torch.equal(self._steps[name], self._steps[other]):
                raise MismatchError(
                    f"{moment_name(name, 'step')} is {self._steps[name].item():g} and {moment_name(other, 'step')} is "
                    f"{self._steps[other].item():g}: Megatron holds these weights as one and keeps one count for them; "
                    "resume with strategy fsdp2"
                )
        for parameter, name in first.items():
            self._optimizer().state[self._parameters()[parameter]]["step"].copy_(self._steps[name])
        # What pads the vocabulary is in no checkpoint: the same files must come out of the same state.
        for name, begin in padding(self._tensors, self.config).items():
            tensor = self._tensors[name]
            tensor.detach()[begin:].zero_()
            for moment in _MOMENTS if self.optimizer is not None else ():
                state = self.optimizer.state[tensor] if self.optimizer is not None else {}
                if moment in state:
                    state[moment][begin:].zero_()

    def save(self, files: RoleFiles) -> None:
        """Write this rank's files of Megatron's form. All ranks call it together."""
        if self.optimizer is not None:
            self._make_moments()
        with on_device(self.model.device):
            megatron_save.save(self, files)
        if self.rank == 0:
            megatron_save.save_config(files, self._companions, self._config_text, self.config)

    # What a trainer does with it

    def forward_backward(
        self, batches: Sequence[Inputs], loss: Callable[[int, Outputs], tuple[torch.Tensor, Any]]
    ) -> Results:
        """Add the gradients of all micro-batches of an update, averaged over the data-parallel ranks."""
        results = self.model.forward_backward(batches, loss)
        if self._gradients is None:
            raise TypeError("a frozen model has no gradients")
        self._gradients.reduce()
        return results

    def step(self) -> float:
        """Clip the gradient, update the weights, clear the gradient. Returns the global norm before clipping.

        A norm that is not finite leaves weights and moments as they are.
        """
        if self.optimizer is None or self._gradients is None:
            raise TypeError("a frozen model has no optimizer step")
        norm = self._gradients.clip(self._grad_clip)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def advance_schedule(self) -> None:
        """Count one finished training step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def release(self) -> None:
        """Nothing: no weights are gathered."""

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of the next update of each parameter group; none for a frozen model."""
        return () if self.optimizer is None else tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    # What a save asks of it besides

    @property
    def companions(self) -> Path | None:
        """The model's own directory."""
        return self._companions

    def generators(self) -> dict[str, Any]:
        """Every random state of this rank."""
        tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
        states = {name: state.clone() for name, state in tracker.get_states().items()}
        return {**rng.capture(), TRACKER: states}

    # Details

    def _take_over(self, saved: Mapping[int, Mapping[str, Any]], step: int, tracker: Mapping[str, Any] | None) -> str:
        why = rng.take_over(saved, self.rank, self.world_size, seed=self._seed, step=step)
        generators = importlib.import_module("megatron.core.tensor_parallel.random")
        if tracker is not None:
            own = {name: rng.as_tensor(state) for name, state in tracker.items()}
            generators.get_cuda_rng_tracker().set_states(own)
        else:
            with rng.isolated(), on_device(self.model.device):
                generators.model_parallel_cuda_manual_seed(self._seed + step, force_reset_rng=True)
        return why

    def _optimizer(self) -> torch.optim.AdamW:
        if self.optimizer is None:
            raise TypeError("a frozen model has no optimizer")
        return self.optimizer

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._tensors.items() if isinstance(tensor, nn.Parameter)}

    def _trained_held(self) -> Mapping[str, Any]:
        """Of the model's tensors those that are trained; a bias of the router is none of them."""
        return {name: held for name, held in self._held.items() if not name.endswith(".e_score_correction_bias")}

    def _make_moments(self) -> None:
        """Make the moments that AdamW makes at its first step, with the values it gives them: all zero."""
        optimizer = self._optimizer()
        for weight in self._parameters().values():
            state = optimizer.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(weight, memory_format=torch.preserve_format)
