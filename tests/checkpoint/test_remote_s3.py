"""Steps in an S3 server that is a process of its own, over a network that is cut and stalls."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from object_store import ObjectStore
from tiny_engine import TinyEngine, disk_is_at, names, resumed, trained

from milepost.checkpoint.diary.events import EVENTS, read_events
from milepost.checkpoint.remote.copies import local_copy
from milepost.checkpoint.remote.folder import Remote
from milepost.checkpoint.remote.steps import remote_steps
from milepost.checkpoint.steps import TRACKER
from milepost.cli.app import run as milepost
from milepost.errors import CallError, NotFoundError, UploadError

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.filterwarnings("ignore")


def numbers(url: str) -> list[int]:
    return [step.step for step in remote_steps(Remote(url)) if step.whole]


def test_a_run_is_uploaded_kept_pruned_and_resumed_elsewhere(store: ObjectStore, url: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "here", 1, remote=url, keep_last=2)
    for step in (2, 3):
        run.train(step)
        assert run.manager._mirror is not None
        while step not in run.manager._mirror._there:
            threading.Event().wait(0.01)
    run.manager.close()
    assert numbers(url) == [2, 3]
    assert Remote(url).read(TRACKER) == b"3"
    again = resumed(tmp_path / "elsewhere", remote=url, keep_last=2)
    assert again.is_at(3)
    again.train(4)
    again.manager.close()
    assert numbers(url) == [3, 4]
    third = resumed(tmp_path / "third", "disable", remote=url)
    third.train(1)  # another history: 3 and 4 go out of its way before it is uploaded
    third.manager.close()
    assert numbers(url) == [1]
    kept = [name for name in Remote(url).folders() if name.startswith("set_aside_")]
    assert len(kept) == 1 and Remote(f"{url}/{kept[0]}").folders() == ["global_step_3", "global_step_4"]


@pytest.mark.parametrize("after", [3 << 20, 11 << 20])
def test_a_cut_in_the_middle_of_an_upload_leaves_no_object_and_is_tried_again(
    store: ObjectStore, url: str, tmp_path: Path, after: int
) -> None:
    """12 MB in parts of 5 MB; every connection breaks once so many bytes have gone up."""
    data = bytes(range(256)) * (12 << 12)
    (tmp_path / "file").write_bytes(data)
    store.proxy.cut_after = after
    with pytest.raises(CallError, match="after 2 tries"):
        Remote(url, attempts=2).put(tmp_path / "file", "step/file")
    assert store.proxy.cuts
    store.proxy.cut_after = None
    assert Remote(url).sizes("step") == {}
    store.proxy.cut_after = after

    def mend() -> None:
        store.proxy.cut_after = None

    timer = threading.Timer(0.3, mend)
    timer.start()
    Remote(url, attempts=50, wait=0.05).put(tmp_path / "file", "step/file")
    timer.join()
    assert Remote(url).read("step/file") == data
    assert store.pending(url)  # what the cut ones had sent
    remote = Remote(url)
    remote.give_up(remote.cut_off("step"))
    assert store.pending(url) == []
    assert Remote(url).read("step/file", 5 << 20, (5 << 20) + 3) == data[5 << 20 : (5 << 20) + 3]


def test_a_cut_run_counts_no_step_and_goes_on(store: ObjectStore, url: str, tmp_path: Path) -> None:
    store.proxy.cut_after = 9_000
    run = trained(tmp_path, 1, remote=url)
    while not [event for event in read_events(tmp_path / EVENTS) if event["event"] == "upload_failed"]:
        threading.Event().wait(0.05)
    store.proxy.cut_after = None
    assert numbers(url) == []
    with pytest.raises(UploadError, match=r"step 1 is durable|cannot be listed"):
        run.train(2)
    assert disk_is_at(tmp_path / "global_step_2", 2)
    run.manager.close()
    assert numbers(url) == [1, 2]
    assert store.pending(url) == []


def test_a_run_killed_in_the_middle_of_an_upload(store: ObjectStore, url: str, tmp_path: Path) -> None:
    """kill -9 while half of a large file has gone up: no step there, and the next start brings it there."""
    program = (
        "import sys; from pathlib import Path; from tiny_engine import TinyEngine, Run\n"
        "from milepost.checkpoint.remote import folder; assert folder.PART; folder.PART = 5 << 20\n"
        "actor = TinyEngine('actor', shapes={'big': (3 << 20,)})\n"
        "run = Run(Path(sys.argv[1]), roles={'actor': actor}, remote=sys.argv[2])\n"
        "run.manager.resume(); run.manager.save(1); print('saved', flush=True); run.manager.close()"
    )
    store.proxy.stall_after = 8 << 20
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), url],
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], env={**os.environ, **store.environment},
    ) as process:  # fmt: skip
        assert store.proxy.stalled.wait(60)
        process.kill()
        assert process.stdout is not None and process.stdout.read() == b"saved\n"
    store.proxy.stalled.clear()
    assert numbers(url) == []
    assert store.pending(url)
    actor = TinyEngine("actor", shapes={"big": (3 << 20,)})
    run = resumed(tmp_path, roles={"actor": actor}, parts={}, remote=url)
    run.manager.close()
    assert numbers(url) == [1]
    assert store.pending(url) == []


def test_a_stalled_network_ends_in_an_error_and_not_in_silence(store: ObjectStore, url: str, tmp_path: Path) -> None:
    remote = Remote(url, attempts=2, timeout=0.5)
    remote.put_bytes(b"before", "file")
    store.proxy.stalled.set()
    with pytest.raises(CallError, match="after 2 tries"):
        remote.read("file")
    store.proxy.stalled.clear()
    assert Remote(url).read("file") == b"before"


def test_no_such_bucket_is_one_sentence(store: ObjectStore, tmp_path: Path) -> None:
    for start in (trained, resumed):
        with pytest.raises(NotFoundError, match=r"there is no such bucket \(make it"):
            start(tmp_path, remote="s3://no-such-bucket/run")


def test_the_reading_commands_take_a_url(
    store: ObjectStore, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", 1, 2, remote=url).manager.close()
    capfd.readouterr()
    assert milepost(["inspect", url]) == 0
    assert "2  committed" in capfd.readouterr().out
    assert milepost(["inspect", f"{url}/global_step_2/critic", "--name", "head.*"]) == 0
    seen = capfd.readouterr()
    assert "head.weight" in seen.out and "layer" not in seen.out and "bringing" in seen.err
    assert milepost(["verify", f"{url}/global_step_2", "--deep"]) == 0
    assert milepost(["diff", f"{url}/global_step_2/critic", str(tmp_path / "run/global_step_2/critic"), "-q"]) == 0
    assert "no difference: 3 tensors" in capfd.readouterr().out
    with local_copy(url) as copy:
        assert sorted(path.name for path in (copy / "actor").iterdir()) == [
            "fsdp_config.json", "model_world_size_1_rank_0.pt",
        ]  # fmt: skip
    assert not copy.exists()
    remote = Remote(f"{url}/global_step_2")
    name = "critic/model_world_size_1_rank_0.pt"
    data = bytearray(remote.read(name))
    data[-100] ^= 1
    remote.put_bytes(bytes(data), name)
    assert milepost(["verify", f"{url}/global_step_2"]) == 0
    assert milepost(["verify", f"{url}/global_step_2", "--deep"]) == 1
    assert "checksum differs" in capfd.readouterr().out
    assert milepost(["diff", f"{url}/global_step_2/critic", f"{url}/global_step_1/critic", "-q"]) == 1
    assert "other bytes than were written" in capfd.readouterr().err
    assert milepost(["prune", url, "--keep_last", "1", "--yes", "-q"]) == 0
    assert numbers(url) == [2]
    assert names(tmp_path / "run") == {"global_step_1", "global_step_2", TRACKER}
