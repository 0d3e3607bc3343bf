"""Which files of a DeepSpeed checkpoint are there: its tags, and the ranks of a tag.

    latest                                                      name of the tag that was saved last
    {tag}/zero_pp_rank_{R}_mp_rank_00_model_states.pt           stage 3: one a rank
    {tag}/mp_rank_00_model_states.pt                            stages 0, 1 and 2: one for all ranks
    {tag}/[bf16_]zero_pp_rank_{R}_mp_rank_00_optim_states.pt    stages 1, 2 and 3: one a rank

A role's directory holds tags, or is itself the folder of one. Nothing is chosen by a guess: of several tags the one
that `latest` names counts, and without it the user names a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CallError, DamagedError, IncompleteError, NotFoundError
from milepost.layouts.inert import shown
from milepost.wording import counted, ranges

LATEST = "latest"
_NAMED = 5
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_UNREAD = (
    (re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"), "DeepSpeed's mixture of experts"),
    (re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"), "DeepSpeed's mixture of experts"),
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), "DeepSpeed's pipeline parallelism"),
)


@dataclass(frozen=True)
class TagFiles:
    """The files of one tag, by rank.

    folder:   the tag's folder
    sharded:  model files of the ranks: stage 3
    model:    the one model file of lower stages
    optims:   optimizer files of the ranks
    """

    folder: Path
    sharded: Mapping[int, Path]
    model: Path | None
    optims: Mapping[int, Path]


def is_tag(directory: Path) -> bool:
    """Whether the files of a tag lie here."""
    forms = (_SHARDED_MODEL, _MODEL, _OPTIM, *(form for form, _ in _UNREAD))
    return any(form.fullmatch(name) for name in _names(directory) for form in forms)


def tags(directory: Path) -> list[str]:
    """The tags in a directory, sorted with their numbers as numbers."""
    try:
        with os.scandir(directory) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
    except PermissionError:
        return []  # nobody can say what a closed folder holds
    found = [name for name in folders if is_tag(directory / name)]
    return sorted(found, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def choose_tag(directory: Path) -> tuple[Path, str]:
    """The folder of the tag that is meant by a directory, and why, in words.

    Raises IncompleteError where `latest` names a tag that is not there, CallError where nothing says which of several
    tags is meant, NotFoundError where there is none.
    """
    if is_tag(directory):
        return directory, "named"
    found = tags(directory)
    if not found:
        raise NotFoundError(f"{directory}: holds no files of DeepSpeed, and no folder that does")
    listed = ", ".join(found[-_NAMED:]) if len(found) <= _NAMED else f"{len(found)} tags up to {found[-1]}"
    latest = directory / LATEST
    if latest.is_file():
        named = os.fsdecode(latest.read_bytes()).strip()
        if Path(named).name != named or named in ("", ".."):
            raise DamagedError(f"{latest}: names {shown(named)!r}, which is no folder here; it holds {listed}")
        if named not in found:
            raise IncompleteError(
                f"{latest} names {shown(named)}, which is not here or holds no checkpoint; "
                f"give the folder of one of: {listed}"
            )
        return directory / named, f"named by {LATEST}"
    if len(found) > 1:
        raise CallError(f"{directory}: holds {listed}, and no file {LATEST} says which counts; give the folder of one")
    return directory / found[0], "the only one"


def tag_files(folder: Path) -> TagFiles:
    """The files of a tag.

    Raises CallError for forms that are not read (tensor and pipeline parallelism, mixtures of experts), DamagedError
    where the files of different runs lie together, IncompleteError where no model file is there.
    """
    sharded: dict[int, Path] = {}
    optims: dict[int, Path] = {}
    model: Path | None = None
    for name in sorted(_names(folder)):
        path = folder / name
        for form, what in _UNREAD:
            if form.fullmatch(name):
                raise CallError(f"{path}: {what}, which milepost does not read; DeepSpeed's own tools do")
        whole, part, optim = (form.fullmatch(name) for form in (_MODEL, _SHARDED_MODEL, _OPTIM))
        slot = (whole and whole[1]) or (part and part[2]) or (optim and optim[2])
        if slot and int(slot):
            raise CallError(
                f"{path}: tensor parallelism (mp_rank {int(slot)}), which milepost does not read from DeepSpeed's files"
            )
        if whole:
            model = path
        elif part:
            _add(sharded, int(part[1]), path)
        elif optim:
            _add(optims, int(optim[1]), path)
    if model is not None and sharded:
        raise DamagedError(
            f"{folder}: holds {model.name}, which ZeRO stages 0 to 2 write, and {counted(len(sharded), 'model file')} "
            "of stage 3; two runs saved under one tag"
        )
    if model is None and not sharded:
        raise IncompleteError(
            f"{folder}: optimizer files and no model_states file, which has the names and shapes; bring it here"
        )
    return TagFiles(folder, sharded, model, optims)


def of_all_ranks(folder: Path, kind: str, found: Mapping[int, Path], world_size: int) -> list[Path]:
    """The files of one kind in rank order.

    Raises IncompleteError where ranks lack theirs, DamagedError where there are more than the save had.
    """
    missing = sorted(set(range(world_size)) - set(found))
    if missing:
        which = f"rank{'s' if len(missing) > 1 else ''} {ranges(missing)} missing"
        raise IncompleteError(
            f"{folder}: {kind} files: expected {world_size}, found {world_size - len(missing)}: {which}; "
            "bring them here (each node may have kept its own) or use another tag"
        )
    extra = sorted(set(found) - set(range(world_size)))
    if extra:
        which = f"rank{'s' if len(extra) > 1 else ''} {ranges(extra)} too many"
        raise DamagedError(
            f"{folder}: {kind} files: expected {world_size}, found {len(found)}: {which}; "
            "runs of different sizes saved under one tag"
        )
    return [found[rank] for rank in range(world_size)]


def _add(files: dict[int, Path], rank: int, path: Path) -> None:
    other = files.setdefault(rank, path)
    if other is not path:
        raise DamagedError(
            f"{path.parent}: {other.name} and {path.name} are both rank {rank}'s; two runs saved under one tag"
        )


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except PermissionError:
        return []
