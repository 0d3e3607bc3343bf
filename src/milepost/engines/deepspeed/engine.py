"""DeepSpeed ZeRO as an engine, stages 1, 2 and 3: real DeepSpeed trains, and its own files are what a save writes.

The float32 copies that the optimizer updates are shown as the weights, cut into the boxes that a rank holds
(`deepspeed.state`). `save` is DeepSpeed's `save_checkpoint`, its writes led through files that hash: DeepSpeed's
own `load_checkpoint` and `zero_to_fp32` read the result.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from milepost.engines import rng
from milepost.engines.base import RNG, LiveTensor, RoleFiles
from milepost.engines.companions import save_companions
from milepost.engines.deepspeed.state import gaps, live_run, live_whole, zero_state
from milepost.engines.optim import load_schedule_objects, schedule_objects
from milepost.errors import MismatchError
from milepost.index import Box, moment_name

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine:
    """One role's model under ZeRO, with Adam. Satisfies `milepost.engines.base.TrainingEngine`.

    Args:
        engine: what `deepspeed.initialize` made. It knows no schedule: DeepSpeed counts optimizer steps, and the
            schedule here counts training steps.
        scheduler: over `engine.optimizer.optimizer`, or None where the rate stays.
        seed: what new random streams are derived from when a checkpoint has none for this rank.
        companions: Hugging Face model directory whose small files travel with each save, byte for byte; None: none.
        config_text: contents for `config.json` where the model's own differs from that of `companions`.

    Raises CallError where DeepSpeed keeps state in a way that is not known here.
    """

    layout = "deepspeed"

    def __init__(
        self,
        engine: Any,
        *,
        scheduler: LambdaLR | None = None,
        seed: int = 0,
        companions: Path | None = None,
        config_text: str | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._zero = zero_state(engine)
        self._seed = seed
        self._companions = companions
        self._config_text = config_text
        self._steps: dict[str, torch.Tensor] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside of ZeRO's."""
        inner: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return inner

    # What a save or a resume sees

    def tensors(self) -> Mapping[str, LiveTensor]:
        """Every weight, persistent buffer and moment of this rank. Tied weights appear once, under their first name."""
        flats, runs = self._zero.flats(), self._zero.runs()
        live = {}
        for name, tensor in self._weights():
            if name in runs:
                live[name] = live_run(name, runs[name], flats[runs[name].flat])
            elif isinstance(tensor, nn.Parameter):
                live[name] = self._zero.frozen(name, tensor)
            else:
                live[name] = live_whole(name, tensor)
        for name in [name for name in live if name in runs]:
            run = runs[name]
            state = self._state(flats[run.flat])
            for moment in _MOMENTS:
                key = moment_name(name, moment)
                live[key] = live_run(key, run, state[moment])
            # The optimizer counts once for a whole flat tensor; each weight shows a count of its own, which
            # `finish_load` puts together again.
            key = moment_name(name, "step")
            count = self._steps.setdefault(name, torch.zeros((), dtype=torch.float32))
            count.fill_(float(state["step"]))
            live[key] = LiveTensor(key, (), "float32", ((Box((), ()), count),))
        return live

    def objects(self) -> Mapping[str, Any]:
        """Schedule, optimizer hyperparameters, and this rank's generators."""
        return {
            **schedule_objects(self.optimizer, self.scheduler),
            "rng": {self.rank: rng.capture()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        """Take over schedule, hyperparameters and generators, and say what had to be made fresh."""
        remarks = load_schedule_objects(self.optimizer, self.scheduler, objects)
        step = 0 if self.scheduler is None else self.scheduler.last_epoch
        saved = objects.get("rng") or {}
        remarks[RNG] = rng.take_over(saved, self.rank, self.world_size, seed=self._seed, step=step)
        return {part: why for part, why in remarks.items() if why}

    def finish_load(self) -> None:
        """Derive the 16-bit weights from the float32 ones. All ranks call it together.

        Raises MismatchError where weights that DeepSpeed updates together have counted different steps.
        """
        flats, runs = self._zero.flats(), self._zero.runs()
        first: dict[int, str] = {}
        for name, run in runs.items():
            if name in self._steps:
                other = first.setdefault(run.flat, name)
                if not torch.equal(self._steps[name], self._steps[other]):
                    raise MismatchError(
                        f"{moment_name(name, 'step')} is {self._steps[name].item():g} and "
                        f"{moment_name(other, 'step')} is {self._steps[other].item():g}: DeepSpeed updates these "
                        "weights together and keeps one count for them; resume with strategy fsdp2"
                    )
        for number, name in first.items():
            self._set_step(flats[number], self._steps[name])
            # DeepSpeed's own counts, after which it names a checkpoint; one of another engine has none.
            self.engine.global_steps = int(self._steps[name])
            self.engine.global_samples = self.engine.global_steps * self.engine.train_batch_size()
        # What pads the flat tensors is not in the checkpoint: the same files must come out of the same state.
        for number, offset, length in gaps(runs, flats):
            for tensor in (flats[number], *(self._state(flats[number])[moment] for moment in _MOMENTS)):
                tensor.detach().narrow(0, offset, length).zero_()
        self._zero.refresh()

    def save(self, files: RoleFiles) -> None:
        """Write DeepSpeed's checkpoint: this rank's files, and on rank 0 what belongs to all. All ranks call it.

        Raises what a write raised, once all ranks are through.
        """
        self.tensors()  # makes the moments that are not there yet: DeepSpeed would save none
        generators = rng.capture()
        # Below stage 3 only rank 0 writes a file that takes such state.
        shared = self.engine.zero_optimization_stage() < 3
        client: dict[str, Any] = {"rng": self._of_all_ranks(generators) if shared else {self.rank: generators}}
        if self.scheduler is not None:
            client["lr_scheduler"] = self.scheduler.state_dict()
        with tempfile.TemporaryDirectory() as scratch:
            writer = _Writer(files, Path(scratch))
            usual, self.engine.checkpoint_engine = self.engine.checkpoint_engine, writer
            try:
                self.engine.save_checkpoint(scratch, tag=f"global_step{self.engine.global_steps}", client_state=client)
            finally:
                self.engine.checkpoint_engine = usual
            writer.finish()
        if self.rank == 0:
            save_companions(files, self.model, self._companions, self._config_text)

    # What a trainer does with it

    @property
    def model(self) -> Any:
        """The module that DeepSpeed wraps."""
        return self.engine.module

    @property
    def data_rank(self) -> int:
        """The rank: each has sequences of its own."""
        return self.rank

    @property
    def data_size(self) -> int:
        """The number of ranks."""
        return self.world_size

    @property
    def forward(self) -> Callable[..., Any]:
        """DeepSpeed's engine, which prepares its backward in the forward."""
        forward: Callable[..., Any] = self.engine
        return forward

    def release(self) -> None:
        """Nothing: ZeRO-3 drops gathered weights by itself, and stages 1 and 2 gather none."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; `last` makes the next `step` an update."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        """Clip the gradient, update the weights, clear the gradient. Returns the global norm before clipping.

        A norm that is not finite leaves weights and moments as they are.
        """
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def advance_schedule(self) -> None:
        """Count one finished training step."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of the next update of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    # Details

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _state(self, flat: torch.Tensor) -> dict[str, Any]:
        """The optimizer's state of a flat tensor, made where it is missing with the values that Adam gives it."""
        state: dict[str, Any] = self.optimizer.state[flat]
        if not state:
            # DeepSpeed's CPU Adam counts in an int, torch's in a tensor.
            state["step"] = 0 if self._counts_in_int() else torch.zeros((), dtype=torch.float32)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(flat.detach())
        return state

    def _set_step(self, flat: torch.Tensor, count: torch.Tensor) -> None:
        state = self._state(flat)
        if self._counts_in_int():
            state["step"] = int(count)
        else:
            state["step"].fill_(float(count))

    def _counts_in_int(self) -> bool:
        return not isinstance(self.optimizer, torch.optim.Adam)

    def _of_all_ranks(self, state: Any) -> dict[int, Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, state)
        return dict(enumerate(gathered))


class _Writer:
    """In the place of DeepSpeed's checkpoint engine while it saves: `torch.save`, into files of the step.

    DeepSpeed's ranks meet at the end of a save, so a write that fails must not keep one away: `finish` tells of it.

    Args:
        files: where the files go.
        scratch: the directory that DeepSpeed is told to save to; what it writes there by itself goes along.
    """

    def __init__(self, files: RoleFiles, scratch: Path) -> None:
        self._files = files
        self._scratch = scratch
        self._failure: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """One file of DeepSpeed's, under the name that it has in the directory."""
        if self._failure is None:
            try:
                self._files.save(Path(path).relative_to(self._scratch).as_posix(), state_dict, alone=True)
            except Exception as error:  # noqa: BLE001  raised again by `finish`
                self._failure = error

    def finish(self) -> None:
        """Take along what DeepSpeed wrote past this class: `latest`, and its scripts; raise what went wrong."""
        if self._failure is not None:
            raise self._failure
        for path in sorted(path for path in self._scratch.rglob("*") if path.is_file()):
            with path.open("rb") as source, self._files.create(path.relative_to(self._scratch).as_posix()) as file:
                shutil.copyfileobj(source, file)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A directory of the scratch one."""
        os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103  DeepSpeed's interface

    def create(self, info: Any) -> None:
        """A save begins."""

    def commit(self, info: Any) -> bool:
        """A save is complete, as far as DeepSpeed knows."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether that rank writes what all ranks have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written later."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether two views of one memory stay that in the file, which then holds all of it. Where it is so, DeepSpeed
        copies every weight before it is saved."""
        return False
