"""The quick reading of a command line against typer's: the same values, or none at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.cli import full, quick
from milepost.cli.commands import function_of
from milepost.cli.declared import Argument, Option

READING = ("merge", "test", "convert", "inspect", "verify", "diff", "prune")
WORDS = ("a", "b/c", "", "-", "--", "7", "0", "-1", "1.5", "1e-3", "nan", "x=y", "=", "bf16", "\u00e9")


def _by_typer(command: Any, arguments: list[str]) -> dict[str, Any] | None:
    """The values that typer calls a command with; None for a wrong call."""
    seen: list[dict[str, Any]] = []

    def record(**values: Any) -> None:
        seen.append(values)

    shown = full.in_typers_words(command)
    for name in ("__signature__", "__annotations__"):
        setattr(record, name, getattr(shown, name))
    app = typer.Typer(add_completion=False)
    app.command()(record)
    try:
        typer.main.get_command(app).main(arguments, standalone_mode=False)
    except Exception:  # noqa: BLE001  a wrong call, whatever typer calls it
        return None
    return seen[0] if seen else None


def _options(command: Any) -> list[str]:
    params = typer.main.get_command(_alone(command)).params
    return [spelling for parameter in params for spelling in parameter.opts if spelling.startswith("-")]


def _alone(command: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(full.in_typers_words(command))
    return app


def _same(left: dict[str, Any], right: dict[str, Any] | None) -> bool:
    # repr: a NaN is itself, and 1 is not True; typer gives a tuple or a list for several values.
    return right is not None and {k: repr(v) for k, v in left.items()} == {k: repr(v) for k, v in right.items()}


@pytest.mark.parametrize("name", READING)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_read_quickly_is_what_typer_reads(name: str, data: st.DataObject) -> None:
    command = function_of(name)
    options = st.sampled_from(_options(command))
    word = options | st.sampled_from(WORDS) | st.tuples(options, st.sampled_from(WORDS)).map("=".join)
    arguments = data.draw(st.lists(word, max_size=6))
    values = quick.read(command, arguments)
    assert values is None or _same(values, _by_typer(command, arguments))


def _sample(
    place: Annotated[Path | None, Argument(metavar="DIR")] = None,
    other: Annotated[str | None, Argument()] = None,
    text: Annotated[str, Option("--the-text")] = "t",
    path: Annotated[Path | None, Option("--path")] = None,
    count: Annotated[int, Option("--count", min=1)] = 2,
    rate: Annotated[float | None, Option("--rate")] = None,
    names: Annotated[list[str] | None, Option("--name")] = None,
    quiet: Annotated[bool, Option("-q", "--quiet")] = False,
) -> None:
    del place, other, text, path, count, rate, names, quiet


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["d", "--the-text", "x", "o"], {"place": Path("d"), "other": "o", "text": "x"}),
        (["--the-text=x=y", "--path=p"], {"text": "x=y", "path": Path("p")}),
        (["--count", "3", "--rate", "1e-3", "-q"], {"count": 3, "rate": 0.001, "quiet": True}),
        (["--name", "a", "--name", "b", "--count=4", "--count=5"], {"names": ["a", "b"], "count": 5}),
        (["--quiet"], {"quiet": True}),
    ],
)
def test_right_calls_are_read(arguments: list[str], expected: dict[str, Any]) -> None:
    defaults = {
        "place": None, "other": None, "text": "t", "path": None,
        "count": 2, "rate": None, "names": None, "quiet": False,
    }  # fmt: skip
    values = quick.read(_sample, arguments)
    assert values == {**defaults, **expected}
    assert _same(values, _by_typer(_sample, arguments))


def test_dashes_and_underscores_are_one() -> None:
    for spelling in ("--the_text", "--the-text"):
        values = quick.read(_sample, [spelling, "x_y"])
        assert values is not None and values["text"] == "x_y"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["--nothing"], ["--count", "0"], ["--count", "x"], ["--count", "1_0"], ["--rate", "1_0.0"],
        ["--count"], ["--quiet=1"], ["--no-quiet"], ["a", "b", "c"], ["--", "a"], ["-x"], ["-qx"], [""],
        ["--the-text", "--quiet"],
    ],
)  # fmt: skip
def test_all_else_is_left_to_typer(arguments: list[str]) -> None:
    assert quick.read(_sample, arguments) is None


def test_a_merge_starts_without_what_it_does_not_need(zoo: Path, tmp_path: Path) -> None:
    # Each of these takes longer to import than a small merge takes to run.
    program = (
        "import sys; from milepost.cli.app import run\n"
        f"assert run(['merge', {str(zoo / 'tied' / 'actor')!r}, {str(tmp_path / 'out')!r}, '--dtype', 'bf16']) == 0\n"
        "heavy = {'typer', 'click', 'pydantic', 'rich', 'multiprocessing', 'concurrent.futures', 'logging'}\n"
        "heavy |= {'hashlib', 'random', 'tempfile', 'subprocess', 'socket', 'importlib.metadata', 'traceback'}\n"
        "heavy |= {f'milepost.{name}' for name in ('jobs.compare', 'api.comparing', 'api.opening', 'logits')}\n"
        "heavy |= {f'milepost.checkpoint.{name}' for name in ('resume', 'verify', 'remote.folder')}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
