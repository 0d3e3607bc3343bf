"""The command line: exit statuses, one-line errors that say what to do, and what each command prints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import milepost
from milepost.cli.app import run


def call(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of one command line."""
    status = run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return status, out, err


@pytest.fixture
def role(zoo: Path, tmp_path: Path) -> Path:
    """A copy of a two-rank actor, to be damaged."""
    shutil.copytree(zoo / "untied" / "actor", tmp_path / "actor")
    return tmp_path / "actor"


def test_merge_test_inspect_verify(zoo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    role, out = zoo / "untied" / "actor", tmp_path / "out"
    status, stdout, stderr = call(capfd, "merge", role, out)
    assert (status, stdout) == (0, f"{out}\n")
    assert "found fsdp checkpoint" in stderr and "wrote 21 tensors (21 float32)" in stderr
    assert call(capfd, "test", role, out)[:2] == (0, "equal: 21 tensors, 20 kB\n")
    status, stdout, _ = call(capfd, "inspect", role, "--json")
    facts = json.loads(stdout)
    # by hand: 2 embeddings 33x16; 2 layers of q,o 16x16, k,v 8x16, 3 mlp 24x16, 2 norms 16; the last norm
    parameters = 2 * 33 * 16 + 2 * (2 * 256 + 2 * 128 + 3 * 384 + 2 * 16) + 16
    assert (facts["parameters"], facts["bytes"], facts["world_size"]) == (parameters, 4 * parameters, 2)
    status, stdout, _ = call(capfd, "inspect", role, "--name", "*.0.*q_proj*")
    assert "model.layers.0.self_attn.q_proj.weight  float32 [16, 16] in 2 parts" in stdout
    assert call(capfd, "verify", role, "--deep")[0] == 0


def test_options_take_dashes_and_underscores_and_verls_habits(
    zoo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    role, out = zoo / "untied" / "actor", tmp_path / "out"
    script = Path(__file__).parent.parent / "scripts" / "model_merger.py"
    arguments = ["merge", "--backend", "fsdp", "--local_dir", role, "--target_dir", out, "--trust-remote-code"]
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "--trust_remote_code has no meaning here" in done.stderr
    assert call(capfd, "test", "--local-dir", role, "--test-hf-dir", out, "--tie_word_embedding")[0] == 1
    assert call(capfd, "test", "--local-dir", role, "--test-hf-dir", out)[0] == 0


def test_a_difference_is_exit_status_1_and_named(zoo: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, stdout, _ = call(capfd, "test", zoo / "untied" / "actor", zoo / "tied" / "reference")
    assert status == 1
    assert "extra   lm_head.weight" in stdout and "missing model.layers.0.self_attn.q_proj.bias" in stdout
    status, stdout, _ = call(capfd, "test", zoo / "untied" / "actor", zoo / "tied" / "reference", "--json")
    assert status == 1 and json.loads(stdout)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["merge", "{nowhere}", "{out}"], 2, "no such directory"),
        (["merge", "{empty}", "{out}"], 2, "holds no checkpoint"),
        (["merge", "{role}/fsdp.txt", "{out}"], 2, "is a file"),
        (["merge", "{role}", "{out}", "--backend", "horovod"], 2, "choose from auto, fsdp, deepspeed"),
        (["merge", "{role}", "{out}", "--dtype", "int4"], 2, "choose from keep, bf16, fp16, fp32"),
        (["merge", "{role}", "{out}", "--memory_limit", "much"], 2, "is no size"),
        (["merge", "{role}"], 2, "OUT or --target_dir"),
        (["merge", "{role}", "/proc/nowhere/out"], 2, "cannot be written"),
        (["merge", "{role}", "{role}/fsdp.txt"], 2, "is a file"),
        (["merge", "{role}", "{out}", "--no-such"], 2, "No such option"),
        (["test", "{role}", "{empty}"], 2, "holds no checkpoint of backend huggingface"),
        (["status", "{nowhere}"], 2, "{nowhere}"),
        (["verify", "{nowhere}"], 2, "no such directory"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_bad_calls(
    role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (role / "fsdp.txt").write_text("a file")
    places = {name: str(tmp_path / name) for name in ("nowhere", "empty", "out")} | {"role": str(role)}
    found, stdout, stderr = call(capfd, *(argument.format(**places) for argument in arguments))
    assert found == status
    assert says.format(**places) in stderr and stdout == ""
    assert "Traceback" not in stderr and not (tmp_path / "out").exists()


def test_e45_missing_ranks_are_listed_with_the_likely_cause(
    role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (role / "model_world_size_2_rank_0.pt").unlink()
    status, _, stderr = call(capfd, "merge", role, tmp_path / "out")
    assert status == 1
    assert "model files of rank 0 of 2 are missing" in stderr and "another node's local disk" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated_files_are_named(role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], keep: float) -> None:
    shard = role / "model_world_size_2_rank_1.pt"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(int(keep * size) if keep < 1 else int(keep))
    for arguments in (["merge", role, tmp_path / "out"], ["inspect", role]):
        status, _, stderr = call(capfd, *arguments)
        assert status == 1 and shard.name in stderr and "truncated" in stderr
    status, stdout, _ = call(capfd, "verify", role)
    assert status == 1 and shard.name in stdout
    assert not (tmp_path / "out").exists()


def test_a_flipped_byte_is_found_by_deep_and_by_check(
    role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = milepost.open(role).index["model.norm.weight"].chunks[0].source
    with Path(place.file).open("r+b") as file:
        file.seek(place.start() + 1)
        file.write(b"\xff")
    assert call(capfd, "verify", role)[0] == 0
    status, stdout, _ = call(capfd, "verify", role, "--deep")
    assert status == 1 and "model_world_size_2_rank_0.pt" in stdout and "CRC-32 differs" in stdout
    status, _, stderr = call(capfd, "merge", role, tmp_path / "out", "--check")
    assert status == 1 and "CRC-32 differs" in stderr and not (tmp_path / "out").exists()


def test_i84_a_hostile_pickle_is_refused_by_name_and_not_run(
    role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/owned",)

    torch.save({"model.norm.weight": Evil()}, role / "model_world_size_2_rank_1.pt", pickle_module=pickle)
    for command in ("merge", "inspect", "verify"):
        extra = [tmp_path / "out"] if command == "merge" else []
        status, stdout, stderr = call(capfd, command, role, *extra)
        assert status == 1 and "posix.system" in stdout + stderr
    assert not (tmp_path / "owned").exists() and not (tmp_path / "out").exists()


def test_a_full_disk(zoo: Path, tmp_path: Path) -> None:
    """A real file system of 8 KiB, in a mount namespace of its own."""
    merge = f"{sys.executable} -m milepost merge {zoo}/untied/actor {tmp_path}/out"
    program = f"mount -t tmpfs -o size=8k none {tmp_path} && {merge}; echo $?; ls -A {tmp_path}"
    call = ["unshare", "-m", "sh", "-c", program]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    if "not permitted" in done.stderr or done.returncode:
        pytest.skip("needs the right to mount a file system")
    assert done.stdout.split() == ["2"]
    assert "the model needs 20 kB" in done.stderr and "make room" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_merge_leaves_no_debris(zoo: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    call = [
        sys.executable,
        "-m",
        "milepost",
        "merge",
        str(zoo / "custom" / "big"),
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    with subprocess.Popen([*call, "--dtype", "fp16", "--memory_limit", "1MiB"], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*.tmp/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait(60) == status
    assert list(tmp_path.iterdir()) == []


def test_internal_errors_are_one_line_and_debug_shows_where(
    zoo: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milepost.cli import inspecting

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the fault of a test")

    monkeypatch.setattr(inspecting, "locate", broken)
    status, _, stderr = call(capfd, "inspect", zoo / "tied" / "actor")
    assert status == 3 and stderr.count("\n") == 1 and "ZeroDivisionError" in stderr
    monkeypatch.setenv("MILEPOST_DEBUG", "1")
    assert "Traceback" in call(capfd, "inspect", zoo / "tied" / "actor")[2]


def test_the_reading_commands_do_not_import_torch(zoo: Path, tmp_path: Path) -> None:
    role = zoo / "tied" / "actor"
    commands = [
        ["merge", role, tmp_path / "out"],
        ["test", role, tmp_path / "out"],
        ["inspect", role],
        ["verify", role, "--deep"],
    ]
    program = (
        "import sys; from milepost.cli.app import run\n"
        f"assert all(run(c) == 0 for c in {[[str(a) for a in c] for c in commands]!r})\n"
        "assert not {'torch', 'transformers', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_head_may_stop_reading(role: Path) -> None:
    listing = f"{sys.executable} -m milepost inspect '{role}' --name '*' --json"
    filled = " ".join(["--name '*'"] * 50)
    command = f"set -o pipefail; {{ {listing} {filled}; echo status $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == "status 0\n"


def test_a_full_pipe_end_is_one_line(role: Path) -> None:
    command = f"{sys.executable} -m milepost inspect '{role}' > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "the disk is full" in done.stderr


def test_the_model_that_a_merge_takes_its_config_from_is_not_overwritten(
    role: Path, zoo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    companions = role / "huggingface"
    before = {path.name: path.read_bytes() for path in companions.iterdir()}
    status, _, stderr = call(capfd, "merge", role, companions, "--overwrite")
    assert status == 2 and "holds the checkpoint that is being merged" in stderr
    assert {path.name: path.read_bytes() for path in companions.iterdir()} == before
    shutil.copytree(zoo / "untied" / "reference", tmp_path / "base")
    status, _, stderr = call(
        capfd, "merge", role, tmp_path / "base", "--hf_model_path", tmp_path / "base", "--overwrite"
    )
    assert status == 2 and "choose another" in stderr


def test_a_role_can_be_named_from_inside(
    role: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "global_step_7"
    step.mkdir()
    role.rename(step / "actor")
    monkeypatch.chdir(step / "actor")
    status, stdout, _ = call(capfd, "inspect", ".")
    assert status == 0 and stdout.startswith("actor ") and ", step 7" in stdout
    assert call(capfd, "merge", ".", tmp_path / "out")[0] == 0
    monkeypatch.chdir(step)
    assert f"step {step}: foreign" in call(capfd, "inspect", ".")[1]


def test_verify_says_that_a_file_is_a_file(role: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = role / "model_world_size_2_rank_0.pt"
    assert call(capfd, "verify", file)[::2] == (
        2,
        f"milepost: {file}: is a file; give the directory of a run, a step, a role or a model\n",
    )


def test_moments_are_listed_as_tensors(fsdp_checkpoints: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, stdout, _ = call(capfd, "inspect", fsdp_checkpoints / "w2", "--name", "optim/*up.weight/*", "--json")
    listed = json.loads(stdout)["listed"]
    # two layers, and exp_avg, exp_avg_sq and step of each
    assert status == 0 and len(listed) == 6
    assert {entry["kind"] for entry in listed.values()} == {"moment"}
    first = listed["optim/layers.0.up.weight/exp_avg"]
    assert (first["dtype"], first["shape"], first["parts"]) == ("float32", [30, 16], 2)
    _, stdout, _ = call(capfd, "inspect", fsdp_checkpoints / "w2", "--name", "optim/*up.weight/exp_avg")
    assert "moment  optim/layers.1.up.weight/exp_avg  float32 [30, 16] in 2 parts" in stdout
