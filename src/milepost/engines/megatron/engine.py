"""Megatron-Core as an engine: tensor, pipeline and expert parallelism, AdamW or its distributed form, a schedule.

Megatron's models and schedules compute (`engines.megatron.model`, `engines.megatron.pipeline`); weights and moments are
shown as boxes of Hugging Face's tensors (`engines.megatron.state`), so a resume from any layout fills them.
`engines.megatron.save` writes the files.
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

from milepost.engines import rng
from milepost.engines.base import RNG, Inputs, LiveTensor, Outputs, RoleFiles
from milepost.engines.megatron import save as megatron_save
from milepost.engines.megatron.adam import WholeParameters
from milepost.engines.megatron.distributed_optimizer import SharedParameters
from milepost.engines.megatron.gradients import Gradients
from milepost.engines.megatron.model import on_device
from milepost.engines.megatron.pipeline import PipelineModel, Results
from milepost.engines.megatron.state import cut_parameters, held_tensors, named_tensors, padding, show, show_parts
from milepost.engines.megatron.updates import MOMENTS, STEP, Part, Updates
from milepost.engines.optim import OptimizerSettings, load_schedule_objects, schedule_objects
from milepost.errors import CallError, MismatchError
from milepost.index import Box, moment_name
from milepost.mapping import Config

TRACKER = "rng_tracker_states"
"""Megatron's own random states (dropout inside of tensor-parallel regions), beside those of `engines.rng`."""


class MegatronEngine:
    """One role's model under Megatron, with AdamW and a schedule unless it is frozen. Satisfies
    `milepost.engines.base.PipelineEngine`.

    Args:
        model: chunks of `model.build_chunks`, whose values are still to be written.
        config: the parsed config.json that it was built for.
        optimizer: settings, or None for a model that is never updated.
        distributed: whether data-parallel ranks share out masters and moments: Megatron's distributed optimizer.
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
        distributed: bool = False,
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
        self.updates: Updates | None = None
        self.scheduler: LambdaLR | None = None
        self._gradients: Gradients | None = None
        if optimizer is not None:
            made = model.chunks[0].config
            if model.parallel.tensor > 1 and made.num_moe_experts and not made.sequence_parallel:
                raise CallError(
                    "Megatron trains experts under tensor parallelism with sequence parallelism only: leave out "
                    "sequence_parallel=false, or set tensor_model_parallel_size=1"
                )
            trained = {name: t for name, t in self._tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
            with on_device(model.device):
                cut = cut_parameters(self._tensors, config)
                self._gradients = Gradients(model.chunks, trained, cut, sharded=distributed)
                if distributed:
                    self.updates = SharedParameters(self._gradients.wrapped, trained, optimizer)
                else:
                    self.updates = WholeParameters(trained, optimizer)
            self.scheduler = LambdaLR(self.updates.optimizer, optimizer.lr_factor)
            self._grad_clip = optimizer.grad_clip

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose groups the schedule sets; None for a frozen model."""
        return None if self.updates is None else self.updates.optimizer

    # What a save or a resume sees

    def tensors(self) -> Mapping[str, LiveTensor]:
        """Every weight, persistent buffer and moment of the model, with the boxes that this rank holds. What Megatron
        holds in one parameter (queries, keys and values) is three here; tied weights appear once."""
        live = show(self._held, self._tensors)
        if self.updates is None:
            return live
        held, parts = self._trained_held(), self.updates.parts()
        live |= show_parts(held, parts)
        states = {name: self.updates.state(name) for name in parts}
        for moment in MOMENTS:
            moments = {name: Part(part.start, states[name][moment]) for name, part in parts.items()}
            for name, tensor in show_parts(held, moments).items():
                key = moment_name(name, moment)
                live[key] = LiveTensor(key, tensor.shape, tensor.dtype, tensor.boxes)
        for name, place in held.items():
            # AdamW counts once for a parameter; each tensor in it shows a count of its own, which `finish_load` puts
            # together again.
            key = moment_name(name, STEP)
            boxes: tuple[tuple[Box, torch.Tensor], ...] = ()
            if place.parameter in parts:
                count = self._steps.setdefault(name, torch.zeros((), dtype=torch.float32))
                count.fill_(self.updates.count(place.parameter))
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
        """Put the counts of steps back into the optimizer, zeros into what pads the vocabulary, and derive the model
        from the masters.

        Raises MismatchError where tensors that are one parameter here have counted different steps.
        """
        first: dict[str, str] = {}
        for name, held in self._trained_held().items() if self.updates is not None else ():
            if held.parameter is None or name not in self._steps:
                continue
            other = first.setdefault(held.parameter, name)
            if not torch.equal(self._steps[name], self._steps[other]):
                raise MismatchError(
                    f"{moment_name(name, STEP)} is {self._steps[name].item():g} and {moment_name(other, STEP)} is "
                    f"{self._steps[other].item():g}: Megatron holds these weights as one and keeps one count for them; "
                    "resume with strategy fsdp2"
                )
        # What pads the vocabulary is in no checkpoint: the same files must come out of the same state.
        for name, begin in padding(self._tensors, self.config).items():
            self._tensors[name].detach()[begin:].zero_()
        if self.updates is not None:
            for parameter, name in first.items():
                self.updates.set_count(parameter, float(self._steps[name]))
            self._clear_padding(self.updates)
            with on_device(self.model.device):
                self.updates.refresh()

    def save(self, files: RoleFiles) -> None:
        """Write this rank's files of Megatron's form. All ranks call it together."""
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
        with on_device(self.model.device):
            self._gradients.reduce()
        return results

    def step(self) -> float:
        """Clip the gradient, update the weights, clear the gradient. Returns the global norm before clipping.

        A norm that is not finite leaves weights and moments as they are.
        """
        if self.updates is None or self._gradients is None:
            raise TypeError("a frozen model has no optimizer step")
        with on_device(self.model.device):
            norm = self._gradients.clip(self.updates.gradients(), self._grad_clip)
            if math.isfinite(norm):
                self.updates.update()
            self.updates.clear()
            self._gradients.clear()
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

    def _trained_held(self) -> Mapping[str, Any]:
        """Of the model's tensors those that are trained; a bias of the router is none of them."""
        return {name: held for name, held in self._held.items() if not name.endswith(".e_score_correction_bias")}

    def _clear_padding(self, updates: Updates) -> None:
        parts = updates.parts()
        for name, begin in padding(self._tensors, self.config).items():
            part = parts.get(name)
            if part is not None:
                first = begin * self._tensors[name][0].numel()
                for tensor in (part.values, *updates.state(name).values()):
                    tensor.view(-1)[max(0, first - part.start) :].zero_()
