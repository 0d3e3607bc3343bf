"""The manifest: what makes a directory a committed step.

`manifest.json` is written last. It names every other file of the step with size and checksum, so that a reader can
tell a whole step from a damaged one without opening a tensor, and without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from milepost.errors import DamagedError, IncompleteError

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a step: its path relative to the step, with forward slashes; bytes; xxh3_128 in hex."""

    path: str
    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What a committed step holds.

    roles:     role -> layout of its directory ("actor" -> "fsdp")
    contents:  what was saved: model, optimizer, extra, hf_model
    created:   unix seconds
    version:   of milepost
    run_id:    of the run that saved it; the same over its restarts
    """

    step: int
    world_size: int
    roles: Mapping[str, str]
    contents: tuple[str, ...]
    files: tuple[FileRecord, ...]
    created: float
    version: str
    run_id: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files)

    def to_json(self) -> str:
        """As written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with one file of a step: kind is "missing", "size", "checksum" or "unreadable"."""

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


def read_manifest(step_dir: Path) -> Manifest:
    """The manifest of a step.

    Raises IncompleteError where there is none, DamagedError where it cannot be read or asks for files outside the step.
    """
    path = step_dir / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        _check_format(path, content)
        return Manifest(
            step=int(content["step"]),
            world_size=int(content["world_size"]),
            roles={str(role): str(layout) for role, layout in content["roles"].items()},
            contents=tuple(str(name) for name in content["contents"]),
            files=tuple(_record(path, record) for record in content["files"]),
            created=float(content["created"]),
            version=str(content["version"]),
            run_id=str(content["run_id"]),
        )
    except FileNotFoundError:
        raise IncompleteError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{path} is no manifest of milepost: it was cut off or altered") from None


def _check_format(path: Path, content: Any) -> None:
    if content["format"] != FORMAT:
        raise DamagedError(f"{path} has format {content['format']!r}; this version of milepost reads format {FORMAT}")


def _record(manifest: Path, content: Any) -> FileRecord:
    record = FileRecord(str(content["path"]), int(content["size"]), str(content["xxh3_128"]))
    path = PurePosixPath(record.path)
    if path.is_absolute() or ".." in path.parts:
        raise DamagedError(f"{manifest} names {record.path}, which lies outside the step")
    return record


def check_files(
    step_dir: Path, manifest: Manifest, *, deep: bool = False, progress: Callable[[int], None] | None = None
) -> tuple[FileProblem, ...]:
    """What is wrong with the files of a step; empty where all is well.

    Compares sizes; with `deep` also every checksum, which reads everything. `progress` is called with bytes just read.
    """
    return tuple(_problems(step_dir, manifest, deep, progress))


def _problems(
    step_dir: Path, manifest: Manifest, deep: bool, progress: Callable[[int], None] | None
) -> Iterator[FileProblem]:
    for record in manifest.files:
        path = step_dir / record.path
        try:
            size = path.stat().st_size
            if size != record.size:
                yield FileProblem(record.path, "size", f"has {size} bytes instead of {record.size}")
            elif deep and digest_file(path, progress) != record.xxh3_128:
                yield FileProblem(record.path, "checksum", "has other bytes than were written: its checksum differs")
        except (FileNotFoundError, NotADirectoryError):
            yield FileProblem(record.path, "missing", "is missing")
        except OSError as error:
            yield FileProblem(record.path, "unreadable", f"cannot be read: {error.strerror}")


def digest_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of a file, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()
