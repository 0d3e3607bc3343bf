"""verify: is a checkpoint whole and unaltered?

Always: every file there with its size, headers readable, the parts of every tensor tile it exactly, moments of the
shape of their weight. With `deep` also the bytes: the checksums of a step's manifest, or of an export that has them,
and, where neither covers a file, the CRC-32 that torch.save notes for each record; and what several ranks hold of the
same part of a tensor is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.locate import foreign_steps, roles_of
from milepost.checkpoint.manifest import MANIFEST, check_files, read_manifest
from milepost.checkpoint.steps import judge, scan
from milepost.errors import CheckpointError, NotFoundError
from milepost.index import OPTIMIZER_PREFIX, TensorIndex
from milepost.jobs.checksums import check_records, read_checksums
from milepost.layouts import archives, find_layout
from milepost.layouts.torchfile import TorchFile
from milepost.mapping.titan import parts_of
from milepost.transfer.execute import Progress


@dataclass(frozen=True)
class Verdict:
    """What was found of one directory: problems, one line each, none where all is well; files and bytes looked at.

    notes: what could not be looked at though `deep` asked for it, one line each
    """

    path: Path
    kind: str
    files: int
    nbytes: int
    deep: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is good."""
        return not self.problems


def verify(path: Path, *, backend: str = "auto", deep: bool = False, progress: Progress | None = None) -> Verdict:
    """Check a role directory, a model directory, a step, or every step of a run.

    Raises NotFoundError where nothing readable lies there; what is wrong with a checkpoint is in the verdict.
    """
    if not path.is_dir():
        what = (
            "is a file; give the directory of a run, a step, a role or a model"
            if path.exists()
            else "no such directory"
        )
        raise NotFoundError(f"{path}: {what}")
    if find_layout(path, backend) is not None:
        return _role(path, backend, deep, progress)
    steps = scan(path) or foreign_steps(path, backend)
    if steps:
        verdicts = [_step(step.path, backend, deep, progress) for step in steps]
        problems = tuple(f"{v.path.name}: {problem}" for v in verdicts for problem in v.problems)
        notes = tuple(f"{v.path.name}: {note}" for v in verdicts for note in v.notes)
        files, nbytes = sum(v.files for v in verdicts), sum(v.nbytes for v in verdicts)
        return Verdict(path, "run", files, nbytes, deep, problems, notes)
    if (path / MANIFEST).exists() or roles_of(path, backend):
        return _step(path, backend, deep, progress)
    raise NotFoundError(f"{path}: holds no checkpoint that milepost reads; give a run, a step, a role or a model")


def bytes_to_read(path: Path) -> int:
    """Bytes of all files below `path`: what `deep` reads."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _role(path: Path, backend: str, deep: bool, progress: Progress | None, *, covered: bool = False) -> Verdict:
    """`covered`: a manifest has the checksums of the files."""
    layout = find_layout(path, backend)
    assert layout is not None
    try:
        index = layout.open(path)
    except CheckpointError as error:
        return Verdict(path, layout.name, 0, 0, deep, (str(error),))
    problems = list(_tensor_problems(index))
    notes: list[str] = []
    if deep and not covered:
        problems += _record_problems(index, progress, notes)
    if deep:
        problems += _replica_problems(index)
    files, size = len(index.files), sum(file.stat().st_size for file in index.files)
    try:
        records = read_checksums(path)
    except CheckpointError as error:
        return Verdict(path, layout.name, files, size, deep, (*problems, str(error)), tuple(notes))
    if records is not None:
        again = deep and not covered
        problems += [str(problem) for problem in check_records(path, records, deep=again, progress=progress)]
        files, size = len(records), sum(record.size for record in records)
    return Verdict(path, layout.name, files, size, deep, tuple(problems), tuple(notes))


def _step(path: Path, backend: str, deep: bool, progress: Progress | None) -> Verdict:
    problems: list[str] = []
    notes: list[str] = []
    files = nbytes = 0
    covered = (path / MANIFEST).exists()
    try:
        if covered:
            manifest = read_manifest(path)
            files, nbytes = len(manifest.files), manifest.nbytes
            problems += [str(problem) for problem in check_files(path, manifest, deep=deep, progress=progress)]
            problems += [f"{role}/ is missing" for role in manifest.roles if not (path / role).is_dir()]
        else:
            state = judge(path, named=True)
            problems += [] if state.good else [state.why]
    except CheckpointError as error:
        problems.append(str(error))
    for role in roles_of(path, backend):
        verdict = _role(path / role, backend, deep, progress, covered=covered)
        problems += [problem for problem in verdict.problems if problem not in problems]
        notes += verdict.notes
        if not covered:
            files, nbytes = files + verdict.files, nbytes + verdict.nbytes
    return Verdict(path, "step", files, nbytes, deep, tuple(problems), tuple(notes))


def _tensor_problems(index: TensorIndex) -> Iterator[str]:
    has_weights = bool(index.weights())
    for name, entry in index.items():
        try:
            entry.check_tiling(name)
        except CheckpointError as error:
            yield str(error)
        if name.startswith(OPTIMIZER_PREFIX) and has_weights:
            weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            if weight not in index:
                if parts_of(weight) and all(part in index for part in parts_of(weight)):
                    continue
                yield f"{name}: moments of a weight that is not there"
            elif moment != "step" and entry.shape != index[weight].shape:
                yield f"{name}: shape {list(entry.shape)}, its weight has {list(index[weight].shape)}"


def _replica_problems(index: TensorIndex) -> Iterator[str]:
    from milepost.layouts.replicas import differing  # noqa: PLC0415  it needs the layouts' modules, which start slowly

    try:
        yield from map(str, differing(index))
    except CheckpointError as error:
        yield str(error)


def _record_problems(index: TensorIndex, progress: Progress | None, notes: list[str]) -> Iterator[str]:
    without: dict[str, None] = {}
    for path, span in archives(index):
        try:
            file = TorchFile(path, span)
            if not file.has_checksums:
                without[path.name] = None
            bad = list(file.bad_records(progress))
        except CheckpointError as error:
            yield str(error)
            continue
        if bad:
            place = "" if span is None else f", bytes {span[0]} to {sum(span)}"
            yield f"{path.name}{place}: {len(bad)} of its records were altered ({bad[0]}): the CRC-32 differs"
    if without:
        notes.append(
            f"{', '.join(list(without)[:3])}{', ...' if len(without) > 3 else ''}: saved without CRC-32s, so only "
            "sizes and headers were checked"
        )
