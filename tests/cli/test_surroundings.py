"""A merge in surroundings that are not kind: closed streams, odd names and locales, no home, files not to be read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MERGE = f"{sys.executable} -m milepost merge"
AS_NOBODY = "setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -dac_override,-dac_read_search"
"""Root without its right to read everything."""


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=120, check=False, env={**os.environ, **environment}
    )


@pytest.fixture
def role(zoo: Path, tmp_path: Path) -> Path:
    """A copy of a two-rank actor under a name with spaces and letters that are not ASCII."""
    return Path(shutil.copytree(zoo / "tied" / "actor", tmp_path / "ein Rück halt"))


def test_closed_streams(role: Path, tmp_path: Path) -> None:
    done = shell(f"{MERGE} '{role}' {tmp_path}/a >&- 2>&- <&-; echo $?")
    assert (done.stdout, done.stderr) == (b"0\n", b"")
    done = shell(f"{MERGE} '{role}' {tmp_path}/b --json 2>&-")
    assert done.returncode == 0 and json.loads(done.stdout)["target"] == f"{tmp_path}/b"
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_files_of_ours(closed: str, tmp_path: Path) -> None:
    """C code and child processes print to 1 and 2 whatever Python calls stdout."""
    program = (
        "import os, sys\n"
        "from milepost.cli.app import _mend_streams\n"
        "_mend_streams()\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "os.write(1, b'from C')\n"
        "os.write(2, b'from C')\n"
        "print(chr(246), sys.stdin.isatty())\n"
        "child = os.system('echo from a child && echo from a child >&2')\n"
        "os.write(file, f'{file > 2} {child}'.encode())\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    done = shell(f'{sys.executable} -c "$PROGRAM" {tmp_path}/f {closed}', PROGRAM=program, **ascii_only)
    assert (done.returncode, (tmp_path / "f").read_text()) == (0, "True 0")


def test_a_name_that_is_no_text_is_printed_as_it_came(role: Path, tmp_path: Path) -> None:
    place = os.fsencode(tmp_path / "m") + b"\xff o"
    command = [os.fsencode(part) for part in (sys.executable, "-m", "milepost", "merge", "-q", role)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([*command, place], capture_output=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, place + b"\n", b"")
    assert (Path(os.fsdecode(place)) / "config.json").exists()


def test_a_locale_that_is_not_utf_8(role: Path, tmp_path: Path) -> None:
    config = role / "huggingface" / "config.json"
    content = {**json.loads(config.read_bytes()), "id2label": {"0": "größer"}}
    config.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(f"{MERGE} -q '{role}' {tmp_path}/out --dtype bf16", **ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["id2label"] == {"0": "größer"} and "bfloat16" in written.values()


def test_a_user_without_a_home(role: Path, tmp_path: Path) -> None:
    nobody = "unshare --user --map-user=12345 --map-group=12345 env -u HOME -u XDG_CACHE_HOME"
    if shell(f"{nobody} true").returncode:
        pytest.skip("needs the right to make a user namespace")
    done = shell(f"{nobody} {MERGE} -q '{role}' {tmp_path}/out")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "closed", ["model_world_size_2_rank_1.pt", "huggingface/config.json", "huggingface/tokenizer.json", "huggingface"]
)
def test_what_may_not_be_read_is_named(role: Path, tmp_path: Path, closed: str) -> None:
    if shell(f"{AS_NOBODY} true").returncode:
        pytest.skip("needs to give up the rights of root")
    (role / closed).touch()
    (role / closed).chmod(0)
    done = shell(f"{AS_NOBODY} {MERGE} -q '{role}' {tmp_path}/out")
    (role / closed).chmod(0o700)
    said = done.stderr.decode()
    assert done.returncode in (1, 2) and said.count("\n") == 1
    assert f"{role / closed}" in said and "cannot be read: permission denied" in said.lower()
    assert [path.name for path in tmp_path.iterdir()] == [role.name]


def test_a_place_that_may_not_be_written(role: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(0o555)
    done = shell(f"{AS_NOBODY} {MERGE} -q '{role}' {tmp_path}/closed/out")
    assert done.returncode == 2 and b"closed/out: cannot be written: no permission to write there" in done.stderr


def test_an_older_export_that_cannot_be_deleted_is_told_of(role: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "closed").mkdir(parents=True)
    for name in ("config.json", "closed/file"):
        (tmp_path / "out" / name).write_text("old")
    (tmp_path / "out" / "closed").chmod(0o555)
    done = shell(f"{AS_NOBODY} {MERGE} -q '{role}' {tmp_path}/out --overwrite")
    assert (done.returncode, done.stdout.decode()) == (0, f"{tmp_path}/out\n")
    assert (tmp_path / "out" / "model.safetensors").exists()
    (left,) = tmp_path.glob(".out.*.tmp")
    assert [path.name for path in left.rglob("*")] == ["closed", "file"]
    said = f"{left}: could not be removed: Permission denied; remove it by hand\n"
    assert done.stderr.decode() == said


def test_a_terminal_that_is_closed_leaves_no_debris(zoo: Path, tmp_path: Path) -> None:
    command = [*MERGE.split(), str(zoo / "custom" / "big"), str(tmp_path / "out"), "--workers", "1", "--dtype", "fp16"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*.tmp/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_merge_left_goes_with_the_next_one(zoo: Path, tmp_path: Path) -> None:
    command = [*MERGE.split(), "-q", str(zoo / "custom" / "big"), str(tmp_path / "out"), "--dtype", "fp16"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob(".out.*.tmp/*.safetensors")) and process.poll() is None:
            time.sleep(0.001)
        process.kill()
    assert list(tmp_path.glob(".out.*.tmp"))
    (tmp_path / ".out.note.tmp").mkdir()  # somebody else's
    assert subprocess.run(command, timeout=120, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.note.tmp", "out"]
