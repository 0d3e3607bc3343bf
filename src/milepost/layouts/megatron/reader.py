"""The Megatron layout: what Megatron-LM, verl and slime write, read without Megatron, a process group or a GPU.

    iter_0000123/mp_rank_.../model_optim_rng.pt      classic files of Megatron-LM: `files`, `classic`
    iter_0000123/.metadata, __0_0.distcp, common.pt  dist checkpoint (torch_dist): Megatron-LM, slime
    {role}/model/mp_rank_.../model_states.pt         classic files of verl 0.2 and 0.3 (model.pt), and of milepost
    {role}/dist_ckpt/                                dist checkpoint of verl 0.4 to 0.8, and of milepost
    {role}/model/dist_ckpt/, {role}/optimizer/...    dist checkpoint of verl 0.9
    {role}/huggingface/, {role}/model/huggingface/   config and tokenizer, since verl 0.6 often the weights themselves

The index has Megatron's names; what they mean and how parts are joined is the mapping's (`milepost.mapping.megatron`).
A dist checkpoint is a torch DCP folder (`layouts.dcp.reader`), so its tensors are whole. Optimizer state that is laid
out like the weights becomes `optim/<name>/<moment>`: `exp_avg`, `exp_avg_sq`, and `param`, the optimizer's own copy of
a weight in float32, which Megatron writes as `param` or `fp32_param`; before 0.16 flattened (`flattened`).
Buckets of data-parallel ranks name no weights and are given back to them (`buckets`); what cannot be, or is damaged,
leaves a reason in `unread`: the weights are read all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError
from milepost.index import TensorEntry, TensorIndex, moment_name
from milepost.layouts.dcp.metadata import holds_dcp
from milepost.layouts.dcp.reader import DcpLayout
from milepost.layouts.megatron.buckets import is_bucket, read_buckets
from milepost.layouts.megatron.classic import EXTRA_STATE, extra_state_lines, open_classic
from milepost.layouts.megatron.files import folder_of_ranks
from milepost.layouts.megatron.flattened import unflattened
from milepost.layouts.megatron.optimizer import DistObjects
from milepost.layouts.torchfile import TorchFile

DIST_METADATA = "metadata.json"
DIST_BACKEND = "torch_dist"
COMMON = "common.pt"
_DIST_FOLDERS = ("", "dist_ckpt", "model/dist_ckpt")
_OPTIMIZER_FOLDERS = ("optimizer/dist_ckpt",)
_MOMENT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|param|fp32_param)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\..+", re.DOTALL)
_EXTRA = re.compile(rf".+\.{EXTRA_STATE}/shard_.+", re.DOTALL)
_NAMING = (
    "dist_ckpt_optim_fully_reshardable=true of verl, --dist-ckpt-optim-fully-reshardable of Megatron-LM save a form "
    "that does"
)
_GATHERED = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/shard_.+")
_STATE = re.compile(r"rng_state.*|rerun_state_machine_state.*", re.DOTALL)


class MegatronLayout:
    """Reader of Megatron checkpoints in both forms."""

    name = "megatron"

    def recognises(self, directory: Path) -> bool:
        """Whether folders of ranks or a dist checkpoint lie here or where a known trainer puts them."""
        return folder_of_ranks(directory) is not None or bool(_dist_folders(directory))

    def open(self, directory: Path) -> TensorIndex:
        """The index under Megatron's names: whole tensors of a dist checkpoint, parts of classic files."""
        folders = _dist_folders(directory)
        if not folders:
            ranks = folder_of_ranks(directory)
            assert ranks is not None
            return open_classic(ranks, self.name)
        stored = [DcpLayout().open(folder) for folder in folders]
        # An optimizer in a folder of its own is one of weights in the other.
        weights = {name: entry for index in stored for name, entry in index.items()}
        opened = [_open_dist(index, weights) for index in stored]
        commons = [folder / COMMON for folder in folders if (folder / COMMON).is_file()]
        objects = DistObjects(_Objects(commons, [index.objects for index in opened]))
        entries = {name: entry for index in opened for name, entry in index.items()}
        moved = [name for name in entries if moment_name(name, "exp_avg") in entries]
        steps = objects.steps(moved, commons[-1]) if moved and commons else {}
        return TensorIndex(
            entries if isinstance(steps, str) else entries | steps,
            self.name,
            tuple(path for index in opened for path in index.files),
            max(index.world_size for index in opened),
            objects,
            (*(line for index in opened for line in index.unread), *([steps] if isinstance(steps, str) else [])),
            tuple(line for index in opened for line in index.skipped),
        )

    def describe(self, directory: Path) -> str:
        """What was recognised, in words."""
        folders = _dist_folders(directory)
        if folders:
            where = [str(folder.relative_to(directory)) for folder in folders if folder != directory]
            return "a dist checkpoint of Megatron" + (f" in {' and '.join(where)}" if where else "")
        ranks = folder_of_ranks(directory)
        assert ranks is not None
        return "classic files of Megatron" + ("" if ranks == directory else f" in {ranks.relative_to(directory)}")


