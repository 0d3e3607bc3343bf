"""diff: expected norms by arithmetic, over one layout and over two."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import trained

from milepost.cli.app import run
from milepost.errors import NotFoundError
from milepost.jobs.diff import Diff, bytes_to_compare, diff
from milepost.layouts import open_directory


def model(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


def between(a: Path, b: Path, **options: Any) -> Diff:
    return diff(open_directory(a, "huggingface"), open_directory(b, "huggingface"), **options)


def test_each_kind_of_change_with_its_norms(tmp_path: Path) -> None:
    a = model(
        tmp_path / "a",
        kept=torch.ones(3), changed=torch.tensor([3.0, 4.0, 0.0]), gone=torch.ones(2), reshaped=torch.ones(2, 3),
        cast=torch.tensor([1.0, 2.0]), half=torch.tensor([1.0, 2.0]).bfloat16(), whole=torch.tensor([1, 2]),
    )  # fmt: skip
    b = model(
        tmp_path / "b",
        kept=torch.ones(3), changed=torch.tensor([3.0, 4.0, -2.0]), new=torch.ones(4), reshaped=torch.ones(3, 2),
        cast=torch.tensor([1.0, 2.5]).bfloat16(), half=torch.tensor([1.0, 3.0]).bfloat16(), whole=torch.tensor([1, 5]),
    )  # fmt: skip
    found = between(a, b)
    assert {change.name: (change.kind, change.elements) for change in found.changes} == {
        "cast": ("dtype", 1), "changed": ("changed", 1), "gone": ("removed", 0), "half": ("changed", 1),
        "new": ("added", 0), "reshaped": ("shape", 0), "whole": ("changed", 1),
    }  # fmt: skip
    numbers = {change.name: (change.norm, change.relative, change.max_abs) for change in found.changes}
    assert numbers["changed"] == (2.0, 2.0 / 5.0, 2.0)
    assert numbers["cast"] == (0.5, pytest.approx(0.5 / math.sqrt(5)), 0.5)
    assert numbers["half"] == (1.0, pytest.approx(1 / math.sqrt(5)), 1.0)
    assert numbers["whole"] == (3.0, pytest.approx(3 / math.sqrt(5)), 3.0)
    assert (found.norm, found.tensors, found.same) == (pytest.approx(math.sqrt(4 + 0.25 + 1 + 9)), 5, False)
    assert found.nbytes == 12 + 12 + 8 + 4 + 16  # without `reshaped`, of which nothing can be compared
    only = between(a, b, patterns=("ch*", "kept"))
    assert [change.name for change in only.changes] == ["changed"] and only.tensors == 2
    assert between(a, a).same


def test_a_glob_that_no_name_is_like(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = model(tmp_path / "a", x=torch.ones(2)), model(tmp_path / "b", x=torch.ones(2), only_b=torch.ones(2))
    with pytest.raises(NotFoundError, match=r"mlp\*"):
        between(a, b, patterns=("x", "mlp*"))
    assert [change.kind for change in between(a, b, patterns=("only*",)).changes] == ["added"]
    assert run(["diff", str(a), str(b), "--name", "mlp*"]) == 2  # 1 is the verdict that something differs
    assert "mlp*" in capfd.readouterr().err.splitlines()[-1]


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    a = model(tmp_path / "a", x=torch.ones(3), y=torch.ones(5), z=torch.ones(2, 2), gone=torch.ones(2))
    b = model(tmp_path / "b", x=torch.ones(3), y=torch.zeros(5), z=torch.ones(4))
    ours, theirs = open_directory(a, "huggingface"), open_directory(b, "huggingface")
    for patterns, total in (((), 32), (("x", "z"), 12)):
        done: list[int] = []
        diff(ours, theirs, patterns=patterns, progress=done.append)
        assert bytes_to_compare(ours, theirs, patterns) == sum(done) == total


@pytest.mark.parametrize("role", ["policy", "value"])
def test_a_part_of_a_state_dict_with_two_models(
    wrapped: Path, tmp_path: Path, role: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Against itself, against the model that transformers saved of it, and against that with one element moved."""
    pair, saved = wrapped / "pair" / "actor", wrapped / "pair" / role
    tensors = load_file(saved / "model.safetensors")
    assert run(["diff", str(pair), str(pair), "--role", role, "-q", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tensors"] == len(tensors)
    for sides in ((pair, saved), (saved, pair)):
        assert run(["diff", *map(str, sides), "--role", role, "-q"]) == 0
        assert f"no difference: {len(tensors)} tensors" in capfd.readouterr().out
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 0.5
    assert run(["diff", str(pair), str(model(tmp_path / "other", **tensors)), "--role", role, "-q", "--json"]) == 1
    assert [change["name"] for change in json.loads(capfd.readouterr().out)["changes"]] == [name]
    assert run(["diff", str(saved), str(saved), "--role", role]) == 2
    assert "holds one model" in capfd.readouterr().err


def test_windows_change_no_number(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(300, 700, generator=generator) for _ in range(2))
    a, b = model(tmp_path / "a", x=x), model(tmp_path / "b", x=y)
    whole, cut = between(a, b), between(a, b, memory_limit=1)
    assert whole.changes[0].max_abs == cut.changes[0].max_abs == (x.double() - y.double()).abs().max().item()
    expected = torch.linalg.vector_norm(x.double() - y.double()).item()
    for found in (whole, cut):
        assert found.changes[0].norm == pytest.approx(expected, rel=1e-12)
        assert found.changes[0].relative == pytest.approx(expected / x.double().norm().item(), rel=1e-12)


def test_not_a_number_is_a_difference_unless_both_have_it(tmp_path: Path) -> None:
    nan = math.nan
    a = model(tmp_path / "a", both=torch.tensor([nan, 1.0]), one=torch.tensor([nan, 1.0]), sign=torch.tensor([0.0]))
    b = model(tmp_path / "b", both=torch.tensor([nan, 2.0]), one=torch.tensor([0.0, 1.0]), sign=torch.tensor([-0.0]))
    changes = {change.name: change for change in between(a, b).changes}
    assert (changes["both"].elements, changes["both"].max_abs) == (1, 1.0)
    assert changes["one"].elements == 1 and math.isnan(changes["one"].norm)
    assert (changes["sign"].elements, changes["sign"].norm) == (1, 0.0)


def test_two_layouts_by_hugging_face_s_names(zoo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Sharded by FSDP against what transformers saved of it; then one element is moved by a half."""
    sharded, saved = zoo / "tied" / "actor", zoo / "tied" / "reference"
    assert run(["diff", str(sharded), str(saved), "-q"]) == 0
    assert "no difference" in capfd.readouterr().out
    tensors = load_file(saved / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 0.5
    other = model(tmp_path / "other", **tensors)
    assert run(["diff", str(sharded), str(other), "-q", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert [(c["name"], c["elements"], c["max_abs"]) for c in found["changes"]] == [
        (name, 1, pytest.approx(0.5, rel=1e-6))
    ]


def test_two_steps_and_no_torch(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2)
    program = (
        "import sys; from milepost.cli.app import run\n"
        f"status = run(['diff', {str(tmp_path / 'global_step_1')!r}, {str(tmp_path / 'global_step_2')!r}, '--json'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    names = [change["name"] for change in json.loads(done.stdout)["changes"]]
    assert "layer.weight" in names and "optim/layer.weight/exp_avg" in names and len(names) == 12
