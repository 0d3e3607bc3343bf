"""What a disk may hold after a power cut, from a recorded run and the promises of POSIX alone.

A write is on the disk once its file was flushed; a name (created, renamed, removed) once its directory was. Before, any
part of them may have got there, in any order, except that changes of one name keep their order and a rename is one
change. This is weaker than what ext4 or xfs do, so a saver that stands it stands them, and network file systems too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.savers import SAVED
from faults.shim import Change

SECTOR = 512


@dataclass(eq=False)
class _File:
    """A file's bytes: those on the disk, those a reader sees, and the writes that lie between (None: truncation)."""

    durable: bytes = b""
    seen: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def write(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        self.seen = _written(self.seen, offset, data)

    def flush(self) -> None:
        self.durable, self.pending = self.seen, []


@dataclass(eq=False)
class _Folder:
    """A directory: its names on the disk, and as a process sees them."""

    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    seen: dict[str, _File | _Folder] = field(default_factory=dict)


@dataclass(eq=False)
class _Names:
    """One change of names: what stands under each (folder, name) after it; None: nothing."""

    sets: tuple[tuple[_Folder, str, _File | _Folder | None], ...]

    def keys(self) -> set[tuple[int, str]]:
        return {(id(folder), name) for folder, name, _ in self.sets}


def _written(content: bytes, offset: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:offset].ljust(offset, b"\0")
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


class Disk:
    """A directory on a disk, before and after each change of a recorded run."""

    def __init__(self, root: Path, before: Path) -> None:
        """`root`: the directory as the record names it. `before`: a copy of what it held, which is on the disk."""
        self._root = root
        self._top = _load(before)
        self._pending: list[_Names] = []
        self.acknowledged = 0

    def change(self, change: Change) -> None:
        """Let one change happen."""
        if change.op == "mark":
            if change.path.startswith(SAVED):
                self.acknowledged = max(self.acknowledged, int(change.path.removeprefix(SAVED)))
            return
        if not Path(change.path).is_relative_to(self._root) or change.path == str(self._root):
            if change.op == "fsyncdir" and change.path == str(self._root):
                self._flush(self._top)
            return
        folder, name = self._place(change.path)
        if folder is None:  # below something that is gone: nothing of it can come back
            return
        there = folder.seen.get(name)
        if change.op == "write" and isinstance(there, _File):
            there.write(change.offset, change.data)
        elif change.op == "empty" and isinstance(there, _File):
            there.write(0, None)
        elif change.op in ("create", "empty") and there is None:
            self._set((folder, name, _File()))
        elif change.op == "mkdir" and there is None:
            self._set((folder, name, _Folder()))
        elif change.op == "fsync" and isinstance(there, _File):
            there.flush()
        elif change.op == "fsyncdir" and isinstance(there, _Folder):
            self._flush(there)
        elif change.op in ("unlink", "rmdir") and there is not None:
            self._set((folder, name, None))
        elif change.op in ("rename", "link"):
            source, old = self._place(change.other)
            if source is not None and old in source.seen:
                gone = ((source, old, None),) if change.op == "rename" else ()
                self._set((folder, name, source.seen[old]), *gone)

    def after_cut(self, chance: random.Random | None, likely: float = 0.5) -> dict[str, bytes | None]:
        """What may be found after a power cut now: path -> bytes, or None for a directory.

        chance: what of the rest got to the disk; None: all that a process sees, or nothing where `likely` is 0.
        """
        names: dict[int, dict[str, _File | _Folder]] = {}
        left_out: set[tuple[int, str]] = set()
        for change in self._pending:
            keys = change.keys()
            if keys & left_out or not _happens(chance, likely):
                left_out |= keys
                continue
            for folder, name, node in change.sets:
                held = names.setdefault(id(folder), dict(folder.durable))
                if node is None:
                    held.pop(name, None)
                else:
                    held[name] = node
        found: dict[str, bytes | None] = {}
        self._walk(self._top, "", names, chance, likely, found)
        return found

    def _walk(
        self,
        folder: _Folder,
        at: str,
        names: dict[int, dict[str, _File | _Folder]],
        chance: random.Random | None,
        likely: float,
        found: dict[str, bytes | None],
    ) -> None:
        for name, node in names.get(id(folder), folder.durable).items():
            if isinstance(node, _Folder):
                found[at + name] = None
                self._walk(node, f"{at}{name}/", names, chance, likely, found)
            else:
                found[at + name] = _torn(node, chance, likely)

    def _set(self, *sets: tuple[_Folder, str, _File | _Folder | None]) -> None:
        for folder, name, node in sets:
            if node is None:
                folder.seen.pop(name, None)
            else:
                folder.seen[name] = node
        self._pending.append(_Names(sets))

    def _flush(self, folder: _Folder) -> None:
        """Names of a folder, and what each of its changes did elsewhere, are on the disk."""
        for change in [change for change in self._pending if any(where is folder for where, _, _ in change.sets)]:
            for where, name, node in change.sets:
                if node is None:
                    where.durable.pop(name, None)
                else:
                    where.durable[name] = node
            self._pending.remove(change)

    def _place(self, path: str) -> tuple[_Folder | None, str]:
        *parents, name = Path(path).relative_to(self._root).parts
        folder: _File | _Folder | None = self._top
        for part in parents:
            folder = folder.seen.get(part) if isinstance(folder, _Folder) else None
        return (folder if isinstance(folder, _Folder) else None), name


def _happens(chance: random.Random | None, likely: float) -> bool:
    return likely > 0 if chance is None else chance.random() < likely


def _torn(file: _File, chance: random.Random | None, likely: float) -> bytes:
    """A file's bytes where some writes, or some sectors of one, did not get to the disk."""
    content = file.durable
    for offset, data in file.pending:
        if not _happens(chance, likely):
            continue
        if data is not None and chance is not None and chance.random() < 0.3:
            keep = chance.randrange(0, len(data) + 1, SECTOR) if len(data) >= SECTOR else len(data)
            content = _written(content, offset, data[:keep])
            if chance.random() < 0.5:  # its length is there, its last sectors are not
                content = content.ljust(offset + len(data), b"\0")
            continue
        content = _written(content, offset, data)
    return content


def _load(path: Path) -> _Folder:
    folder = _Folder()
    for entry in path.iterdir():
        if entry.is_dir():
            folder.seen[entry.name] = _load(entry)
        else:
            content = entry.read_bytes()
            folder.seen[entry.name] = _File(content, content)
    folder.durable = dict(folder.seen)
    return folder


def put(found: dict[str, bytes | None], root: Path) -> None:
    """Make a directory hold exactly this."""
    root.mkdir()
    for path, content in found.items():
        if content is None:
            (root / path).mkdir(exist_ok=True)
        else:
            (root / path).write_bytes(content)


def cuts(
    root: Path, before: Path, changes: Sequence[Change], seed: int, subsets: int, every: int = 1
) -> Iterator[tuple[int, int, dict[str, bytes | None]]]:
    """Power cuts after every change, or every such `every`: its number, the newest step acknowledged by then, and what
    may be found: nothing of what was not flushed, all of it, and `subsets` random parts. Each picture comes once for
    each acknowledged step."""
    chance = random.Random(seed)
    disk = Disk(root, before)
    known: set[tuple[int, int]] = set()
    for number, change in enumerate(changes):
        disk.change(change)
        if number % every and change.op != "mark":
            continue
        for turn in range(subsets + 2):
            likely = 0.0 if turn == 0 else 1.0 if turn == 1 else chance.choice((0.2, 0.5, 0.8))
            found = disk.after_cut(chance if turn > 1 else None, likely)
            key = (disk.acknowledged, hash(tuple(sorted(found.items(), key=lambda item: item[0]))))
            if key not in known:
                known.add(key)
                yield number, disk.acknowledged, found
