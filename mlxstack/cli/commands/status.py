"""`status` and `ps`: services and their processes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.commands import tui
from mlxstack.cli.completion import service_argument, service_option
from mlxstack.cli.exit_codes import Exit, Misuse
from mlxstack.cli.output import as_json, say, table
from mlxstack.cli.verbs import Json, VerbResult
from mlxstack.core.formatting import age

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxstack.control.probe import ServiceStatus, SystemStatus


Name = Annotated[str | None, service_option("Only this service.")]
Service = Annotated[str | None, service_argument("Only this service.")]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh continuously.")]
Line = Annotated[bool, typer.Option("--line", help="One line for a menu bar; the code is 0.")]
All = Annotated[bool, typer.Option("--all", help="Also services that are stopped.")]
WATCH_S = 2.0
HEADS = (
    "SERVICE", "STATE", "MODEL", "URL", "CONTEXT", "MEMORY", "MLX", "UP", "RESTARTS", "DETAIL",
)  # fmt: skip
LEAST = ("RESTARTS", "MLX", "CONTEXT", "UP", "MEMORY", "MODEL")
"""Columns that a narrow terminal does without, the first one first."""


def status(
    service: Service = None,
    name: Name = None,
    json: Json = False,
    watch: Watch = False,
    show_all: All = False,
    line: Line = False,
) -> None:
    """Show the machine and the state of every service.

    A service is healthy, degraded, down, crashed or stopped.

    The exit code is 0 when all that should run is healthy, 3 when nothing runs, 1 otherwise.
    """
    from mlxstack.cli.target import one_name

    name = one_name(service, name)
    if line and (watch or json):
        raise Misuse("--line goes with neither --watch nor --json")
    if watch and json:
        raise Misuse("--watch prints pages for people; leave out --json, or ask again and again")
    if watch:
        tui.watch(None, None, name, WATCH_S)
        return
    found = surveyed(name, show_all)
    if line:
        say(line_of(found))
        return
    if json:
        as_json(found)
    else:
        show(found, show_all or name is not None)
    raise typer.Exit(_exit_of(found))


def ps() -> VerbResult:
    """List the processes of every service."""
    from mlxstack.control.probe import processes
    from mlxstack.core.formatting import size
    from mlxstack.host.home import home_from

    found = processes(home_from(os.environ))
    rows = [
        (one.service, one.role, one.pid, f"{one.cpu_s:.0f} s", size(one.rss_bytes), one.command)
        for one in found
    ]
    headings = ("SERVICE", "ROLE", "PID", "CPU", "MEMORY", "COMMAND")
    return VerbResult({"processes": found}, lambda: table(headings, rows, ("COMMAND",)))


def surveyed(name: str | None, show_all: bool) -> "SystemStatus":
    """The machine and its services, or one of them. Raises NotFound."""
    from msgspec.structs import replace

    from mlxstack.cli.target import known_service
    from mlxstack.control.probe import survey
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    found = survey(home, is_recent_only=name is None and not show_all)
    if name is None:
        return found
    wanted = known_service(home, name).plan.name
    return replace(found, services=tuple(one for one in found.services if one.name == wanted))


def line_of(found: "SystemStatus") -> str:
    """Services on one line: states of unhealthy ones, and their memory."""
    from mlxstack.core.formatting import size

    shown = [one for one in found.services if one.state != "stopped"]
    if not shown:
        return "mlx-stack: nothing runs"
    names = (one.name if one.state == "healthy" else f"{one.name} {one.state}" for one in shown)
    n_bytes = sum(one.memory_bytes for one in shown)
    return f"mlx-stack: {', '.join(names)}" + (f" · {size(n_bytes)}" if n_bytes else "")


def show(found: "SystemStatus", show_all: bool) -> None:
    """Print the machine and a table of its services."""
    from mlxstack.core.formatting import size

    memory = f"{size(found.memory_bytes)}, {size(found.memory_available_bytes)} available"
    say(f"Device: {found.device}, {found.n_cores} cores")
    say(f"Memory: {memory}")
    say(f"Mode:   {found.mode}")
    members = {one.name for front in found.services for one in front.members}
    alone = [one for one in found.services if one.name not in members]
    shown = [one for one in alone if show_all or one.state != "stopped"]
    if not shown:
        n_stopped = len(alone)
        stopped = f" ({n_stopped} stopped; --all lists them)" if n_stopped else ""
        say(f"\nno service runs{stopped}; start one with `mlx-stack up demo`")
        return
    say("")
    rows = [row for one in shown for row in _rows(one, found.services)]
    table(HEADS, rows, LEAST)


def _rows(one: "ServiceStatus", every: "Sequence[ServiceStatus]") -> list[tuple[object, ...]]:
    """Row of a service; under a gateway the rows of its members."""
    rows = [_row(one, one.name, one.state, one.detail)]
    running = {other.name: other for other in every if other.uptime_s}
    for member in one.members:
        own = running.get(member.name)
        if own is None:
            first = "starts at its first request" if member.phase == "unloaded" else ""
            rows.append((f"  {member.name}", member.phase, *[""] * 7, first))
        else:
            rows.append(_row(own, f"  {own.name}", member.phase, own.detail))
    return rows


def _row(one: "ServiceStatus", name: str, state: object, detail: str) -> tuple[object, ...]:
    from mlxstack.core.formatting import size, tokens

    return (
        name,
        state,
        one.model,
        one.url if one.uptime_s and not name.startswith(" ") else "",
        f"{one.n_slots} x {tokens(one.n_ctx)}" if one.total_ctx else "",
        size(one.memory_bytes) if one.memory_bytes else "",
        _mlx(one),
        age(one.uptime_s) if one.uptime_s else "",
        one.n_restarts or "",
        detail,
    )


def _mlx(one: "ServiceStatus") -> str:
    """MLX's memory: arrays, buffers kept for the next ones, KV budget."""
    from mlxstack.core.formatting import size

    if not one.mlx_active_bytes:
        return ""
    cache = f" + {size(one.mlx_cache_bytes)} cache" if one.mlx_cache_bytes else ""
    budget = f", KV {size(one.kv_budget_bytes)} at most" if one.kv_budget_bytes else ""
    return size(one.mlx_active_bytes) + cache + budget


def _exit_of(found: "SystemStatus") -> Exit:
    states = {str(one.state) for one in found.services} - {"stopped"}
    if not states:
        return Exit.NOT_RUNNING
    return Exit.OK if states == {"healthy"} else Exit.FAILED
