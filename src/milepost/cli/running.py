"""train, config, status, report: what can be done with a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from milepost.console import note

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory (trainer.default_local_dir).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Config values; milepost config lists them.", show_default=False),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file over the defaults, under KEY=VALUE.", show_default=False)
]


def train(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--nproc-per-node",
            "--num_processes",
            min=1,
            help="Processes on this node. Default: trainer.n_gpus_per_node.",
            show_default=False,
        ),
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option("--nnodes", help="Nodes, or MIN:MAX. Default: trainer.nnodes.", show_default=False)
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", help="This node's number, for a static rendezvous.", show_default=False),
    ] = None,
    rdzv_backend: Annotated[
        str | None, typer.Option("--rdzv-backend", help="How nodes find each other: c10d, static.", show_default=False)
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", help="HOST:PORT of the rendezvous, for several nodes.", show_default=False),
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", help="Name of the job, the same on every node.", show_default=False)
    ] = None,
    rdzv_conf: Annotated[
        str | None, typer.Option("--rdzv-conf", help="More of torchrun's rendezvous settings.", show_default=False)
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often to go on after a worker dies.")
    ] = 3,
) -> None:
    """Train with PPO, and go on by itself after a crash.

    With no arguments it trains a tiny model to add, on this machine. Give your own model and prompts:

    milepost train --nproc 2 actor_rollout_ref.model.path=MODEL data.train_files=prompts.jsonl reward.path=my.py:score

    To stop it send SIGTERM: all ranks save, and it ends with 75, which says: start me again. The same command goes on.
    """
    from milepost.trainer.launch import LaunchOptions, launch  # noqa: PLC0415  only this command needs the trainer

    options = LaunchOptions(
        nproc, nnodes, node_rank, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, max_restarts=max_restarts
    )
    raise typer.Exit(launch(config_file, overrides or [], options))


def config(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema instead.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every config value, its meaning and its origin.

    The origin is the defaults, the file of --config, or a KEY=VALUE here.
    """
    from milepost.trainer.config import describe, json_schema  # noqa: PLC0415  omegaconf is not needed elsewhere

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    rows = describe(config_file, overrides or [])
    if json_:
        values = [
            {"key": r.key, "value": r.value, "type": r.type, "meaning": r.meaning, "origin": r.origin} for r in rows
        ]
        typer.echo(json.dumps({"format": 1, "values": values}, indent=2, default=str))
        return
    for row in rows:
        origin = "" if row.origin == "default" else f"  ({row.origin})"
        typer.echo(f"{row.key}={_shown(row.value)}{origin}\n    {row.meaning} [{row.type}]")


def status(
    run: Run,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object (key `format` is its version).")] = False,
) -> None:
    """Say how a run stands.

    Did it resume, from where, with which parts; which step is newest and whole; what was lost; what is next.
    """
    from milepost.checkpoint.diary.status import run_status  # noqa: PLC0415

    found = run_status(run)
    if json_:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        for line in found.lines():
            typer.echo(line)


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write. Default: RUN/report.html.", show_default=False)
    ] = None,
) -> None:
    """Write one offline HTML page about a run.

    A timeline of steps, saves, kills and resumes, and the training curves.
    """
    from milepost.report import write_report  # noqa: PLC0415

    written = write_report(run, output)
    note("open it in a browser; it needs no network")
    typer.echo(str(written))


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return json.dumps(value) if isinstance(value, bool | list | dict) else str(value)
