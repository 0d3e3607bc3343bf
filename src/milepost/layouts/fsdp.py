"""The FSDP layout: one set of `torch.save` files a rank, as verl writes it and its own tools read it.

    model_world_size_{W}_rank_{R}.pt         flat dict: name -> DTensor, or a plain tensor that every rank holds whole
    optim_world_size_{W}_rank_{R}.pt         optimizer.state_dict(): state by parameter number, hyperparameter groups
    extra_state_world_size_{W}_rank_{R}.pt   {"lr_scheduler": ..., "rng": {"cpu", "numpy", "random", ("cuda")}}
    fsdp_config.json                         {"FSDP_version": 2, "world_size": W}; absent in old checkpoints
    huggingface/                             config, generation config, tokenizer; weights if they were asked for

A rank's file that is a copy of another's is found by the coordinates that its device mesh carries. A plain tensor is
replicated: every rank must hold the same bytes, and one copy is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError, MismatchError, NotFoundError
from milepost.index import OPTIMIZER_PREFIX, Chunk, TensorEntry, TensorIndex, moment_name
from milepost.layouts.dtensor import Mesh, ShardedRef, sharded_ref
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile

CONFIG_FILE = "fsdp_config.json"
KINDS = ("model", "optim", "extra_state")
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_RANK_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")


def rank_file(kind: str, world_size: int, rank: int) -> str:
    """File name of one rank's part: kind "model", "optim" or "extra_state"."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def config_text(world_size: int) -> str:
    """Contents of `fsdp_config.json` for FSDP2."""
    return json.dumps({"FSDP_version": 2, "world_size": world_size}, indent=4)


class FsdpLayout:
    """Reader of the FSDP layout."""

    name = "fsdp"

    def recognises(self, directory: Path) -> bool:
        """Whether any rank's file or the layout's config lies here."""
        return any(_RANK_FILE.fullmatch(p.name) or p.name == CONFIG_FILE for p in directory.iterdir())

    def open(self, directory: Path) -> TensorIndex:
        """The index of a role directory: weights by their names in the files, moments as `optim/<weight>/<moment>`."""
        world_size, kinds = _present(directory)
        paths = {kind: [directory / rank_file(kind, world_size, r) for r in range(world_size)] for kind in kinds}
        models = [TorchFile(path) for path in paths["model"]]
        entries = _entries(models, lambda file: _state_dict(file).items())
        objects = _Objects(world_size, paths.get("extra_state"))
        if "optim" in kinds:
            optimizers = [TorchFile(path) for path in paths["optim"]]
            names = _parameter_names(optimizers[0], entries, _sharded_names(models[0]))
            moments = _entries(optimizers, lambda file: _moments(file, names))
            _check_moments(moments, entries)
            entries |= moments
            objects.param_groups = _param_groups(optimizers[0])
        files = tuple(path for group in paths.values() for path in group)
        return TensorIndex(entries, self.name, files, world_size, objects)


def missing_files(directory: Path) -> list[str]:
    """Names of rank files that must be there, given those that are; empty for a whole checkpoint."""
    found = _rank_files(directory)
    world_size = _world_size(directory, found)
    kinds = {kind for kind, _, _ in found} | {"model"}
    wanted = {(kind, world_size, rank) for kind in kinds for rank in range(world_size)}
    return [rank_file(*key) for key in sorted(wanted - found)]


def _rank_files(directory: Path) -> set[tuple[str, int, int]]:
    matches = (_RANK_FILE.fullmatch(path.name) for path in directory.iterdir())
    return {(m[1], int(m[2]), int(m[3])) for m in matches if m}


