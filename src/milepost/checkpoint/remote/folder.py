"""A folder at a URL (`s3://bucket/run`, `gs://`, `file://`, `memory://`), by fsspec: the few verbs that a record of a
run needs, each tried again where a network fails.

An object store has no rename, and an object is there as a whole or not at all. So a step is committed by its manifest,
which is the last object that is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from milepost.checkpoint.remote.refusals import NO_SUCH_BUCKET, in_words, is_final, is_of_network, word_of
from milepost.errors import CallError, NotFoundError, OutageError

T = TypeVar("T")
Item = TypeVar("Item")

PART = 16 << 20  # bytes of one request
AT_ONCE = 4  # requests of one file that is being written; files, and ranges read, are as many
ATTEMPTS = 6
TIMEOUT = 120.0  # seconds in which a request of `PART` bytes must be answered
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+")
_MOST_PARTS = 9_000  # S3 takes 10,000 a file
_INSTALL = "pip install 'milepost[remote]'"


def url_of(path: Path | str) -> str | None:
    """The URL that a path stands for, None for a path on this machine. `Path("s3://b/run")` has lost a slash."""
    text = str(path)
    match = _URL.match(text)
    if match is None or Path(text).exists():
        return None
    rest = text[match.end() :]
    return f"{match[1]}://{'/' if match[1] in ('file', 'local') else ''}{rest}".rstrip("/")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object: its bytes, and what changes when it is written anew (S3: its ETag); empty where nothing tells."""

    size: int
    version: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """The parts of an object that was not written to its end.

    name:  the object's, relative to the folder that was searched
    """

    name: str
    bucket: str
    key: str
    upload: str


