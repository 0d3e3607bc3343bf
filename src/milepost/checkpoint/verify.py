"""verify: is a checkpoint whole and unaltered?

Always: every file there with its size, headers readable, the parts of every tensor tile it exactly, moments of the
shape of their weight. With `deep` also the bytes: the manifest's checksums, and, where no manifest covers a file, the
CRC-32 that torch.save notes for each record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.checkpoint.locate import roles_of
from milepost.checkpoint.manifest import MANIFEST, check_files, read_manifest
from milepost.checkpoint.steps import judge, scan
from milepost.errors import CheckpointError, NotFoundError
from milepost.index import OPTIMIZER_PREFIX, TensorIndex
from milepost.layouts import find_layout
from milepost.layouts.torchfile import TorchFile
from milepost.transfer.execute import Progress


@dataclass(frozen=True)
class Verdict:
    """What was found of one directory: problems, one line each, none where all is well; files and bytes looked at."""

    path: Path
    kind: str
    files: int
    nbytes: int
    deep: bool
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is good."""
        return not self.problems


def verify(path: Path, *, backend: str = "auto", deep: bool = False, progress: Progress | None = None) -> Verdict:
    """Check a role directory, a model directory, a step, or every step of a run.

    Raises NotFoundError where nothing readable lies there; what is wrong with a checkpoint is in the verdict.
    """
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such directory")
    if find_layout(path, backend) is not None:
        return _role(path, backend, deep, progress)
    steps = scan(path)
    if steps:
        verdicts = [_step(step.path, backend, deep, progress) for step in steps]
        problems = tuple(f"{v.path.name}: {problem}" for v in verdicts for problem in v.problems)
        return Verdict(path, "run", sum(v.files for v in verdicts), sum(v.nbytes for v in verdicts), deep, problems)
    if (path / MANIFEST).exists() or roles_of(path, backend):
        return _step(path, backend, deep, progress)
    raise NotFoundError(f"{path}: holds no checkpoint that milepost reads; give a run, a step, a role or a model")


def bytes_to_read(path: Path) -> int:
    """Bytes of all files below `path`: what `deep` reads."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _role(path: Path, backend: str, deep: bool, progress: Progress | None) -> Verdict:
    layout = find_layout(path, backend)
    assert layout is not None
    try:
        index = layout.open(path)
    except CheckpointError as error:
        return Verdict(path, layout.name, 0, 0, deep, (str(error),))
    problems = list(_tensor_problems(index))
    if deep:
        problems += _record_problems(index, progress)
    size = sum(file.stat().st_size for file in index.files)
    return Verdict(path, layout.name, len(index.files), size, deep, tuple(problems))


def _step(path: Path, backend: str, deep: bool, progress: Progress | None) -> Verdict:
    problems: list[str] = []
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
        verdict = _role(path / role, backend, deep and not covered, progress)
        problems += [problem for problem in verdict.problems if problem not in problems]
        if not covered:
            files, nbytes = files + verdict.files, nbytes + verdict.nbytes
    return Verdict(path, "step", files, nbytes, deep, tuple(problems))


def _tensor_problems(index: TensorIndex) -> Iterator[str]:
    for name, entry in index.items():
        try:
            entry.check_tiling(name)
        except CheckpointError as error:
            yield str(error)
        if name.startswith(OPTIMIZER_PREFIX):
            weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            if weight not in index:
                yield f"{name}: moments of a weight that is not there"
            elif moment != "step" and entry.shape != index[weight].shape:
                yield f"{name}: shape {list(entry.shape)}, its weight has {list(index[weight].shape)}"


def _record_problems(index: TensorIndex, progress: Progress | None) -> Iterator[str]:
    for path in index.files:
        if path.suffix == ".pt":
            bad = list(TorchFile(path).bad_records(progress))
            if bad:
                yield f"{path.name}: {len(bad)} of its records were altered ({bad[0]}): the CRC-32 differs"
