"""`status` and `ps`: services and their processes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.commands import tui
from mlxstack.cli.commands.up import Json
from mlxstack.cli.completion import service_names
from mlxstack.cli.exit_codes import Exit, Misuse
from mlxstack.cli.output import as_json, table

if TYPE_CHECKING:
    from mlxstack.cli.services.probe import ServiceStatus, SystemStatus


Name = Annotated[
    str | None, typer.Option("--name", help="Only this service.", autocompletion=service_names)
]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh continuously.")]
All = Annotated[
    bool, typer.Option("--all", help="Also services that were stopped more than a day ago.")
]
WATCH_S = 2.0
LEAST = ("RESTARTS", "MLX", "CONTEXT", "UP", "MEMORY", "MODEL")
"""Columns that a narrow terminal does without, the first one first."""


def status(
    name: Name = None, json: Json = False, watch: Watch = False, show_all: All = False
) -> None:
    """Show the machine and the state of every service.

    A service is healthy, degraded, down, crashed or stopped.

    The exit code is 0 when all that should run is healthy, 3 when nothing runs, 1 otherwise.
    """
    if watch and json:
        raise Misuse("--watch prints pages for people; leave out --json, or ask again and again")
    if watch:
        tui.watch(None, None, name, WATCH_S)
        return
    found = _surveyed(name, show_all)
    if json:
        as_json(found)
    else:
        _print(found)
    raise typer.Exit(_exit_of(found))


def ps(json: Json = False) -> None:
    """List the processes of every service."""
    from mlxstack.cli.services.probe import processes
    from mlxstack.core.formatting import size
    from mlxstack.host.home import home_from

    found = processes(home_from(os.environ))
    if json:
        as_json({"processes": found})
        return
    rows = [
        (one.service, one.role, one.pid, f"{one.cpu_s:.0f} s", size(one.rss_bytes), one.command)
        for one in found
    ]
    table(("SERVICE", "ROLE", "PID", "CPU", "MEMORY", "COMMAND"), rows, ("COMMAND",))


def _surveyed(name: str | None, show_all: bool) -> "SystemStatus":
    from msgspec.structs import replace

    from mlxstack.cli.services.probe import survey
    from mlxstack.cli.target import known_service
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    found = survey(home, is_recent_only=name is None and not show_all)
    if name is None:
        return found
    wanted = known_service(home, name).plan.name
    return replace(found, services=tuple(one for one in found.services if one.name == wanted))


def _print(found: "SystemStatus") -> None:
    from mlxstack.core.formatting import size

    memory = f"{size(found.memory_bytes)}, {size(found.memory_available_bytes)} available"
    typer.echo(f"Device: {found.device}, {found.n_cores} cores")
    typer.echo(f"Memory: {memory}")
    typer.echo(f"Mode:   {found.mode}")
    if not found.services:
        typer.echo("\nno service yet; start one with `mlx-stack up demo`")
        return
    typer.echo()
    rows = [
        (
            one.name,
            one.state,
            one.model,
            one.url,
            f"{one.n_slots} x {one.n_ctx} = {one.total_ctx}",
            size(one.memory_bytes) if one.memory_bytes else "-",
            _mlx(one),
            _lasting(one.uptime_s),
            one.n_restarts,
            one.detail,
        )
        for one in found.services
    ]
    heads = (
        "SERVICE",
        "STATE",
        "MODEL",
        "URL",
        "CONTEXT",
        "MEMORY",
        "MLX",
        "UP",
        "RESTARTS",
        "DETAIL",
    )
    table(heads, rows, LEAST)


def _mlx(one: "ServiceStatus") -> str:
    """MLX's memory: arrays, buffers kept for the next ones, KV budget."""
    from mlxstack.core.formatting import size

    if not one.mlx_active_bytes:
        return "-"
    cache = f" + {size(one.mlx_cache_bytes)} cache" if one.mlx_cache_bytes else ""
    budget = f", KV {size(one.kv_budget_bytes)} at most" if one.kv_budget_bytes else ""
    return size(one.mlx_active_bytes) + cache + budget


def _lasting(seconds: float) -> str:
    """The largest unit that fits, rounded down: `3 h`."""
    for n_seconds, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= n_seconds:
            return f"{seconds // n_seconds:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds else "-"


def _exit_of(found: "SystemStatus") -> Exit:
    states = {str(one.state) for one in found.services} - {"stopped"}
    if not states:
        return Exit.NOT_RUNNING
    return Exit.OK if states == {"healthy"} else Exit.FAILED
