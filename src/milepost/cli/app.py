"""The application: how options are spelled, and how errors become one line and an exit status.

Exit status: 0 good; 1 the checkpoint is not good; 2 the call is not; 3 an internal error; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer
import typer.core
import typer.main

from milepost import __version__
from milepost.cli import comparing, inspecting, merging, running
from milepost.errors import CallError, MilepostError
from milepost.jobs.output import describe

# typer has carried its own copy of click since 0.2x, so its errors are reached through what it exports:
# BadParameter is a UsageError is a ClickException.
_ClickError = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Fault-tolerant RLHF training: every step recorded whole, resumed anywhere, exported to Hugging Face.",
    epilog="Exit status: 0 good, 1 the checkpoint is not good, 2 the call is not, 3 an internal error, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"milepost {__version__}")
        raise typer.Exit


running.register(app)
for command in (merging.merge, comparing.test, inspecting.inspect, inspecting.verify):
    app.command()(command)


def main() -> NoReturn:
    """Entry point of the `milepost` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    command = typer.main.get_group(app)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = command.main(_spelled(command, list(arguments)), "milepost", standalone_mode=False)
        sys.stdout.flush()
    except MilepostError as error:
        return _fail(error.exit_status, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail(130, "stopped; nothing half-written was left")
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # click ends with status 1, which is a verdict here
            return _reader_gone()
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(CallError.exit_status, f"{place}{describe(error)}")
    except Exception as error:  # noqa: BLE001  the one handler of last resort
        if isinstance(error, _ClickError):
            error.show()  # type: ignore[attr-defined]
            return 2
        return _fail(3, f"internal error: {type(error).__name__}: {error} (MILEPOST_DEBUG=1 shows where)")
    return result if isinstance(result, int) else 0


def _reader_gone() -> int:
    """`| head` has enough: no error. What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(status: int, message: str) -> int:
    if os.environ.get("MILEPOST_DEBUG") == "1":
        traceback.print_exc()
    print(f"milepost: {message}", file=sys.stderr)
    return status


def _terminate(_number: int, _frame: object) -> NoReturn:
    """SIGTERM unwinds as Ctrl-C does, so that temporary directories go."""
    raise SystemExit(128 + signal.SIGTERM)


def _spelled(group: typer.core.TyperGroup, arguments: list[str]) -> list[str]:
    """Give each option the spelling that it was declared with: dashes and underscores are interchangeable."""
    position = next((n for n, text in enumerate(arguments) if not text.startswith("-")), None)
    chosen = None if position is None else group.commands.get(arguments[position])
    if position is None or chosen is None:
        return arguments
    declared = {
        _fold(spelling): spelling
        for parameter in chosen.params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    spelled = arguments[: position + 1]
    for number, text in enumerate(arguments[position + 1 :], position + 1):
        if text == "--":
            return [*spelled, *arguments[number:]]
        name, equals, value = text.partition("=")
        known = declared.get(_fold(name)) if text.startswith("--") else None
        spelled.append(f"{known}{equals}{value}" if known else text)
    return spelled


def _fold(option: str) -> str:
    return option.replace("_", "-")
