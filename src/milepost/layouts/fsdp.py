"""The FSDP layout: one set of `torch.save` files a rank, as verl writes it and its own tools read it.

    model_world_size_{W}_rank_{R}.pt         flat dict: name -> DTensor (FSDP2; FSDP1 with a device mesh), ShardedTensor
                                             (FSDP1), or a plain tensor that every rank holds whole
    optim_world_size_{W}_rank_{R}.pt         the optimizer's state of the rank, in one of the forms of `layouts.moments`
    extra_state_world_size_{W}_rank_{R}.pt   {"lr_scheduler": ..., "rng": {"cpu", "numpy", "random", ("cuda")}}
    fsdp_config.json                         {"FSDP_version": 1 or 2, "world_size": W}; absent in old checkpoints
    huggingface/                             config, generation config, tokenizer; weights if they were asked for

What ranks hold is joined by `milepost.layouts.join`. Moments that cannot be told apart do not stand in the way of the
weights: the index then has none and says why in `unread`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError, MismatchError, NotFoundError
from milepost.index import TensorEntry, TensorIndex
from milepost.layouts.cache import IndexCache
from milepost.layouts.join import RankFiles, join_ranks, state_dict
from milepost.layouts.torchfile import TorchFile
from milepost.wording import ranges

CONFIG_FILE = "fsdp_config.json"
KINDS = ("model", "optim", "extra_state")
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
        optimizer = paths.get("optim", [])
        cache = IndexCache([*paths["model"], *optimizer])
        kept = cache.read()
        if kept is None:
            entries, facts = _read(paths["model"], optimizer)
            cache.write(entries, facts)
        else:
            entries, facts = kept.entries, kept.facts
        objects = _Objects(optimizer[0] if facts["groups"] else None, paths.get("extra_state"))
        files = tuple(path for group in paths.values() for path in group)
        return TensorIndex(entries, self.name, files, world_size, objects, tuple(facts["unread"]))


def _read(models: list[Path], optimizer: list[Path]) -> tuple[dict[str, TensorEntry], Mapping[str, Any]]:
    """Entries, and whether the optimizer's files have groups of hyperparameters and what could not be read."""
    files = RankFiles(models)
    entries = join_ranks(files, lambda file: state_dict(file).items())
    if not optimizer:
        return entries, {"groups": False, "unread": []}
    from milepost.layouts.moments import read_moments  # noqa: PLC0415  an export has none, and starts quicker without

    try:
        moments, groups = read_moments(RankFiles(optimizer), files, entries)
    except MismatchError as error:
        return entries, {"groups": False, "unread": [f"optimizer moments: {error}"]}
    return entries | moments, {"groups": groups is not None, "unread": []}


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
            noted = int(json.loads(config.read_bytes())["world_size"])
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
            who = f"rank{'s' if len(missing) > 1 else ''} {ranges(missing)}"
            raise IncompleteError(
                f"{directory}: {kind} files of {who} of {world_size} are missing (likely {cause}); "
                "bring them here and try again"
            )
        if not missing:
            kinds.append(kind)
    return world_size, kinds


class _Objects(Mapping[str, Any]):
    """Schedulers, RNG and hyperparameters; their files are read when first asked for.

    optimizer:  the optimizer's file of rank 0, if it has groups
    """

    def __init__(self, optimizer: Path | None, extra: list[Path] | None) -> None:
        self._optimizer = optimizer
        self._extra = extra or []
        self._states: list[dict[str, Any]] | None = None

    def _ranks(self) -> list[dict[str, Any]]:
        if self._states is None:
            self._states = [dict((file := TorchFile(path)).plain(state_dict(file))) for path in self._extra]
        return self._states

    def __getitem__(self, key: str) -> Any:
        if key == "param_groups":
            from milepost.layouts.moments import param_groups  # noqa: PLC0415

            return None if self._optimizer is None else param_groups(TorchFile(self._optimizer))
        if key == "scheduler":
            return self._ranks()[0].get("lr_scheduler") if self._ranks() else None
        if key == "rng":
            return {rank: state["rng"] for rank, state in enumerate(self._ranks()) if state.get("rng")}
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("param_groups", "scheduler", "rng"))

    def __len__(self) -> int:
        return 3
