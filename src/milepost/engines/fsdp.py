"""PyTorch's FSDP2 as an engine: `fully_shard` on every decoder layer and on the root, AdamW, a schedule.

Weights and moments are DTensors cut along dimension 0 over a one-dimensional device mesh; a rank's part is one box,
which is empty where the dimension is smaller than the number of ranks. `save` writes the files that verl writes
(`milepost.layouts.fsdp`), so that its tools read them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from milepost.engines.base import OPTIMIZER, RNG, SCHEDULE, LiveTensor, RoleFiles
from milepost.index import Box, Shape, moment_name
from milepost.layouts.fsdp import CONFIG_FILE, config_text, rank_file
from milepost.layouts.huggingface import ADAPTER_CONFIG, CONFIG, SUBDIRECTORY, companion_files

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


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule and its clipping.

    lr, betas, weight_decay:  AdamW's
    lr_factor:                from the number of finished steps to the factor on `lr`
    grad_clip:                largest global norm of the gradient
    """

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    lr_factor: Callable[[int], float]
    grad_clip: float


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
        groups = None
        if self.optimizer is not None:
            groups = [
                {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for group in self.optimizer.param_groups
            ]
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "param_groups": groups,
            "rng": {self.rank: rng.capture()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> Mapping[str, str]:
        """Take over schedule, hyperparameters and generators, and say what had to be made fresh."""
        remarks: dict[str, str] = {}
        if self.optimizer is not None and self.scheduler is not None:
            remarks[OPTIMIZER] = _load_hyperparameters(self.optimizer, objects.get("param_groups"))
            remarks[SCHEDULE] = _load_schedule(self.optimizer, self.scheduler, objects.get("scheduler"))
        remarks[RNG] = self._load_rng(objects.get("rng") or {})
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
            with files.create(rank_file(kind, self.world_size, self.rank)) as file:
                torch.save(state, file)
        if self.rank == 0:
            with files.create(CONFIG_FILE) as file:
                file.write(config_text(self.world_size).encode())
            self._save_companions(files)

    # What a trainer does with it

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
    def lr(self) -> float:
        """The learning rate of the next update; 0 for a frozen model."""
        return 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

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

    def _load_rng(self, saved: Mapping[int, Mapping[str, Any]]) -> str:
        """Restore this rank's generators, or make fresh ones; why, where it is the latter."""
        if len(saved) == self.world_size and self.rank in saved:
            rng.restore(saved[self.rank])
            if torch.cuda.is_available() and "cuda" not in saved[self.rank]:
                return "the checkpoint has none of the device; that one is fresh"
            return ""
        step = 0 if self.scheduler is None else self.scheduler.last_epoch
        rng.seed_all(self._seed, step, self.world_size, self.rank)
        came = f"saved by {len(saved)} ranks, now {self.world_size}" if saved else "the checkpoint has none"
        return f"{came}; each rank has a fresh stream of its own, derived from seed {self._seed} and step {step}"

    def _save_companions(self, files: RoleFiles) -> None:
        own = {} if self._config_text is None else {CONFIG: self._config_text.encode()}
        adapters = getattr(self.model, "peft_config", None) or {}
        for settings in adapters.values():
            # PEFT's own form: rank and alpha are nowhere else, and a merge needs them.
            with tempfile.TemporaryDirectory() as directory:
                settings.save_pretrained(directory)
                own[ADAPTER_CONFIG] = (Path(directory) / ADAPTER_CONFIG).read_bytes()
        for path in [] if self._companions is None else companion_files(self._companions):
            if path.name not in own:
                with path.open("rb") as source, files.create(f"{SUBDIRECTORY}/{path.name}") as file:
                    shutil.copyfileobj(source, file)
        for name, data in own.items():
            with files.create(f"{SUBDIRECTORY}/{name}") as file:
                file.write(data)


def _local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Box, Shape]:
    """This rank's part of a tensor as a writable view, which box it is, and the global shape."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor, Box.whole(shape), shape
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), Box(tuple(offsets), tuple(sizes)), shape


def _load_hyperparameters(optimizer: torch.optim.AdamW, saved: Sequence[Mapping[str, Any]] | None) -> str:
    """Take over the hyperparameters of the groups, or say why not."""
    if saved is None:
        return "the checkpoint has no hyperparameters; those of the config are used"
    if len(saved) != len(optimizer.param_groups):
        return (
            f"the checkpoint has {len(saved)} parameter groups, this run {len(optimizer.param_groups)}; "
            "the hyperparameters of the config are used"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if key in group and key not in ("params", "param_names"):
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
    return ""


def _load_schedule(optimizer: torch.optim.AdamW, scheduler: LambdaLR, saved: Mapping[str, Any] | None) -> str:
    """Take over the position in the schedule, or say why not; the optimizer gets the rate of that position."""
    remark = ""
    if saved is None or "last_epoch" not in saved:
        remark = "the checkpoint has none; it starts at step 0"
    else:
        own = scheduler.state_dict()
        known = {key: value for key, value in saved.items() if key in own}
        scheduler.load_state_dict({**known, "lr_lambdas": own["lr_lambdas"]})
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    return remark
