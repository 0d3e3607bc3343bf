"""kill -9 at every request of a session that uploads, deletes by retention, moves steps aside, or downloads.

After each: what counts as a step at the URL is a whole one, bit for bit; none that counted before is lost; and the next
start leaves nothing there that belongs to no step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from object_store import BUCKET, CUT, ObjectStore, tags
from remote_sessions import Sessions, session
from xxhash import xxh3_128_hexdigest

from milepost.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from milepost.checkpoint.remote.folder import Remote
from milepost.checkpoint.remote.steps import remote_steps
from milepost.checkpoint.steps import TRACKER

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.filterwarnings("ignore")

Objects = Mapping[str, bytes]


@pytest.fixture(scope="module")
def sessions(server: ObjectStore) -> Iterator[Sessions]:
    with Sessions(server.environment) as ready:
        yield ready


def saved(root: Path, *steps: int) -> Objects:
    """A run with these steps, of two files each; their files, by their paths in it."""
    files = {}
    for step in steps:
        held = {"actor/model.pt": bytes([step]) * 70_000, "trainer_state.json": json.dumps({"step": step}).encode()}
        records = tuple(FileRecord(name, len(data), xxh3_128_hexdigest(data)) for name, data in held.items())
        manifest = Manifest(step, 1, {"actor": "fsdp"}, ("model",), records, created=float(step), version="1")
        for name, data in {**held, MANIFEST: manifest.to_json().encode()}.items():
            files[f"global_step_{step}/{name}"] = data
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return files


def of_step(files: Objects, step: int) -> Objects:
    return {name: data for name, data in files.items() if name.startswith(f"global_step_{step}/")}


def killed_at_each_request(
    store: ObjectStore,
    sessions: Sessions,
    prepare: Callable[[], None],
    start: Callable[[], None],
    *,
    reads: bool = False,
) -> Iterator[int]:
    """Sessions, each killed one request later than the one before; ends with one that came to its end.

    reads: count requests that only read too. Else a kill at one of them leaves what one at the next write does.
    """
    for at in count(1):
        store.proxy.heal()
        prepare()
        numbers = count(1)
        dead = Event()

        def kill(line: str, at: int = at, numbers: Iterator[int] = numbers, dead: Event = dead) -> bytes | None:
            if not dead.is_set() and (reads or not line.startswith(("GET", "HEAD"))) and next(numbers) == at:
                dead.set()
                sessions.kill()
            return CUT if dead.is_set() else None

        store.proxy.answer = kill
        start()
        status = sessions.ended()
        store.proxy.heal()
        if status == 0:
            assert at > 6, "no session was killed"
            return
        assert status == -9
        yield at


def counted(store: ObjectStore, folder: str, files: Objects) -> set[int]:
    """The numbers of the steps that count at a URL; each must hold the bytes that were saved."""
    found = {step.step for step in remote_steps(Remote(f"s3://{BUCKET}/{folder}")) if step.whole}
    there = store.tags(folder).items()
    assert all(tags(of_step(files, step)).items() <= there for step in found)
    return found


def test_a_kill_while_a_step_is_uploaded_and_an_older_one_deleted(
    store: ObjectStore, sessions: Sessions, tmp_path: Path
) -> None:
    root, url = tmp_path / "run", f"s3://{BUCKET}/upload"
    files = saved(tmp_path / "saved", 1, 2)
    after = tags({**of_step(files, 2), TRACKER: b"2"})

    def prepare() -> None:
        store.put_back("upload", {**of_step(files, 1), TRACKER: b"1"})
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", root)

    seen = set()
    for at in killed_at_each_request(
        store, sessions, prepare, lambda: sessions.start("mirror", root, url, keep_last=1)
    ):
        steps = counted(store, "upload", files)
        assert steps, f"at request {at}"
        seen.add(max(steps))
        session("mirror", root, url, keep_last=1)
        assert store.tags("upload") == after, f"after request {at}"
    assert seen == {1, 2} and store.tags("upload") == after


def test_a_kill_while_another_history_is_moved_aside(store: ObjectStore, sessions: Sessions, tmp_path: Path) -> None:
    root, url = tmp_path / "run", f"s3://{BUCKET}/aside"
    files = saved(tmp_path / "saved", 5)
    before = {**files, "global_step_6/data.pt": b"of another program"}

    def prepare() -> None:
        store.put_back("aside", before)
        root.mkdir(exist_ok=True)
        (root / ".set_aside_there_above_0").touch()

    for at in killed_at_each_request(store, sessions, prepare, lambda: sessions.start("mirror", root, url)):
        kept = counted(store, "aside", files)
        moved = [name for name in Remote(url).folders() if name.startswith("set_aside_")]
        assert len(moved) <= 1, f"at request {at}"
        for into in moved:
            kept |= counted(store, f"aside/{into}", files)
        assert kept == {5}, f"at request {at}"
        session("mirror", root, url)
        (into,) = Remote(url).folders()
        assert store.tags("aside") == {f"{into}/{name}": tag for name, tag in tags(before).items()}, f"after {at}"


def test_a_kill_while_a_step_is_downloaded(store: ObjectStore, sessions: Sessions, tmp_path: Path) -> None:
    root, url = tmp_path / "run", f"s3://{BUCKET}/download"
    files = saved(tmp_path / "saved", 1, 2)
    store.put_back("download", files)

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()

    for at in killed_at_each_request(store, sessions, prepare, lambda: sessions.start("fetch", root, url), reads=True):
        arrived = {path.name for path in root.glob("[!.]*")}
        session("fetch", root, url)
        assert {path.name for path in root.iterdir()} == {"global_step_2", TRACKER}, f"after request {at}"
        assert all((root / name).read_bytes() == data for name, data in of_step(files, 2).items())
        assert arrived == set(), f"at request {at}"
