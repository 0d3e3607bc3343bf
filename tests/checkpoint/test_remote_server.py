"""What servers and networks do that they should not, and what is said of it: one line, with what to do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from object_store import BUCKET, CUT, ObjectStore, refusal
from tiny_engine import disk_is_at, resumed, trained

from milepost.checkpoint.remote.copies import local_copy
from milepost.checkpoint.remote.folder import Remote
from milepost.checkpoint.remote.steps import remote_steps
from milepost.cli.app import run as milepost
from milepost.errors import CallError, DamagedError, NotFoundError, OutageError, WriteError

pytest.importorskip("moto")
_registry = pytest.importorskip("fsspec.registry")._registry
s3fs = pytest.importorskip("s3fs")
pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def anew() -> Iterator[None]:
    """Connections of this test's own: they remember address and credentials."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def numbers(url: str) -> list[int]:
    return [step.step for step in remote_steps(Remote(url)) if step.whole]


# Refusals


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("301 Moved Permanently", "PermanentRedirect", "AWS_DEFAULT_REGION"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "AWS_DEFAULT_REGION"),
        ("400 Bad Request", "ExpiredToken", "get new credentials"),
        ("403 Forbidden", "AccessDenied", "may not do that"),
        ("403 Forbidden", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ("403 Forbidden", "RequestTimeTooSkewed", "clock is wrong: set it"),
    ],
)
def test_what_no_second_try_changes_is_said_at_once_with_what_to_do(
    store: ObjectStore, url: str, status: str, code: str, says: str
) -> None:
    asked: list[str] = []

    def refuse(line: str) -> bytes:
        asked.append(line)
        # Where a bucket's region is asked for, after a redirect, nothing is said of it.
        return refusal("400 Bad Request" if line.startswith("HEAD") else status, code, "So it is.")

    store.proxy.answer = refuse
    with pytest.raises(CallError) as caught:
        Remote(url).put_bytes(b"data", "name")
    said = str(caught.value)
    assert type(caught.value) is CallError and says in said and "\n" not in said
    assert said.startswith(f"{url}/name cannot be written: So it is (")
    # A redirect is followed by the client itself, which asks for the bucket's region on the way.
    assert len(asked) == 1 or code in ("PermanentRedirect", "AuthorizationHeaderMalformed")


def test_a_server_that_asks_for_patience_gets_it(store: ObjectStore, url: str, tmp_path: Path) -> None:
    """More often than the client asks again by itself."""
    slow_down = refusal("503 Slow Down", "SlowDown", "Please reduce your request rate.")
    asked: Counter[str] = Counter()

    def answer(line: str) -> bytes | None:
        if line.startswith("HEAD") or (line not in asked and len(asked) == 4):
            return None
        asked[line] += 1
        return slow_down if asked[line] <= 4 else None

    store.proxy.answer = answer
    trained(tmp_path, 1, remote=url).manager.close()
    store.proxy.answer = lambda line: slow_down
    with pytest.raises(OutageError, match=r"after 2 tries: Please reduce your request rate"):
        Remote(url, attempts=2).put_bytes(b"", "name")
    store.proxy.heal()
    assert numbers(url) == [1]


def test_no_network_and_no_credentials(
    store: ObjectStore, url: str, anew: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OutageError, match=r"Could not connect to .* \(is the network up, and AWS_ENDPOINT_URL right\?"):
        Remote(url, attempts=2).read("name")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert milepost(["inspect", url]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "Unable to locate credentials (check AWS_ACCESS_KEY_ID" in line
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CallError, match=r"nobody.* \(correct AWS_PROFILE\)"):
        Remote(url).read("name")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "gs"):  # what was imported before
        monkeypatch.delitem(_registry, protocol, raising=False)
    assert milepost(["inspect", "gs://bucket/run"]) == 2
    assert "gs:// needs the package gcsfs: pip install gcsfs" in capfd.readouterr().err
    assert milepost(["verify", "s3://bucket/run"]) == 2
    assert "s3:// needs the package s3fs: pip install 'milepost[remote]'" in capfd.readouterr().err


