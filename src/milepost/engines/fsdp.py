"""PyTorch's FSDP2 as an engine: `fully_shard` on every decoder layer and on the root, AdamW, a schedule.

Weights and moments are DTensors cut along dimension 0 over a one-dimensional device mesh; a rank's part is one box,
which is empty where the dimension is smaller than the number of ranks. `save` writes the files that verl writes
(`milepost.layouts.fsdp`), so that its tools read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.lr_scheduler import LambdaLR

from milepost.engines import rng
from milepost.engines.base import RNG, LiveTensor, RoleFiles
from milepost.engines.companions import save_companions
from milepost.engines.optim import OptimizerSettings, load_schedule_objects, schedule_objects
from milepost.index import Box, Shape, moment_name
from milepost.layouts.fsdp import CONFIG_FILE, config_text, rank_file

MESH_DIM = "fsdp"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Sharding:
    """How a model is laid over the ranks.

    param_dtype:            dtype of the gathered weights, in which forward and backward compute
    reduce_dtype:           dtype in which gradients are summed over the ranks
    reshard_after_forward:  drop gathered weights after each forward (least memory) or keep them to the backward
    """

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True


def shard(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Turn a model into an FSDP2 model in place, one unit a decoder layer and one for what is left.

    Parameters may be on the meta device; give them memory with `materialise` afterwards.
    """
    policy = MixedPrecisionPolicy(param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype)
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard_after_forward)
    # The root's weights (embeddings, head) are used first and last, so dropping them after the forward gains nothing.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of a sharded meta model memory, uninitialised; buffers that hold values keep them."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


class FsdpEngine:
    """One role's model under FSDP2, with AdamW and a schedule unless it is frozen. Satisfies `milepost.engines.Engine`.

    Args:
        model: sharded by `shard`, with memory. `model.config` need not exist.
        mesh: the device mesh that it is sharded over.
        optimizer: settings, or None for a model that is never updated.
        seed: what new random streams are derived from when a checkpoint has none for this rank.
        companions: Hugging Face model directory whose small files travel with each save, byte for byte; None: none.
        config_text: contents for `config.json` where the model's own differs from that of `companions`.
    """

    layout = "fsdp"

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        optimizer: OptimizerSettings | None = None,
        seed: int = 0,
        companions: Path | None = None,
        config_text: str | None = None,
    ) -> None:
        self.model = model
        self.rank = mesh.get_rank()
        self.world_size = mesh.size()
        self._mesh = mesh
        self._seed = seed
        self._companions = companions
        self._config_text = config_text
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._grad_clip = math.inf
        self.optimizer: torch.optim.AdamW | None = None
        self.scheduler: LambdaLR | None = None
        if optimizer is not None:
            trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
            # Named parameters: the names in the file spare a reader guessing them from the model's order.
            self.optimizer = torch.optim.AdamW(
                trained, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
            )
            self.scheduler = LambdaLR(self.optimizer, optimizer.lr_factor)
            self._grad_clip = optimizer.grad_clip

    # What a save or a resume sees

    def tensors(self) -> Mapping[str, LiveTensor]:
        """Every weight, persistent buffer and moment of this rank. Tied weights appear once, under their first name."""
        self.release()
        live = {name: self._live(name, tensor) for name, tensor in self._weights()}
        if self.optimizer is not None:
            self._make_moments()
            for weight, parameter in self._trained():
                state = self.optimizer.state[parameter]
                for moment in (*_MOMENTS, "step"):
                    name = moment_name(weight, moment)
                    live[name] = self._live(name, state[moment])
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
        """Drop gathered copies of weights, so that the next forward gathers the ones just written."""
        self.release()

    def save(self, files: RoleFiles) -> None:
        """Write this rank's three files; rank 0 adds the layout's config and the companions. All ranks call it."""
        self.release()
        contents: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            self._make_moments()
            contents["optim"] = self.optimizer.state_dict()
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        contents["extra_state"] = {"lr_scheduler": scheduler, "rng": rng.capture()}
        for kind, state in contents.items():
            files.save(rank_file(kind, self.world_size, self.rank), state)
        if self.rank == 0:
            with files.create(CONFIG_FILE) as file:
                file.write(config_text(self.world_size).encode())
            save_companions(files, self.model, self._companions, self._config_text)

    # What a trainer does with it

    @property
    def data_rank(self) -> int:
        """The rank: each has sequences of its own."""
        return self.rank

    @property
    def data_size(self) -> int:
        """The number of ranks."""
        return self.world_size

    @property
    def forward(self) -> nn.Module:
        """The model itself: its hooks prepare a backward as well."""
        return self.model

    def release(self) -> None:
        """Drop gathered copies of weights. Needed after forwards that no backward follows, where memory matters."""
        for unit in self._units:
            unit.reshard()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; `last` sums them over the ranks (FSDP2 averages)."""
        for unit in self._units:
            unit.set_requires_gradient_sync(last, recurse=False)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> float:
        """Clip the gradient, update the weights, clear the gradient. Returns the global norm before clipping.

        A norm that is not finite leaves weights and moments as they are: AdamW would carry a NaN for ever.
        """
        if self.optimizer is None:
            raise TypeError("a frozen model has no optimizer step")
        # A unit that was gathered would show weights without gradients, and pass for a gradient of zero.
        self.release()
        total = nn.utils.clip_grad_norm_([p for _, p in self._trained()], self._grad_clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def advance_schedule(self) -> None:
        """Count one finished training step."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of the next update of each parameter group; none for a frozen model."""
        return () if self.optimizer is None else tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def lr(self) -> float:
        """The learning rate of the next update; 0 for a frozen model."""
        return self.learning_rates[0] if self.learning_rates else 0.0

    # Details

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)

    def _make_moments(self) -> None:
        """Make the moments that AdamW makes at its first step, with the values it gives them: all zero."""
        if self.optimizer is None:
            return
        for _, weight in self._trained():
            state = self.optimizer.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(weight, memory_format=torch.preserve_format)

    def _live(self, name: str, tensor: torch.Tensor) -> LiveTensor:
        local, box, shape = _local_box(tensor)
        boxes = ((box, local),) if box.volume else ()
        return LiveTensor(name, shape, str(tensor.dtype).removeprefix("torch."), boxes)


def _local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box, Shape]:
    """This rank's part of a tensor as a writable view, which box it is, and the global shape."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor, Box.whole(shape), shape
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), Box(tuple(offsets), tuple(sizes)), shape
