"""The manifest: what makes a directory a committed step.

`manifest.json` is written last. It names every other file of the step with size and checksum, so that a reader can
tell a whole step from a damaged one without opening a tensor, and without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from milepost.errors import DamagedError, IncompleteError
from milepost.jobs.checksums import FileProblem, FileRecord, check_records, digest_file

__all__ = [
    "MANIFEST",
    "FileProblem",
    "FileRecord",
    "Manifest",
    "check_files",
    "digest_file",
    "parse_manifest",
    "read_manifest",
]

HF_MODEL = "hf_model"
"""Among the contents: the weights in Hugging Face's form too."""
MANIFEST = "manifest.json"
FORMAT = 2
"""Since format 2 the manifest has a checksum of its own: xxh3_128 of what it says, as compact JSON with sorted keys."""
_UNSEALED = 1


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
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "xxh3_128": _seal(content)}, indent=1) + "\n"


def read_manifest(step_dir: Path) -> Manifest:
    """The manifest of a step.

    Raises IncompleteError where there is none, DamagedError where it cannot be read or asks for files outside the step.
    """
    path = step_dir / MANIFEST
    try:
        return parse_manifest(path.read_bytes(), path)
    except FileNotFoundError:
        raise IncompleteError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """What a manifest says; `path` is where it lies, for errors. Raises DamagedError as `read_manifest` does."""
    try:
        content = json.loads(data)
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{path} is no manifest of milepost: it was cut off or altered") from None


def _check_format(path: Path | str, content: Any) -> None:
    version = content["format"]
    if version == FORMAT and content["xxh3_128"] != _seal({k: v for k, v in content.items() if k != "xxh3_128"}):
        raise DamagedError(f"{path} says something else than was written: its checksum differs")
    if version not in (_UNSEALED, FORMAT):
        raise DamagedError(f"{path} has format {version!r}; this version of milepost reads formats 1 to {FORMAT}")


def _seal(content: Mapping[str, Any]) -> str:
    import xxhash  # noqa: PLC0415  only steps have manifests

    said = json.dumps(json.loads(json.dumps(content)), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(said.encode()).hexdigest()


def _record(manifest: Path | str, content: Any) -> FileRecord:
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
    return tuple(check_records(step_dir, manifest.files, deep=deep, progress=progress))