def test_no_such_bucket_is_one_line_for_reading_too(store: ObjectStore, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["merge"], ["prune", "--keep_last", "1"]):
        out = ["/dev/null/out"] if command == ["merge"] else []
        assert milepost([command[0], "s3://no-such-bucket/run", *out, *command[1:]]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "there is no such bucket (make it, or correct its name)" in line
    with pytest.raises(NotFoundError, match="there is no such object"):
        Remote(f"s3://{BUCKET}").read("nothing")


# What is lost, late or altered


def test_an_answer_that_is_lost_costs_a_second_try(store: ObjectStore, url: str, tmp_path: Path) -> None:
    """The parts are put together, and nobody hears of it: to ask again is to ask for what is no upload any more."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * (12 << 12))
    gone = refusal("404 Not Found", "NoSuchUpload", "The specified upload does not exist.")
    completed = count(1)
    lost = Event()

    def answer(line: str) -> bytes | None:
        if not line.startswith("POST") or "uploadId" not in line:
            return None
        number = next(completed)
        if number == 1:
            lost.set()
        return gone if number == 2 else None

    def lose(data: bytes) -> bytes:
        if lost.is_set() and b"CompleteMultipartUploadResult" in data:
            lost.clear()
            return CUT
        return data

    store.proxy.answer, store.proxy.alter = answer, lose
    Remote(url).put(tmp_path / "file", "step/file")
    assert next(completed) == 4
    store.proxy.heal()
    assert Remote(url).read("step/file") == (tmp_path / "file").read_bytes()


def test_a_listing_that_lags_behind_hides_no_step(store: ObjectStore, url: str, tmp_path: Path) -> None:
    shown, hidden = f"global_step_1/{MODEL}<".encode(), f"global_step_1/{MODEL}<".encode().replace(b".pt<", b".px<")
    store.proxy.alter = lambda data: data.replace(shown, hidden)
    trained(tmp_path / "run", 1, remote=url).manager.close()
    assert set(remote_steps(Remote(url))[0].sizes) >= {MODEL.replace(".pt", ".px")}
    assert numbers(url) == [1]
    run = resumed(tmp_path / "new", remote=url)
    assert run.is_at(1)
    run.manager.close()
    assert disk_is_at(tmp_path / "new/global_step_1", 1)


@pytest.mark.parametrize("what", ["cut off", "altered"])
def test_what_is_cut_off_or_altered_on_its_way_is_asked_for_once_more(
    store: ObjectStore, url: str, tmp_path: Path, what: str
) -> None:
    trained(tmp_path / "run", 1, remote=url).manager.close()
    bodies, spoilt = count(1), [1]

    def spoil(data: bytes) -> bytes:
        # S3's own checksum, which it has not of every range, must not be what finds it.
        data = data.replace(b"x-amz-checksum", b"x-amz-chexksum")
        at = data.find(b"/data/0") + 8
        if at < 8 or next(bodies) > spoilt[0]:
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if what == "altered" else data[: len(data) // 2]

    store.proxy.alter = spoil
    assert resumed(tmp_path / "new", remote=url).is_at(1)
    spoilt[0] = 10**6
    error = DamagedError if what == "altered" else OutageError
    with pytest.raises(error, match=r"other bytes than were written|after 6 tries"), local_copy(url):
        pass


def test_an_object_that_is_replaced_while_it_is_read(store: ObjectStore, url: str) -> None:
    """Of a model without a manifest only the server knows that it is another one now."""
    remote = Remote(url)
    for name in ("config.json", "model.safetensors"):
        remote.put_bytes(b"old", name)

    def replace(line: str) -> None:
        if line.startswith("GET") and "model.safetensors" in line:
            store.client.put_object(Bucket=BUCKET, Key=f"{url.rpartition('/')[2]}/model.safetensors", Body=b"new")

    store.proxy.answer = replace
    with pytest.raises(CallError, match=r"model.safetensors was replaced while it was read: give"), local_copy(url):
        pass
    store.proxy.heal()
    with local_copy(url) as copy:
        assert (copy / "model.safetensors").read_bytes() == b"new"


def test_parts_of_uploads_that_a_kill_cut_off_are_swept_at_the_next_start(
    store: ObjectStore, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run", 1, remote=url).manager.close()
    prefix = url.rpartition("/")[2]
    for name in ("global_step_9/actor/x", "set_aside_1/global_step_2/x", "another_run/global_step_1/x"):
        store.client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{name}")
    resumed(tmp_path / "run", remote=url).manager.close()
    assert store.pending(url) == ["another_run/global_step_1/x"]
    no = refusal("403 Forbidden", "AccessDenied", "Access Denied")
    store.proxy.answer = lambda line: no if "?uploads" in line else None
    run = resumed(tmp_path / "run", remote=url)
    run.train(2)
    run.manager.close()
    assert numbers(url) == [1, 2]
    assert "let a lifecycle rule of the bucket abort incomplete multipart uploads" in caplog.text


# Copies for commands


def test_no_copy_is_begun_that_has_no_room_and_dead_ones_go(
    store: ObjectStore, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", 1, remote=url).manager.close()
    place = tmp_path / "scratch"
    (place / "milepost-copy-dead/model").mkdir(parents=True)
    (place / "milepost-copy-dead/lock").touch()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with local_copy(url):
        (first,) = place.iterdir()
        with local_copy(url):
            assert first.exists() and len(list(place.iterdir())) == 2
    assert list(place.iterdir()) == []
    total = sum(size for name, size in remote_steps(Remote(url))[0].sizes.items() if name.startswith("actor/model"))
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total // 2))
    assert milepost(["merge", url, str(tmp_path / "out")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"to be brought to {place}, which has" in line and line.endswith("let TMPDIR name a larger place")
    with pytest.raises(WriteError, match=r"step 1 was not fetched from .* are free: make room"):
        resumed(tmp_path / "new", remote=url)
    assert list(place.iterdir()) == []


def test_an_interrupt_leaves_nothing(store: ObjectStore, url: str, tmp_path: Path) -> None:
    remote, place = Remote(url), tmp_path / "scratch"
    place.mkdir()
    remote.put_bytes(b"{}", "config.json")
    remote.put_bytes(bytes(9 << 20), "model.safetensors")
    reading = Event()

    def stall(line: str) -> None:
        if line.startswith("GET") and "model.safetensors" in line:
            store.proxy.stalled.set()
            reading.set()

    store.proxy.answer = stall
    command = [sys.executable, "-m", "milepost", "merge", url, str(tmp_path / "out")]
    environment = {**os.environ, **store.environment, "TMPDIR": str(place)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert reading.wait(60)
        (copy,) = place.iterdir()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert f"bringing 9.4 MB of {url} to {place}" in said
    assert list(place.iterdir()) == [] and not copy.exists()
    assert not (tmp_path / "out").exists()
