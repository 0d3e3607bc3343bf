"""What the reading commands share: their options, and how they find a checkpoint and print facts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

from milepost.checkpoint.locate import Located
from milepost.checkpoint.manifest import MANIFEST
from milepost.checkpoint.parts import locate_part
from milepost.checkpoint.steps import judge
from milepost.cli.declared import Argument, Option
from milepost.console import note
from milepost.errors import CallError
from milepost.settings import BACKEND, FLAG, HELP, LEAST, METAVAR, ROLE, SIZE, declared, made

if TYPE_CHECKING:
    from milepost.jobs.ranks import Launch, Team

Directory = Annotated[
    Path | None, Argument(metavar="DIR", help="A run, a step, or a role's directory.", show_default=False)
]
Backend = Annotated[str, Option("--backend", help=BACKEND)]
LocalDir = Annotated[Path | None, Option("--local_dir", help="The same as DIR.", show_default=False)]
Role = Annotated[str | None, Option("--role", help=ROLE, show_default=False)]
Json = Annotated[bool, Option("--json", help="Print one JSON object (key `format` is its version).")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print results only.")]

Call = TypeVar("Call")

FORMAT = 1

_OUTPUT = {"json_": Json, "quiet": Quiet}
# Options of verl's merger and converter that mean nothing here: its habits keep working, with one note.
_UNUSED = {
    "trust_remote_code": Annotated[bool, Option("--trust-remote-code", hidden=True)],
    "use_cpu_initialization": Annotated[bool, Option("--use_cpu_initialization", hidden=True)],
}


def of_call(kind: type[Call]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make options of the settings of a dataclass (`milepost.settings`), which a command gets in one object, `call`.

    It also gets `json_` and `quiet`, for the options of every such command.
    """

    def change(command: Callable[..., None]) -> Callable[..., None]:
        known = declared(kind)

        @wraps(command)
        def with_options(**given: Any) -> None:
            say_unused(**{name: given.pop(name) for name in _UNUSED})
            command(call=made(kind, {name: given.pop(name) for name in known}), **given)

        hints = get_type_hints(command, include_extras=True)
        own = [p for p in signature(command).parameters.values() if p.name not in ("call", *_OUTPUT)]
        parameters = {p.name: p.replace(annotation=hints[p.name]) for p in own}
        for name, annotation in (_OUTPUT | _UNUSED).items():
            parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, (hint, default, facts) in known.items():
            shown = facts[SIZE] or (default if default != () else None)
            parameters[name] = Parameter(
                name, Parameter.KEYWORD_ONLY, default=shown, annotation=_option(name, hint, facts)
            )
        with_options.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters.values()]
        )
        with_options.__annotations__ = {name: p.annotation for name, p in parameters.items()} | {"return": None}
        return with_options

    return change


def _option(name: str, hint: Any, facts: Mapping[str, Any]) -> Any:
    written = str if facts[SIZE] else list[str] | None if hint == tuple[str, ...] else hint
    more = {key: facts[fact] for key, fact in (("metavar", METAVAR), ("min", LEAST)) if facts[fact]}
    show = hint != tuple[str, ...] and type(None) not in get_args(hint)
    return Annotated[written, Option(facts[FLAG] or f"--{name}", help=facts[HELP], show_default=show, **more)]


def found(source: Path, role: str | None, backend: str, quiet: bool) -> tuple[Located, str | None]:
    """The role directory that is meant, and the part of a state dict with several; says what was found."""
    located, part = locate_part(source, role=role, backend=backend)
    for text in located.notes:
        note(text, quiet=quiet)
    step = "" if located.step is None else f", step {located.step}"
    note(f"found {located.layout.name} checkpoint {located.directory}{step}", quiet=quiet)
    step_dir = located.directory.parent
    if (step_dir / MANIFEST).exists():
        state = judge(step_dir, named=True)
        if not state.good:
            note(f"beware: {step_dir.name} is {state.state}: {state.why}")
    return located, part


def takes_urls(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let parameters of a command be URLs: for each it gets a copy on this machine, which goes when it ends."""

    def change(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_copies(**given: Any) -> None:
            urls = {name: url for name in names if (url := _url_of(given.get(name))) is not None}
            if not urls:
                command(**given)
                return
            from milepost.cli.at_url import copies  # noqa: PLC0415  most calls name none

            with copies(urls, given.get("role"), quiet=given.get("quiet", False)) as paths:
                command(**{**given, **paths})

        return with_copies

    return change


def _url_of(path: Path | None) -> str | None:
    if ":/" not in str(path):
        return None
    from milepost.checkpoint.remote.folder import url_of  # noqa: PLC0415  most calls name none

    return url_of(str(path))


def one(argument: str, option: str, first: Path | None, second: Path | None) -> Path:
    """The one value of a positional argument that can also be given as an option."""
    chosen = second if first is None else first
    if chosen is None or (first is not None and second is not None and first != second):
        raise CallError(f"give {argument} or {option}, one of them; --help shows how")
    return chosen


def say_unused(**options: bool) -> None:
    """Note which of the options of other programs were given and mean nothing here."""
    for name, given in options.items():
        if given:
            note(f"--{name} has no meaning here: no model is built and no code of a checkpoint is run")


def this_launch() -> Launch | None:
    """The launch of several ranks that this process belongs to, if it is one."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from milepost.jobs.ranks import launch_of  # noqa: PLC0415  only under torchrun

    return launch_of(os.environ)


def team_at(launch: Launch, target: Path) -> Team:
    """The ranks of a launch that share out the files of one output; a context manager."""
    from milepost.jobs.ranks import Team  # noqa: PLC0415  the same

    return Team(launch, target)


def print_json(**facts: Any) -> None:
    """One JSON object on stdout, with the version of its form."""
    print(json.dumps({"format": FORMAT, **facts}, indent=2, allow_nan=True))
