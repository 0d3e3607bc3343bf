"""merge --hf_upload_path: against a stand-in for the Hub on this machine; no test here needs the network."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub import TOKEN, Hub, running_hub

from milepost.checkpoint.verify import verify
from milepost.errors import CallError
from milepost.jobs.upload import check_repository_name


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def merge(
    zoo: Path, out: Path, url: str, *arguments: str, token: str | None = TOKEN, xet: bool = False
) -> subprocess.CompletedProcess[str]:
    """A process of its own: huggingface_hub reads its environment once."""
    call = [sys.executable, "-m", "milepost", "merge", str(zoo / "untied" / "actor"), str(out), *arguments]
    return process(call, out, url, token=token, xet=xet)


def process(
    call: list[str], out: Path, url: str, *, token: str | None = TOKEN, xet: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program that talks to the stand-in; large files go by LFS unless `xet`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(out.parent / "hf_home"), "HF_HUB_DISABLE_XET": str(int(not xet))}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1"} | ({"HF_TOKEN": token} if token else {})
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120, check=False)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_repository_is_made_and_holds_the_export_and_no_older_weights(zoo: Path, tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "out"
    done = merge(zoo, out, hub.url, "--hf_upload_path", "me/model", "--private", "--max_shard_size", "10kB")
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {hub.url}/me/model" in done.stderr and done.stdout == f"{out}\n"
    assert hub.private == {"me/model": True}
    assert hub.files["me/model"] == contents(out)
    assert len([name for name in hub.files["me/model"] if name.endswith(".safetensors")]) > 1
    assert any(request.startswith("PUT blobs/") for request in hub.requests)

    hub.files["me/model"]["README.md"] = b"written by hand"
    done = merge(zoo, out, hub.url, "--hf-upload-path", "me/model", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert hub.files["me/model"] == contents(out) | {"README.md": b"written by hand"}


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("repository", "token", "says"),
    [
        ("me/model", "hf_bad", "does not accept the token"),
        ("me/model", None, "does not accept the token, or there is none; log in with `hf auth login`"),
        ("theirs/model", TOKEN, "the token may not write there (You don't have the rights"),
        ("me/public", TOKEN, "it exists and is public"),
    ],
)
def test_what_the_hub_refuses(
    zoo: Path, tmp_path: Path, hub: Hub, repository: str, token: str | None, says: str
) -> None:
    hub.files["me/public"], hub.private["me/public"] = {}, False
    done = merge(zoo, tmp_path / "out", hub.url, "-q", "--hf_upload_path", repository, "--private", token=token)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"milepost: not uploaded to {repository}: ")
    assert says in done.stderr and done.stderr.endswith(f"The export stands in {tmp_path / 'out'}\n")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not any(hub.files.values())


@pytest.mark.parametrize("status", [400, 403, 404])
def test_a_commit_that_fails(zoo: Path, tmp_path: Path, hub: Hub, status: int) -> None:
    hub.refuse_commits = status
    done = merge(zoo, tmp_path / "out", hub.url, "-q", "--hf_upload_path", "me/model")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"The export stands in {tmp_path / 'out'}\n")
    assert hub.files == {"me/model": {}} and hub.private == {"me/model": False}


def test_no_network(zoo: Path, tmp_path: Path) -> None:
    done = merge(zoo, tmp_path / "out", closed_port(), "-q", "--hf_upload_path", "me/model")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the Hub cannot be reached" in done.stderr and f"The export stands in {tmp_path / 'out'}" in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["a/b/c", "me/mo del", "-me/model", "me/mo--del", "x" * 97, ""])
def test_a_name_that_no_repository_can_have(name: str) -> None:
    with pytest.raises(CallError, match="no name of a repository"):
        check_repository_name(name)


def test_a_bad_name_is_refused_before_the_work(zoo: Path, tmp_path: Path) -> None:
    done = merge(zoo, tmp_path / "out", closed_port(), "--hf_upload_path", "a/b/c")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "a/b/c" in done.stderr
    assert not (tmp_path / "out").exists()
    done = merge(zoo, tmp_path / "out", closed_port(), "--private")
    assert done.returncode == 2 and "--hf_upload_path" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("hf_xet") is None, reason="needs hf-xet")
def test_large_files_go_by_xet_where_it_is_installed(zoo: Path, tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "out"
    done = merge(zoo, out, hub.url, "--hf_upload_path", "me/model", xet=True)
    assert done.returncode == 0, done.stderr
    here = contents(out)
    weights = here.pop("model.safetensors")
    assert hub.files["me/model"].pop("model.safetensors") == b"xet:" + hashlib.sha256(weights).hexdigest().encode()
    assert hub.files["me/model"] == here
    assert hub.shards == 1 and not hub.blobs and hub.xorb_bytes > len(weights) / 2


@pytest.mark.skipif(find_spec("hf_xet") is None, reason="needs hf-xet")
@pytest.mark.parametrize(("status", "says"), [(401, "does not accept the token"), (403, "may not write there (xet: ")])
def test_what_the_storage_of_xet_refuses(zoo: Path, tmp_path: Path, hub: Hub, status: int, says: str) -> None:
    hub.fail["v1/xorb"] = [status] * 20
    done = merge(zoo, tmp_path / "out", hub.url, "-q", "--hf_upload_path", "me/model", xet=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr
    assert done.stderr.endswith(f"The export stands in {tmp_path / 'out'}\n") and hub.files == {"me/model": {}}


def test_a_fault_that_passes_is_waited_for(zoo: Path, tmp_path: Path, hub: Hub) -> None:
    hub.fail["blobs/"] = [503, 0]  # the second time the connection is cut
    done = merge(zoo, tmp_path / "out", hub.url, "--hf_upload_path", "me/model")
    assert done.returncode == 0, done.stderr
    assert hub.fail["blobs/"] == [] and hub.files["me/model"] == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("request_path", "status", "says"),
    [
        ("api/repos/create", 500, "the Hub has a fault of its own (500: "),
        ("api/repos/create", 429, "takes no more requests for now"),
        ("api/models/me/model/preupload", 403, "the token may not write there (the stand-in fails)"),  # not yours
        ("me/model.git/info/lfs", 403, "the token may not write there"),
        ("blobs/", 403, "the token may not write there"),
        ("api/models/me/model/commit", 0, "the Hub cannot be reached"),
    ],
)
def test_an_upload_that_breaks_off_leaves_the_export_whole(
    zoo: Path, tmp_path: Path, hub: Hub, request_path: str, status: int, says: str
) -> None:
    hub.fail[request_path] = [status] * 20
    out = tmp_path / "out"
    done = merge(zoo, out, hub.url, "-q", "--checksum", "--hf_upload_path", "me/model")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr and done.stderr.endswith(f"The export stands in {out}\n")
    assert verify(out, deep=True).ok and not any(hub.files.values())


def test_python_uploads_as_the_command_line_does(zoo: Path, tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "out"
    program = (
        "import sys, milepost\n"
        "report = milepost.merge(sys.argv[1], sys.argv[2], hf_upload_path='me/model', private=True)\n"
        "print(report.uploaded_to)"
    )
    done = process([sys.executable, "-c", program, str(zoo / "untied" / "actor"), str(out)], out, hub.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.url}/me/model\n" and done.stderr == ""
    assert hub.files["me/model"] == contents(out) and hub.private["me/model"]


def test_without_the_package_one_line_says_what_to_install(zoo: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['huggingface_hub'] = None\n"
        "from milepost.cli.app import run\n"
        "sys.exit(run(['merge', *sys.argv[1:], '--hf_upload_path', 'me/model']))"
    )
    call = [sys.executable, "-c", program, str(zoo / "untied" / "actor"), str(tmp_path / "out")]
    done = process(call, tmp_path / "out", closed_port())
    assert done.returncode == 2
    assert done.stderr == "milepost: --hf_upload_path needs huggingface_hub: pip install 'milepost[hub]'\n"
    assert not (tmp_path / "out").exists()
