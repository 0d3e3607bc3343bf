"""The DeepSpeed layout: ZeRO checkpoints of all stages as DeepSpeed's `save_checkpoint` writes them, read without it.

    {role}/latest {role}/{tag}/...     files and tags: `layouts.zero.files`; what they say: `layouts.zero.states`

    stage 3        `layouts.zero.stage3`: trained weights from the float32 masters, others from their fragments
    stages 1, 2    `layouts.zero.stage12`: trained weights from the float32 masters, others whole from the model file
    stage 0        whole from the model file

Weights come in float32 where there are masters, so `--dtype keep` exports these, and `--dtype bf16` what DeepSpeed
itself trains with: it rounds the masters in the same way. Persistent buffers are rank 0's, as in DeepSpeed's own tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError
from milepost.index import TensorEntry, TensorIndex
from milepost.layouts.huggingface import HuggingFaceLayout
from milepost.layouts.inert import TensorRef
from milepost.layouts.torchfile import TorchFile
from milepost.layouts.zero.files import TagFiles, choose_tag, is_tag, of_all_ranks, tag_files, tags
from milepost.layouts.zero.groups import Stored
from milepost.layouts.zero.stage3 import read_stage3
from milepost.layouts.zero.stage12 import read_stage12
from milepost.layouts.zero.states import (
    ModelState,
    OptimState,
    check_alike,
    is_placeholder,
    read_model,
    read_optim,
)

MODEL, OPTIM = "model_states", "optim_states"
_NAMED = 3


class DeepSpeedLayout:
    """Reader of DeepSpeed's checkpoints."""

    name = "deepspeed"

    def recognises(self, directory: Path) -> bool:
        """Whether this is the folder of a tag, or holds one."""
        return is_tag(directory) or bool(tags(directory))

    def open(self, directory: Path) -> TensorIndex:
        """The index of the tag that `latest` names, of the only one, or of the tag whose folder this is."""
        files = tag_files(choose_tag(directory)[0])
        optims = _optims(files)
        models = _models(files, optims)
        unread: tuple[str, ...] = ()
        if files.sharded:
            stored = read_stage3(models, optims)
        elif optims:
            stored = read_stage12(models[0], optims)
        else:
            stored = Stored({}, {})
            unread = _without_masters(models[0])
        world_size = len(optims) or (len(models) if files.sharded else models[0].world_size)
        entries, not_tensors = _in_order(models[0], stored, bool(files.sharded))
        return TensorIndex(
            {**entries, **stored.moments},
            self.name,
            (*(model.file.path for model in models), *(optim.file.path for optim in optims)),
            world_size,
            _Objects([model.file.path for model in models], optims[0].file.path if optims else None),
            unread,
            not_tensors,
        )

    def describe(self, directory: Path) -> str:
        """Which tag was taken and why, and what else lies there."""
        folder, why = choose_tag(directory)
        files = tag_files(folder)
        stage = "stage 3" if files.sharded else "stages 1 or 2" if files.optims else "no ZeRO, or without its masters"
        tag = "" if folder == directory else f", tag {folder.name} ({why})"
        beside = (
            "; --backend huggingface takes the model beside it" if HuggingFaceLayout().recognises(directory) else ""
        )
        return f"a DeepSpeed checkpoint, {stage}{tag}{beside}"


def _optims(files: TagFiles) -> list[OptimState]:
    """The optimizer files of all ranks, in rank order."""
    if not files.optims:
        return []
    first = read_optim(next(iter(files.optims.values())))
    paths = of_all_ranks(files.folder, OPTIM, files.optims, first.count)
    optims = [first if path == first.file.path else read_optim(path) for path in paths]
    for optim in optims:
        if optim.stage != first.stage:
            raise DamagedError(
                f"{optim.file.path}: ZeRO {_stage(optim)}, {first.file.path.name} {_stage(first)}; "
                "two runs saved under one tag"
            )
        if optim.count != first.count:
            raise DamagedError(
                f"{optim.file.path}: was saved by {optim.count} ranks, {first.file.path.name} by {first.count}; "
                "two runs saved under one tag"
            )
    if (first.stage == 3) != bool(files.sharded):
        kind = "one file for each rank" if files.sharded else "one file for all ranks"
        raise DamagedError(
            f"{files.folder}: optimizer files of ZeRO {_stage(first)}, and a model in {kind}; "
            "two runs saved under one tag"
        )
    return optims