def _world_size(directory: Path, found: set[tuple[str, int, int]]) -> int:
    sizes = {size for _, size, _ in found if size}
    if not sizes:
        raise NotFoundError(f"{directory}: no model_world_size_*_rank_*.pt here")
    config = directory / CONFIG_FILE
    if config.exists():
        try:
            noted = int(json.loads(config.read_text())["world_size"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"{config}: not a config of FSDP files ({error})") from None
        if noted not in sizes:
            raise DamagedError(f"{config}: says world size {noted}, the files beside it say {sorted(sizes)}")
        return noted
    if len(sizes) > 1:
        raise DamagedError(
            f"{directory}: files of world sizes {sorted(sizes)} lie together and no {CONFIG_FILE} says which counts"
        )
    return sizes.pop()


def _present(directory: Path) -> tuple[int, list[str]]:
    """World size, and the kinds of files that are there for every rank; anything partly there is an error."""
    found = _rank_files(directory)
    world_size = _world_size(directory, found)
    kinds = []
    for kind in KINDS:
        missing = [rank for rank in range(world_size) if (kind, world_size, rank) not in found]
        if missing and (kind == "model" or len(missing) < world_size):
            cause = (
                "the checkpoint lies on another node's local disk, or was not copied whole"
                if len(missing) < world_size
                else "no weights were saved here"
            )
            raise IncompleteError(
                f"{directory}: {kind} files of ranks {_ranges(missing)} of {world_size} are missing (likely {cause}); "
                "bring them here and try again"
            )
        if not missing:
            kinds.append(kind)
    return world_size, kinds


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _state_dict(file: TorchFile) -> Mapping[str, Any]:
    if not isinstance(file.root, dict) or not all(isinstance(name, str) for name in file.root):
        raise DamagedError(f"{file.path}: holds no state dict")
    return file.root


def _entries(
    files: list[TorchFile], items: Callable[[TorchFile], Iterator[tuple[str, Any]] | Any]
) -> dict[str, TensorEntry]:
    """Join the same-named values of all ranks' files into entries."""
    parts: dict[str, list[tuple[TorchFile, ShardedRef | TensorRef]]] = {}
    for rank, file in enumerate(files):
        mesh: Mesh | None = None
        for name, value in items(file):
            ref = value if isinstance(value, TensorRef) else _sharded(value, name, file)
            if mesh is None and isinstance(ref, ShardedRef):
                mesh = ref.mesh
                _check_writer(file, mesh, rank)
            parts.setdefault(name, []).append((file, ref))
    entries: dict[str, TensorEntry] = {}
    first_name: dict[tuple[TensorRef, tuple[int, ...]], str] = {}
    for name, refs in parts.items():
        if len(refs) != len(files):
            lacking = sorted({f.path.name for f in files} - {f.path.name for f, _ in refs})
            raise DamagedError(f"{name}: not in {', '.join(lacking)}, but in the files of the other ranks")
        entry = _join(name, refs)
        # Two names for one storage: tied weights.
        local = refs[0][1] if isinstance(refs[0][1], TensorRef) else refs[0][1].local
        original = first_name.setdefault((local, entry.shape), name)
        if original != name and local.storage.numel:
            entry = replace(entry, alias_of=original)
        entries[name] = entry
    return entries


def _check_writer(file: TorchFile, mesh: Mesh, rank: int) -> None:
    """Raise where a file was written by another rank than its name says."""
    writer = mesh.rank
    if writer is None and mesh.ranks is not None and mesh.ranks.shape == mesh.sizes:
        writer = int(file.entry(mesh.ranks).numpy()[mesh.coordinate])
    if writer is not None and writer != rank:
        raise DamagedError(f"{file.path}: was written by rank {writer}; it is a copy of another rank's file")


def _sharded(value: Any, name: str, file: TorchFile) -> ShardedRef:
    try:
        ref = sharded_ref(value)
    except DamagedError as error:
        raise DamagedError(f"{file.path}: {name}: {error}") from None
    if ref is None:
        kind = getattr(value, "kind", type(value).__name__)
        raise DamagedError(f"{file.path}: {name} is a {kind}, which this reader of FSDP2 files does not know")
    return ref


def _join(name: str, refs: list[tuple[TorchFile, ShardedRef | TensorRef]]) -> TensorEntry:
    if all(isinstance(ref, TensorRef) for _, ref in refs):
        return _replicated(name, [file.entry(ref) for file, ref in refs if isinstance(ref, TensorRef)])
    chunks: dict[Any, Chunk] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for file, ref in refs:
        if isinstance(ref, TensorRef):
            raise DamagedError(f"{name}: sharded on some ranks and whole in {file.path.name}")
        seen.add((ref.local.dtype, ref.shape))
        if ref.box.volume:
            # Replicas (HSDP, tensor parallelism) hold the same box: each box counts once.
            chunks.setdefault(ref.box, file.chunk(ref.local, ref.box.offsets))
    if len(seen) > 1:
        raise DamagedError(f"{name}: the ranks' files disagree: " + ", ".join(f"{d}{list(s)}" for d, s in sorted(seen)))
    ((dtype, shape),) = seen
    entry = TensorEntry(dtype, shape, tuple(chunks.values()))
    entry.check_tiling(name)
    return entry


def _replicated(name: str, copies: list[TensorEntry]) -> TensorEntry:
    first = copies[0]
    expected = first.bits().tobytes() if len(copies) > 1 else b""
    for rank, copy in enumerate(copies[1:], 1):
        if (copy.dtype, copy.shape) != (first.dtype, first.shape) or copy.bits().tobytes() != expected:
            raise DamagedError(
                f"{name}: every rank should hold the same {first.dtype}{list(first.shape)}, "
                f"but rank {rank} differs from rank 0"
            )
    return first


def _sharded_names(model: TorchFile) -> list[str]:
    """Names that can be parameters, in model order, a tied weight once: all but whole tensors, if any is sharded."""
    seen: set[str] = set()
    names = []
    for name, value in _state_dict(model).items():
        ref = sharded_ref(value)
        if ref is not None and ref.local.storage.key not in seen:
            seen.add(ref.local.storage.key)
            names.append(name)
    return names


def _parameter_names(optimizer: TorchFile, entries: Mapping[str, TensorEntry], sharded: list[str]) -> dict[int, str]:
    """Which weight each parameter number of the optimizer means.

    torch notes the names in `param_names` where the optimizer was given named parameters. Elsewhere (verl) the
    numbers follow the order of the model, which only holds for one group, and if the counts agree.
    """
    groups = _field(optimizer, "param_groups", list)
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise DamagedError(f"{optimizer.path}: parameter groups without parameters")
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(group.get("param_names"), list) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        unknown = [name for name in names if not isinstance(name, str) or name not in entries]
        if unknown:
            raise DamagedError(f"{optimizer.path}: moments of {unknown[0]}, which the model files lack")
    else:
        names = sharded or [name for name, entry in entries.items() if entry.alias_of is None]
    if len(numbers) != len(names) or (len(groups) > 1 and "param_names" not in groups[0]):
        raise MismatchError(
            f"{optimizer.path}: {len(numbers)} parameters without names in {len(groups)} groups for {len(names)} "
            "weights; several groups, or parameters that were left out, make their order unknown"
        )
    if not all(isinstance(number, int) for number in numbers) or len(set(numbers)) < len(numbers):
        raise DamagedError(f"{optimizer.path}: parameters are not numbered one by one")
    return dict(zip(numbers, names, strict=True))


def _moments(file: TorchFile, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for number, state in _field(file, "state", dict).items():
        if number not in names or not isinstance(state, dict):
            raise DamagedError(f"{file.path}: a state of parameter {number}, which no group holds")
        for moment, value in state.items():
            if value is not None:
                yield moment_name(names[number], str(moment)), value


def _check_moments(moments: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry]) -> None:
    """Raise where a running average has another shape than its weight: then the order of parameters was another."""
    for name, entry in moments.items():
        weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if moment in _LIKE_WEIGHT and entry.shape != weights[weight].shape:
            raise MismatchError(
                f"{name}: shape {list(entry.shape)} for a weight of shape {list(weights[weight].shape)}; the optimizer "
                "numbers its parameters in another order than the model"
            )


def _param_groups(file: TorchFile) -> list[dict[str, Any]]:
    """Hyperparameters of the groups, without the parameters they hold."""
    groups: list[dict[str, Any]] = file.plain(_field(file, "param_groups", list))
    return [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]


def _field(file: TorchFile, name: str, kind: type) -> Any:
    value = _state_dict(file).get(name)
    if not isinstance(value, kind):
        raise DamagedError(f"{file.path}: no {name} in it, so it is no optimizer's state dict")
    return value


class _Objects(Mapping[str, Any]):
    """Schedulers, RNG and hyperparameters; the extra-state files are read when first asked for."""

    def __init__(self, world_size: int, extra: list[Path] | None) -> None:
        self.param_groups: list[dict[str, Any]] | None = None
        self._extra = extra or []
        self._states: list[dict[str, Any]] | None = None

    def _ranks(self) -> list[dict[str, Any]]:
        if self._states is None:
            self._states = [dict((file := TorchFile(path)).plain(_state_dict(file))) for path in self._extra]
        return self._states

    def __getitem__(self, key: str) -> Any:
        if key == "param_groups":
            return self.param_groups
        if key == "scheduler":
            return self._ranks()[0].get("lr_scheduler") if self._ranks() else None
        if key == "rng":
            return {rank: state["rng"] for rank, state in enumerate(self._ranks()) if state.get("rng")}
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("param_groups", "scheduler", "rng"))

    def __len__(self) -> int:
        return 3
