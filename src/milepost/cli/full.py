"""Typer's reading of the command line: help, and what is wrong with a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
import typer.core
import typer.main

from milepost import __version__
from milepost.cli.commands import COMMANDS, function_of
from milepost.cli.declared import Argument, Declared, fold

# typer has carried its own copy of click since 0.2x, so its errors are reached through what it exports:
# BadParameter is a UsageError is a ClickException.
_ClickError = typer.BadParameter.__mro__[2]


class _Commands(typer.core.TyperGroup):
    """The commands, each imported when it is first asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # None: not imported yet

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(cmd_name)(in_typers_words(function_of(cmd_name)))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=_Commands,
    help="Fault-tolerant RLHF training: every step recorded whole, resumed anywhere, exported to Hugging Face.",
    epilog="DIR, ROOT, A and B may be URLs such as s3://bucket/run. Exit status: 0 good, 1 the checkpoint is not good "
    "(diff, test: there are differences), 2 the call is not, 3 an internal error, 75 train was asked to stop: start it "
    "again, 130 Ctrl-C.",
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


def call(arguments: Sequence[str]) -> Any:
    """Read a command line and call its command; returns what that returns, or the exit status of a wrong call.

    Raises what the command raises.
    """
    group = cast(_Commands, typer.main.get_group(app))
    try:
        return group.main(_spelled(group, list(arguments)), "milepost", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not isinstance(error, _ClickError):
            raise
        error.show()  # type: ignore[attr-defined]
        return 2


def in_typers_words(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with its parameters declared as typer wants them."""
    hints = get_type_hints(command, include_extras=True)
    annotations = {name: _typers(hint) for name, hint in hints.items()}

    def called(**values: Any) -> Any:
        return command(**values)

    signature = inspect.signature(command)
    parameters = [p.replace(annotation=annotations[name]) for name, p in signature.parameters.items()]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = annotations
    called.__doc__ = command.__doc__
    return called


def _typers(hint: Any) -> Any:
    declared = hint.__metadata__[0] if get_origin(hint) is Annotated else None
    if not isinstance(declared, Declared):
        return hint
    kind = typer.Argument if isinstance(declared, Argument) else typer.Option
    return Annotated[get_args(hint)[0], kind(*declared.names, **declared.settings)]


def _spelled(group: _Commands, arguments: list[str]) -> list[str]:
    """Give each option the spelling that it was declared with: dashes and underscores are interchangeable."""
    position = next((n for n, text in enumerate(arguments) if not text.startswith("-")), None)
    chosen = None if position is None else group.get_command(None, arguments[position])
    if position is None or chosen is None:
        return arguments
    declared = {
        fold(spelling): spelling
        for parameter in chosen.params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    spelled = arguments[: position + 1]
    for number, text in enumerate(arguments[position + 1 :], position + 1):
        if text == "--":
            return [*spelled, *arguments[number:]]
        name, equals, value = text.partition("=")
        known = declared.get(fold(name)) if text.startswith("--") else None
        spelled.append(f"{known}{equals}{value}" if known else text)
    return spelled
