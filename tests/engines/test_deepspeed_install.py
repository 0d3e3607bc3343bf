"""A DeepSpeed that is missing, too old or cannot compile is told before anything starts; a CPU compiles nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.engines.deepspeed.install import check_installed
from milepost.errors import CallError
from milepost.trainer.config import load_config
from milepost.trainer.launch import check

DEEPSPEED = "actor_rollout_ref.actor.strategy=deepspeed"


def version(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    def found(name: str) -> str:
        assert name == "deepspeed"
        if number is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return number

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_a_missing_deepspeed_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, None)
    with pytest.raises(CallError, match=r"^strategy deepspeed needs DeepSpeed: pip install 'milepost\[deepspeed\]'$"):
        check(load_config(None, [DEEPSPEED]))
    check(load_config(None))


@pytest.mark.parametrize("number", ["0.16.4", "0.18.9+cu126"])
def test_one_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    version(monkeypatch, number)
    with pytest.raises(CallError, match=f"DeepSpeed {number.replace('+', '.')} is too old"):
        check_installed()


@pytest.mark.parametrize("number", ["0.19.8", "0.20.0+unknown", "1.0"])
def test_newer_ones_are_taken(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    version(monkeypatch, number)
    check_installed()


def test_a_compiler_is_asked_for_only_where_something_will_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version(monkeypatch, "0.19.8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check(load_config(None, [DEEPSPEED]))
    offload = [DEEPSPEED, "critic.deepspeed_config.offload_optimizer=true"]
    with pytest.raises(
        CallError, match=r"compile its CPU Adam .* c\+\+ is not here: install a C\+\+ compiler and ninja"
    ):
        check(load_config(None, offload))
    for tool in ("c++", "ninja"):
        (tmp_path / tool).touch(0o755)
    check(load_config(None, offload))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CallError, match="no-such-compiler is not here"):
        check(load_config(None, offload))


def test_the_check_needs_neither_torch_nor_deepspeed() -> None:
    code = "import sys, milepost.engines.deepspeed.install; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_on_a_cpu_deepspeed_starts_without_a_compiler_and_without_a_word(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "from milepost.engines.deepspeed.setup import start\n"
        "start(torch.device('cpu')); start(torch.device('cpu'))\n"
        "import deepspeed, os\n"
        "assert deepspeed.get_accelerator().device_name() == 'cpu' and deepspeed.comm.is_initialized()\n"
        "os._exit(0)\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "LOCAL_RANK", "RANK")}
    env |= {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    assert shutil.which("c++", path=str(tmp_path)) is None
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, timeout=120, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not list((tmp_path / "compiled").rglob("*"))
