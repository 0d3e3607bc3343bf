"""scripts/model_merger.py: every option that verl's script of that name has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "model_merger.py"


def script(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_verls_options(zoo: Path, tmp_path: Path) -> None:
    """All that `python -m verl.model_merger merge --help` and `test --help` of verl 0.9.1 list; the upload has tests of
    its own, where the repository's name is good."""
    role = zoo / "tied" / "actor"
    common = ["--backend", "fsdp", "--local_dir", role, "--tie-word-embedding", "--trust-remote-code"]
    common += ["--use_cpu_initialization"]
    done = script(tmp_path, "merge", *common, "--target_dir", "out")
    assert done.returncode == 0, done.stderr
    for option in ("--trust_remote_code", "--use_cpu_initialization"):
        assert done.stderr.count(f"{option} has no meaning here") == 1
    assert script(tmp_path, "test", *common, "--test_hf_dir", zoo / "tied" / "reference").returncode == 0
    done = script(tmp_path, "merge", *common, "--target_dir", "up", "--hf_upload_path", "a/b/c", "--private")
    assert done.returncode == 2 and "a/b/c: no name of a repository" in done.stderr
    critic = ["--backend", "fsdp", "--local_dir", zoo / "critic" / "actor", "--is-value-model"]
    assert script(tmp_path, "merge", *critic).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tmp"]  # verl's own default is tmp
    assert script(tmp_path, "test", *critic, "--test_hf_dir", "tmp").returncode == 0


def test_the_option_that_is_deprecated_works_and_says_so(zoo: Path, tmp_path: Path) -> None:
    bare = tmp_path / "actor"
    bare.mkdir()
    for shard in (zoo / "untied" / "actor").glob("*.pt"):
        (bare / shard.name).hardlink_to(shard)
    given = ["--hf_model_path", zoo / "untied" / "reference"]
    done = script(tmp_path, "merge", "--backend", "fsdp", "--local_dir", bare, "--target_dir", "out", *given)
    assert done.returncode == 0 and done.stderr.count("--hf_model_path is deprecated") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
    done = script(tmp_path, "test", "--local_dir", bare, "--test_hf_dir", "out")
    assert done.returncode == 0 and "deprecated" not in done.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("merge --local_dir a", "merge --local_dir a --target_dir tmp"),
        ("merge --local-dir=a", "merge --local-dir=a --target_dir tmp"),
        ("merge --local_dir a --target_dir b", "merge --local_dir a --target_dir b"),
        ("merge --local_dir a --target-dir=b", "merge --local_dir a --target-dir=b"),
        ("merge --local_dir a --dry-run", "merge --local_dir a --dry-run"),
        ("merge a b", "merge a b"),
        ("test --local_dir a --test_hf_dir b", "test --local_dir a --test_hf_dir b"),
        ("", ""),
    ],
)
def test_where_verls_merge_writes(given: str, meant: str) -> None:
    spec = importlib.util.spec_from_file_location("model_merger", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.as_verl_means(given.split()) == meant.split()
