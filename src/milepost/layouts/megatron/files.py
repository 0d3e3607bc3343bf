"""Which files of a classic Megatron checkpoint are there, and which rank wrote each.

    mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt       Megatron-LM, slime
    model/mp_rank_.../model_states.pt, model.pt                     verl before 0.4, milepost

A folder has a pipeline rank where there are several, and an expert-parallel rank where there are several, so
`mp_rank_00_001` can be either. It is the pipeline's unless every rank holds the first and the last tensor of a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import DamagedError, IncompleteError, RefusedError
from milepost.layouts.inert import Record
from milepost.layouts.torchfile import TorchFile

FILES = ("model_optim_rng.pt", "model_states.pt", "model.pt", "model_rng.pt")
"""What the file of a rank may be called."""
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_CHUNK = re.compile(r"model\d{0,3}")
_FIRST, _LAST = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
_NAMED = 8


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one rank wrote.

    tp, pp, ep:  its place; 0 where it has no such dimension
    file:        its file
    chunks:      the state dicts of its virtual pipeline stages, in order; values as the pickle has them
    args:        Megatron-LM's arguments, where they were saved
    moments:     whether optimizer state is in the file or beside it
    """

    tp: int
    pp: int
    ep: int
    file: TorchFile
    chunks: tuple[Mapping[str, Any], ...]
    args: Mapping[str, Any]
    moments: bool


def folder_of_ranks(directory: Path) -> Path | None:
    """The folder that has the ranks' folders in it: the directory itself, or `model/` of a role; None where neither."""
    for folder in (directory, directory / "model"):
        if folder.is_dir() and any(_RANK.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    return None


def read_ranks(folder: Path) -> list[RankFile]:
    """The files of all ranks, in the order of their places.

    Raises IncompleteError where a rank's file is missing, DamagedError where the folders' names do not go together.
    """
    paths = _paths(folder)
    if len({len(numbers) for numbers in paths}) > 1:
        raise DamagedError(
            f"{folder}: ranks of several checkpoints lie together: {', '.join(p.parent.name for p in paths.values())}"
        )
    read = {numbers: _read(path) for numbers, path in paths.items()}
    experts = len(next(iter(read))) == 2 and all(_is_whole(chunks) for _, chunks, _, _ in read.values())
    ranks = []
    for numbers, (file, chunks, args, moments) in read.items():
        tp, pp, ep = (numbers[0], 0, numbers[1]) if experts else (*numbers, 0, 0)[:3]
        ranks.append(RankFile(tp, pp, ep, file, chunks, args, moments))
    ranks.sort(key=lambda rank: (rank.pp, rank.tp, rank.ep))
    _check_complete(folder, ranks)
    return ranks


def _paths(folder: Path) -> dict[tuple[int, ...], Path]:
    paths: dict[tuple[int, ...], Path] = {}
    lacking = []
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is not None:
            paths[tuple(int(number) for number in match.groups() if number)] = file
        elif not (path / "optim.pt").is_file():  # a data-parallel rank's share of the optimizer, in old Megatron-LM
            lacking.append(path.name)
    if lacking or not paths:
        shown = ", ".join(lacking[:_NAMED]) + (f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else "")
        raise IncompleteError(
            f"{folder}: no {FILES[0]} (or {', '.join(FILES[1:])}) in {shown or 'any rank folder'}; the save did not "
            "come to its end, or the folder was not copied whole"
        )
    return paths


def _read(path: Path) -> tuple[TorchFile, tuple[Mapping[str, Any], ...], Mapping[str, Any], bool]:
    file = TorchFile(path)
    root = file.root
    args: Mapping[str, Any] = {}
    moments = any(path.parent.glob("distrib_optim*")) or any(path.parent.parent.parent.glob("optim/distrib_optim*"))
    if isinstance(root, list):
        chunks = root
    elif isinstance(root, dict) and any(isinstance(name, str) and _CHUNK.fullmatch(name) for name in root):
        chunks = [root[name] for name in sorted((n for n in root if _CHUNK.fullmatch(str(n))), key=_number)]
        noted = root.get("args")
        args = noted.fields() if isinstance(noted, Record) else {}
        moments = moments or root.get("optimizer") is not None
    else:
        chunks = [root]
    if not chunks or not all(isinstance(chunk, dict) and all(isinstance(n, str) for n in chunk) for chunk in chunks):
        raise DamagedError(f"{path}: holds no state dict of a Megatron model")
    if any("language_model" in chunk for chunk in chunks):
        raise RefusedError(
            f"{path}: is a model of Megatron-LM before Megatron-Core (language_model.*); convert it first with "
            "Megatron-LM's tools/checkpoint/convert.py --saver core"
        )
    return file, tuple(_named(path, chunk) for chunk in chunks), args, moments


def _number(name: str) -> int:
    return int(name.removeprefix("model") or 0)


def _named(path: Path, chunk: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the `module.` that wrappers put in front."""
    named: dict[str, Any] = {}
    for name, value in chunk.items():
        bare = name
        while bare.startswith("module."):
            bare = bare.removeprefix("module.")
        if bare in named:
            raise DamagedError(f"{path}: holds {bare} twice")
        named[bare] = value
    return named


def _is_whole(chunks: Iterable[Mapping[str, Any]]) -> bool:
    return {_FIRST, _LAST} <= {name for chunk in chunks for name in chunk}


def _check_complete(folder: Path, ranks: Sequence[RankFile]) -> None:
    """Raise unless every tensor- and every expert-parallel rank is there on every stage.

    Where experts are cut otherwise than the rest, not every pair of the two exists.
    """
    stages = range(max(rank.pp for rank in ranks) + 1)
    present = {rank.pp for rank in ranks}
    missing = [f"pipeline rank {pp}" for pp in stages if pp not in present]
    for kind, place in (("tensor-parallel", "tp"), ("expert-parallel", "ep")):
        there = {(getattr(rank, place), rank.pp) for rank in ranks}
        for number in range(max(number for number, _ in there) + 1):
            missing += [
                f"{kind} rank {number}" + (f" of pipeline rank {pp}" if len(stages) > 1 else "")
                for pp in stages
                if pp in present and (number, pp) not in there
            ]
    if missing:
        shown = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise IncompleteError(
            f"{folder}: files of {shown} are missing (likely on another node's local disk, or not copied whole); bring "
            "them here and try again"
        )
    counts = {rank.pp: len(rank.chunks) for rank in ranks}
    other = next((rank for rank in ranks if len(rank.chunks) != len(ranks[0].chunks)), None)
    if other is not None:
        raise DamagedError(
            f"{other.file.path}: holds {len(other.chunks)} virtual pipeline stages, {ranks[0].file.path} holds "
            f"{counts[ranks[0].pp]}; the files are of different saves"
        )
