"""Checksums of files: xxh3_128 of each, recorded beside an export and checked by `verify`.

    milepost_checksums.json   {"format": 1, "files": [{"path": "config.json", "size": 655, "xxh3_128": "..."}, ...]}

The file lies in the model directory itself. Libraries that load the model look for files by name and pass it by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from milepost.errors import DamagedError
from milepost.layouts.huggingface import CHECKSUMS

FORMAT = 1
_BLOCK = 1 << 20  # bytes

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a directory: its path relative to it, with forward slashes; bytes; xxh3_128 in hex."""

    path: str
    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with one file: kind is "missing", "size", "checksum" or "unreadable"."""

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


def digest_file(path: Path, progress: Progress | None = None) -> str:
    """xxh3_128 of a file, in hex. `progress` is called with bytes just read."""
    import xxhash  # noqa: PLC0415  only what asks for checksums needs it

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def record_files(
    directory: Path, names: Iterable[str], workers: int, progress: Progress | None = None
) -> tuple[FileRecord, ...]:
    """Records of these files, `workers` of them read at a time; just written, they come from the page cache."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  takes long to import, and few calls need it

    lock = Lock()

    def told(count: int) -> None:
        if progress is not None:
            with lock:
                progress(count)

    def record(name: str) -> FileRecord:
        path = directory / name
        return FileRecord(name, path.stat().st_size, digest_file(path, told))

    with ThreadPoolExecutor(workers, "milepost-checksum") as pool:
        return tuple(pool.map(record, names))


def check_records(
    directory: Path, records: Iterable[FileRecord], *, deep: bool = False, progress: Progress | None = None
) -> Iterator[FileProblem]:
    """What is wrong with the recorded files: their sizes; with `deep` also every checksum, which reads everything."""
    for record in records:
        path = directory / record.path
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


def write_checksums(directory: Path, records: Iterable[FileRecord]) -> None:
    """Write `milepost_checksums.json`."""
    files = [asdict(record) for record in sorted(records, key=lambda record: record.path)]
    (directory / CHECKSUMS).write_text(
        json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8"
    )


def read_checksums(directory: Path) -> tuple[FileRecord, ...] | None:
    """The records of an export, or None where it was written without checksums. DamagedError where unreadable."""
    path = directory / CHECKSUMS
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise DamagedError(f"{path} has format {content['format']!r}; this version of milepost reads {FORMAT}")
        return tuple(_record(path, record) for record in content["files"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{path} holds no checksums: it was cut off or altered") from None


def _record(path: Path, content: Any) -> FileRecord:
    record = FileRecord(str(content["path"]), int(content["size"]), str(content["xxh3_128"]))
    inner = PurePosixPath(record.path)
    if inner.is_absolute() or ".." in inner.parts:
        raise DamagedError(f"{path} names {record.path}, which lies outside the directory")
    return record
