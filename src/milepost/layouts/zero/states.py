"""What DeepSpeed's files say of a checkpoint before their tensors are looked at: stage, ranks, names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import CallError, DamagedError
from milepost.index import Shape
from milepost.layouts.inert import Record, TensorRef, ints
from milepost.layouts.torchfile import TorchFile

STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
MOST_RANKS = 999_999
"""More than any file name counts."""
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")


@dataclass(frozen=True)
class ModelState:
    """A model_states file.

    groups:     shapes of the trained weights of each flat group, in the group's order; None where ZeRO has none
    frozen:     shapes of the weights that are not trained, where they lie in fragments
    fragments:  this rank's part of each of them
    buffers:    names of the persistent buffers
    module:     the state dict; under stage 3 its weights are placeholders of no elements
    shared:     another name of a weight -> the name that has the bytes; the file of rank 0 alone has them
    """

    file: TorchFile
    groups: Sequence[Mapping[str, Shape]] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, Any]
    buffers: Collection[str]
    module: Mapping[str, Any]
    shared: Mapping[str, str]

    @property
    def step(self) -> Any:
        """DeepSpeed's count of finished steps."""
        return self.file.root.get("global_steps")

    @property
    def world_size(self) -> int:
        """Number of ranks that shared the model's data-parallel work, as the file notes it; 1 where it does not."""
        noted = self.file.root.get("dp_world_size")
        return noted if isinstance(noted, int) and 0 < noted <= MOST_RANKS else 1


@dataclass(frozen=True)
class OptimState:
    """An optim_states file.

    stage:  ZeRO's stage; None in the files of DeepSpeed's BF16_Optimizer, which have the form of stage 1
    count:  number of ranks that the flat groups are cut for
    state:  what the optimizer saved
    """

    file: TorchFile
    stage: int | None
    count: int
    state: Mapping[str, Any]


def read_model(path: Path) -> ModelState:
    """A model_states file. DamagedError where it is none, CallError for forms of parallelism that are not read."""
    file = TorchFile(path)
    root = file.root
    if not isinstance(root, dict) or not isinstance(root.get("module"), dict):
        raise DamagedError(f"{path}: holds no model's state, so DeepSpeed did not write it")
    for key in _EXPERTS:
        _refuse_experts(path, root.get(key))
    if isinstance(root.get("mp_world_size"), int) and root["mp_world_size"] > 1:
        raise CallError(
            f"{path}: tensor parallelism over {root['mp_world_size']} ranks, which milepost does not read from "
            "DeepSpeed's files"
        )
    groups, buffers = root.get("param_shapes"), root.get("buffer_names")
    if isinstance(groups, dict):
        groups = [groups]  # older files: one group
    if groups is not None and not isinstance(groups, list):
        raise DamagedError(f"{path}: param_shapes is no list of groups")
    return ModelState(
        file,
        None if groups is None else [_shapes(path, group) for group in groups],
        _shapes(path, root.get("frozen_param_shapes") or {}),
        _mapping(path, "frozen_param_fragments", root.get("frozen_param_fragments") or {}),
        frozenset(name for name in buffers if isinstance(name, str)) if isinstance(buffers, list) else frozenset(),
        _mapping(path, "module", root["module"]),
        _mapping(path, "shared_params", root.get("shared_params") or {}),
    )


def read_optim(path: Path) -> OptimState:
    """An optim_states file. DamagedError where it is none, CallError for a mixture of experts."""
    file = TorchFile(path)
    state = file.root.get("optimizer_state_dict") if isinstance(file.root, dict) else None
    if not isinstance(state, dict):
        raise DamagedError(f"{path}: holds no optimizer's state, so DeepSpeed did not write it")
    _refuse_experts(path, state.get("ds_zero_partition_groups"))
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or not all(isinstance(count, int) and 0 < count <= MOST_RANKS for count in counts):
        raise DamagedError(f"{path}: does not say for how many ranks it was cut (partition_count)")
    if len(set(counts)) > 1:
        _refuse_experts(path, counts)
    stage = state.get("zero_stage")
    if isinstance(stage, Record) and stage.kind == STAGE and stage.args:
        stage = stage.args[0]
    if stage is not None and (not isinstance(stage, int) or not 1 <= stage <= 3):
        which = stage if isinstance(stage, int) else "of another kind"
        raise CallError(f"{path}: ZeRO stage {which}, which milepost does not know; stages 0 to 3 are read")
    return OptimState(file, stage, counts[0], state)


def check_alike(models: Sequence[ModelState]) -> None:
    """Raise DamagedError unless the model files of all ranks are of one save."""
    first = models[0]
    for model in models[1:]:
        for what, ours, theirs in (
            ("global_steps", model.step, first.step),
            ("the shapes of weights", model.groups, first.groups),
            ("the shapes of frozen weights", model.frozen, first.frozen),
        ):
            if ours != theirs:
                values = f" ({theirs} and {ours})" if what == "global_steps" else ""
                raise DamagedError(
                    f"{model.file.path}: {what}{values} differ from {first.file.path.name}'s; "
                    "the files are of different saves"
                )


def _shapes(path: Path, value: Any) -> dict[str, Shape]:
    return {name: ints(shape) for name, shape in _mapping(path, "param_shapes", value).items()}


def _mapping(path: Path, what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise DamagedError(f"{path}: {what} is no dictionary of names")
    return value


def _refuse_experts(path: Path, value: Any) -> None:
    if value:
        raise CallError(
            f"{path}: a mixture of experts cut over ranks, which milepost does not read from DeepSpeed's files"
        )


def is_placeholder(value: Any) -> bool:
    """Whether a value of `module` is a tensor of no elements: what stage 3 leaves in the place of a weight."""
    return isinstance(value, TensorRef) and 0 in value.shape