def _dist_folders(directory: Path) -> list[Path]:
    """Where a directory's dist checkpoints lie: the weights' first, and the optimizer's, where that has its own."""
    weights = [directory / name if name else directory for name in _DIST_FOLDERS]
    found = [folder for folder in weights if _is_dist(folder)][:1]
    return found + [directory / name for name in _OPTIMIZER_FOLDERS if _is_dist(directory / name)]


def _is_dist(folder: Path) -> bool:
    if not holds_dcp(folder):
        return False
    if folder.name == "dist_ckpt":
        return True
    try:
        return bool(json.loads((folder / DIST_METADATA).read_text())["sharded_backend"] == DIST_BACKEND)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return (folder / COMMON).is_file()


def _open_dist(index: TensorIndex, weights: Mapping[str, TensorEntry]) -> TensorIndex:
    """What a folder holds, under milepost's names; `weights` are those of all folders, under Megatron's."""
    weights = {name: entry for name, entry in weights.items() if not _is_other(name)}
    entries: dict[str, TensorEntry] = {}
    flattened: dict[str, dict[str, TensorEntry]] = {}
    buckets: dict[str, TensorEntry] = {}
    flat = 0
    for key, entry in index.items():
        match = _MOMENT.fullmatch(key)
        if match is not None:
            weight, kind = weights.get(match[2]), match[1].removeprefix("fp32_")
            if weight is not None and weight.shape != entry.shape:
                flattened.setdefault(match[2], {})[kind] = entry
                continue
            entries[moment_name(match[2], kind)] = entry
        elif is_bucket(key):
            buckets[key] = entry
        elif _OPTIMIZER.fullmatch(key):
            flat += 1
        elif not _STATE.fullmatch(key):
            entries[key] = entry
    extra = sum(1 for key in index.objects if _EXTRA.fullmatch(key))
    flat += sum(1 for key in index.objects if _GATHERED.fullmatch(key))
    of_flattened, unread = _unflattened(flattened, weights)
    of_buckets, why = _of_buckets(buckets, weights, index.objects)
    entries |= of_flattened | of_buckets
    unread += why
    if flat:
        unread.append(f"{flat} parts of optimizer state in a form that names no weights; {_NAMING}")
    return TensorIndex(
        entries,
        MegatronLayout.name,
        index.files,
        index.world_size,
        index.objects,
        tuple(unread),
        extra_state_lines(extra),
    )


def _unflattened(
    flattened: Mapping[str, Mapping[str, TensorEntry]], weights: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """The moments of weights whose parts were flattened, and why some are none."""
    entries: dict[str, TensorEntry] = {}
    unlike = damaged = 0
    said = ""
    for name, kinds in flattened.items():
        try:
            found = unflattened(kinds, weights[name])
        except (DamagedError, IncompleteError) as error:
            damaged, said = damaged + len(kinds), said or str(error)
            continue
        unlike += len(kinds) if found is None else 0
        entries |= {moment_name(name, kind): entry for kind, entry in (found or {}).items()}
    unread = []
    if unlike:
        unread.append(f"{unlike} tensors of optimizer state whose shapes or values are not those of their weights")
    if damaged:
        unread.append(f"{damaged} tensors of optimizer state cannot be read: {said}")
    return entries, unread


def _of_buckets(
    buckets: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry], objects: Iterable[str]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """The moments in buckets, and why there are none."""
    try:
        state = read_buckets(buckets, weights, objects) if buckets else {}
    except (DamagedError, IncompleteError) as error:
        return {}, [f"{len(buckets)} buckets of optimizer state cannot be read: {error}"]
    if isinstance(state, str):
        return {}, [f"{len(buckets)} buckets of optimizer state, which name no weights: {state}; {_NAMING}"]
    return {moment_name(name, kind): entry for name, kinds in state.items() for kind, entry in kinds.items()}, []


def _is_other(key: str) -> bool:
    """Whether a key is of no weight."""
    return any(pattern.fullmatch(key) for pattern in (_OPTIMIZER, _STATE))


class _Objects(Mapping[str, Any]):
    """State that is no tensor, by its key; `common` is what Megatron keeps once for all ranks: arguments, iteration,
    schedule, numbers of the optimizer; the later of two folders is the optimizer's. Each is read when asked for."""

    def __init__(self, commons: list[Path], objects: list[Mapping[str, Any]]) -> None:
        self._commons = commons
        self._objects = objects

    def __getitem__(self, key: str) -> Any:
        if key == "common" and self._commons:
            found = [file.plain(file.root) for file in map(TorchFile, self._commons)]
            dicts = [common for common in found if isinstance(common, dict)]
            return {name: value for common in dicts for name, value in common.items()} if dicts else found[0]
        for objects in self._objects:
            if key in objects:
                return objects[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        if self._commons:
            yield "common"
        yield from dict.fromkeys(key for objects in self._objects for key in objects)

    def __len__(self) -> int:
        return sum(1 for _ in self)