class Remote:
    """The folder at a URL. Names of objects are relative to it, with forward slashes.

    Where the server and the credentials are, fsspec and its backends find by their own variables and files (for S3
    AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, ...).

    Raises CallError where a package is missing or the server refuses, OutageError where it does not do what it is asked
    to after `attempts` tries.
    """

    def __init__(self, url: str, *, attempts: int = ATTEMPTS, timeout: float = TIMEOUT, wait: float = 1.0) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._wait = wait
        try:
            import tenacity  # noqa: PLC0415  an extra

            url_to_fs = import_module("fsspec.core").url_to_fs
        except ImportError:
            raise CallError(f"{url}: reading and writing by URL needs more packages: {_INSTALL}") from None
        self._tenacity = tenacity
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.url.startswith(("s3://", "s3a://")):
            # One retry within a request, the others here: a server that hangs is else waited for many times over.
            options["config_kwargs"] = {
                "connect_timeout": min(timeout, 20.0), "read_timeout": timeout, "retries": {"max_attempts": 1},
            }  # fmt: skip
        try:
            self._fs, self._root = url_to_fs(self.url, **options)
        except ImportError:
            raise CallError(f"{url}: {_lacking(self.url.partition('://')[0])}") from None
        except ValueError as error:
            raise CallError(f"{url}: {error}") from None

    def __str__(self) -> str:
        return self.url

    def below(self, folder: str) -> Remote:
        """A folder in it, over the same connections."""
        inner = copy(self)
        inner.url, inner._root = f"{self.url}/{folder}", self._at(folder)
        return inner

    def folders(self) -> list[str]:
        """The names of the folders right below; empty where there is nothing."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._at(""), detail=True)
            except FileNotFoundError as error:
                if word_of(error) == NO_SUCH_BUCKET:
                    raise
                return []
            return [str(one["name"]).rstrip("/").rpartition("/")[2] for one in found if one["type"] == "directory"]

        return sorted(self._try("listed", "", listed))

    def objects(self, folder: str) -> Mapping[str, Stored]:
        """Every object below a folder, by its name relative to that; empty where there are none."""

        def found() -> dict[str, Stored]:
            place = self._at(folder)
            self._fs.invalidate_cache()
            objects = self._fs.find(place, detail=True)
            inside = place.rstrip("/") + "/"
            return {
                str(name).removeprefix(inside): Stored(int(one["size"]), _version(one))
                for name, one in objects.items()
                if str(name).startswith(inside)
            }

        return self._try("listed", folder, found)

    def sizes(self, folder: str) -> Mapping[str, int]:
        """The bytes of every object below a folder, as `objects`."""
        return {name: stored.size for name, stored in self.objects(folder).items()}

    def size(self, name: str) -> int | None:
        """The bytes of an object, None where there is none. A listing may lag behind; this does not."""

        def asked() -> int | None:
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._at(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

        return self._try("looked at", name, asked)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of an object, or of a range of it; NotFoundError where there is no such object."""

        def whole() -> bytes:
            data = bytes(self._fs.cat_file(self._at(name), start=start, end=end))
            if end is not None and len(data) != end - (start or 0):
                raise OSError(f"{len(data)} bytes came instead of {end - (start or 0)}")
            return data

        return self._try("read", name, whole)

    def put(self, source: Path, name: str) -> None:
        """Write a file as an object, in parts that are sent side by side; it appears once all have arrived."""
        part = max(PART, source.stat().st_size // _MOST_PARTS)
        s3 = "s3" in self._protocols()
        options: dict[str, Any] = {"chunksize": part, "max_concurrency": AT_ONCE} if s3 else {}

        def sent() -> None:
            self._make_parent(name)
            self._fs.put_file(str(source), self._at(name), **options)

        self._try("written", name, sent)

    def put_bytes(self, data: bytes, name: str) -> None:
        """Write a small object."""

        def sent() -> None:
            self._make_parent(name)
            self._fs.pipe_file(self._at(name), data)

        self._try("written", name, sent)

    def duplicate(self, source: str, target: str) -> None:
        """Copy an object; an object store does it by itself."""

        def copied() -> None:
            self._make_parent(target)
            self._fs.cp_file(self._at(source), self._at(target))

        self._try("copied", source, copied)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is gone already is no error."""
        for name in names:

            def removed(name: str = name) -> None:
                try:
                    self._fs.rm_file(self._at(name))
                except FileNotFoundError:
                    return

            self._try("removed", name, removed)

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder."""

        def removed() -> None:
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._at(folder), recursive=True)
            except FileNotFoundError:
                return

        self._try("removed", folder, removed)

    def cut_off(self, folder: str) -> list[CutOff]:
        """What S3 keeps, and bills, of objects below a folder whose parts were never put together: a killed process and
        a cut connection leave it. What is just being written is among it."""
        if "s3" not in self._protocols():
            return []
        bucket, _, key = self._at(folder).partition("/")
        inside = f"{key.rstrip('/')}/" if key else ""

        def listed() -> list[CutOff]:
            found: list[CutOff] = []
            after: dict[str, str] = {}
            while True:
                page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=inside, **after)
                found += [
                    CutOff(str(one["Key"]).removeprefix(inside), bucket, str(one["Key"]), str(one["UploadId"]))
                    for one in page.get("Uploads", [])
                ]
                if not page.get("IsTruncated"):
                    return found
                after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

        return self._try("searched for parts of uploads", folder, listed)

    def give_up(self, uploads: Iterable[CutOff]) -> None:
        """Let S3 forget these parts."""
        for one in uploads:

            def forgotten(one: CutOff = one) -> None:
                try:
                    self._fs.call_s3("abort_multipart_upload", Bucket=one.bucket, Key=one.key, UploadId=one.upload)
                except FileNotFoundError:
                    return

            self._try("rid of parts of an upload", one.name, forgotten)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        if "s3" not in self._protocols():  # object stores have no folders
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _try(self, verb: str, name: str, act: Callable[[], T]) -> T:
        place = f"{self.url}/{name}" if name else self.url
        tenacity = self._tenacity
        again = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_random_exponential(multiplier=self._wait, max=30 * self._wait),
            retry=tenacity.retry_if_exception(lambda error: is_of_network(error) and not is_final(error)),
            reraise=True,
        )
        try:
            result: T = again(act)
            return result
        except Exception as error:
            if is_final(error):
                kind = NotFoundError if isinstance(error, FileNotFoundError) else CallError
                raise kind(f"{place} cannot be {verb}: {in_words(error)}") from error
            if not is_of_network(error):
                raise  # a fault of a program, which no network has
            tries = f"after {self._attempts} tries"
            raise OutageError(f"{place} cannot be {verb}, {tries}: {in_words(error)}") from error


def _version(found: Mapping[str, Any]) -> str:
    keys = ("ETag", "etag", "generation", "LastModified", "mtime", "created")
    return str(next((found[key] for key in keys if found.get(key) is not None), ""))


def _lacking(protocol: str) -> str:
    """Which package speaks a protocol that fsspec knows, and is not there."""
    known = import_module("fsspec.registry").known_implementations
    package = str(known.get(protocol, {}).get("class", "")).partition(".")[0]
    command = _INSTALL if package == "s3fs" else f"pip install {package}"
    return f"{protocol}:// needs the package {package}: {command}" if package else f"{protocol}:// cannot be read"


def side_by_side(items: Iterable[Item], act: Callable[[Item], object], workers: int = AT_ONCE) -> None:
    """Do every item in one of so many threads; the first error stops the others and is raised.

    The threads keep no process from ending: what they have begun to write at a URL is not there until it is all there.
    """
    waiting: SimpleQueue[Item] = SimpleQueue()
    for item in items:
        waiting.put(item)
    errors: SimpleQueue[BaseException] = SimpleQueue()
    stopped = Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                act(waiting.get_nowait())
            except Empty:
                return
            except BaseException as error:  # noqa: BLE001  raised in the caller's thread
                stopped.set()
                errors.put(error)

    count = max(1, min(workers, waiting.qsize()))
    threads = [Thread(target=work, name=f"milepost-remote-{n}", daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
    if not errors.empty():
        raise errors.get()