def _stage(optim: OptimState) -> str:
    return "stage 1" if optim.stage is None else f"stage {optim.stage}"


def _models(files: TagFiles, optims: Sequence[OptimState]) -> list[ModelState]:
    """The model files: of all ranks under stage 3, else the one."""
    if files.model is not None:
        return [read_model(files.model)]
    first = read_model(next(iter(files.sharded.values())))
    world_size = len(optims) or first.world_size
    paths = of_all_ranks(files.folder, MODEL, files.sharded, world_size)
    models = [first if path == first.file.path else read_model(path) for path in paths]
    check_alike(models)
    return models


def _without_masters(model: ModelState) -> tuple[str, ...]:
    """What is not read of a checkpoint whose weights are all in the model file, and why."""
    if model.groups:
        return ("float32 masters and moments: no optim_states files; the weights are those in the training's type",)
    if model.file.root.get("optimizer"):
        return ("optimizer moments: without ZeRO the file of DeepSpeed numbers them and names no weights",)
    return ()


def _in_order(model: ModelState, stored: Stored, sharded: bool) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """All weights and persistent buffers in the order of the state dict, and what in it is no tensor.

    Raises IncompleteError where a weight has no bytes anywhere, DamagedError where its shape is said in two ways.
    """
    entries: dict[str, TensorEntry] = {}
    unread: list[str] = []
    lost: list[str] = []
    first_name: dict[TensorRef, str] = {}
    for name, value in model.module.items():
        if name in stored.weights:
            entries[name] = stored.weights[name]
            if isinstance(value, TensorRef) and not is_placeholder(value) and value.shape != entries[name].shape:
                raise DamagedError(
                    f"{model.file.path}: {name} has shape {list(value.shape)} in module and "
                    f"{list(entries[name].shape)} in param_shapes"
                )
            if isinstance(value, TensorRef) and value.storage.numel:
                first_name.setdefault(value, name)
        elif name in model.shared:
            continue
        elif not isinstance(value, TensorRef):
            unread.append(f"{name}: no tensor in {model.file.path.name}")
        elif sharded and is_placeholder(value) and name not in model.buffers:
            lost.append(name)
        else:
            # Two names for one part of a storage are tied.
            original = first_name.setdefault(value, name) if value.storage.numel else name
            entries[name] = replace(model.file.entry(value), alias_of=None if original == name else original)
    entries |= {name: entry for name, entry in stored.weights.items() if name not in entries}
    for alias, name in model.shared.items():
        if alias not in entries:
            if name not in entries:
                lost.append(alias)
                continue
            entries[alias] = replace(entries[name], alias_of=entries[name].alias_of or name)
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        raise IncompleteError(
            f"{model.file.path.parent}: no file holds {', '.join(lost[:_NAMED])}{more}; "
            "frozen weights can have been left out when it was saved (exclude_frozen_parameters)"
        )
    order = {name: place for place, name in enumerate(model.module)}
    return dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order)))), tuple(unread)


class _Objects(Mapping[str, Any]):
    """Schedule, RNG and hyperparameters; each read when asked for."""

    def __init__(self, models: Sequence[Path], optim: Path | None) -> None:
        self._models = models
        self._optim = optim
        self._known: dict[str, Callable[[], Any]] = {
            "param_groups": self._param_groups,
            "scheduler": lambda: _value(self._models[0], "lr_scheduler"),
            "rng": self._rng,
        }

    def __getitem__(self, key: str) -> Any:
        return self._known[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def _param_groups(self) -> list[dict[str, Any]] | None:
        """Hyperparameters of the groups, without the parameters that they hold."""
        if self._optim is None:
            return None
        optim = read_optim(self._optim)
        inner = optim.state.get("optimizer_state_dict" if optim.stage == 3 else "base_optimizer_state")
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return None
        kept = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        plain: list[dict[str, Any]] = optim.file.plain(kept)
        return plain

    def _rng(self) -> dict[int, Any]:
        """Each rank's generators, where the client state has any: rank -> state, or the state of the file's rank."""
        found: dict[int, Any] = {}
        for rank, path in enumerate(self._models):
            state = _value(path, "rng")
            if state:
                by_rank = isinstance(state, dict) and all(isinstance(key, int) for key in state)
                found |= state if by_rank else {rank: state}
        return found


def _value(path: Path, key: str) -> Any:
    file = TorchFile(path)
    return file.plain(file.root.get(key))
