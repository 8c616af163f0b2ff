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
DROPPED_FIRST = ("RESTARTS", "MLX", "CONTEXT", "UP", "MEMORY", "MODEL")
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
    system = surveyed(name, show_all)
    if line:
        say(line_of(system))
        return
    if json:
        as_json(system)
    else:
        show(system, show_all or name is not None)
    raise typer.Exit(_exit_of(system))


def ps() -> VerbResult:
    """List the processes of every service."""
    from mlxstack.control.probe import processes
    from mlxstack.core.formatting import size
    from mlxstack.host.home import home_from

    running = processes(home_from(os.environ))
    rows = [
        (
            process.service,
            process.role,
            process.pid,
            f"{process.cpu_s:.0f} s",
            size(process.rss_bytes),
            process.command,
        )
        for process in running
    ]
    headings = ("SERVICE", "ROLE", "PID", "CPU", "MEMORY", "COMMAND")
    return VerbResult({"processes": running}, lambda: table(headings, rows, ("COMMAND",)))


def surveyed(name: str | None, show_all: bool) -> "SystemStatus":
    """The machine and its services, or one of them. Raises NotFound."""
    from msgspec.structs import replace

    from mlxstack.cli.target import known_service
    from mlxstack.control.probe import survey
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    system = survey(home, is_recent_only=name is None and not show_all)
    if name is None:
        return system
    full_name = known_service(home, name).spec.name
    return replace(
        system, services=tuple(service for service in system.services if service.name == full_name)
    )


def line_of(system: "SystemStatus") -> str:
    """Services on one line: states of unhealthy ones, and their memory."""
    from mlxstack.core.formatting import size

    listed = [service for service in system.services if service.state != "stopped"]
    if not listed:
        return "mlx-stack: nothing runs"
    names = (
        service.name if service.state == "healthy" else f"{service.name} {service.state}"
        for service in listed
    )
    n_bytes = sum(service.memory_bytes for service in listed)
    return f"mlx-stack: {', '.join(names)}" + (f" · {size(n_bytes)}" if n_bytes else "")


def show(system: "SystemStatus", show_all: bool) -> None:
    """Print the machine and a table of its services."""
    from mlxstack.core.formatting import size

    memory = f"{size(system.memory_bytes)}, {size(system.memory_available_bytes)} available"
    say(f"Device: {system.device}, {system.n_cores} cores")
    say(f"Memory: {memory}")
    if system.disk_free_bytes:
        written = f"{size(system.written.n_bytes)} written today"
        say(f"Disk:   {size(system.disk_free_bytes)} free, {written}")
    say(f"Mode:   {system.mode}")
    members = {member.name for front in system.services for member in front.members}
    alone = [service for service in system.services if service.name not in members]
    listed = [service for service in alone if show_all or service.state != "stopped"]
    if not listed:
        n_stopped = len(alone)
        stopped = ""
        if n_stopped:
            stopped = f" ({n_stopped} stopped; --all lists them)"
        say(f"\nno service runs{stopped}; start one with `mlx-stack up demo`")
        return
    say("")
    rows = [row for service in listed for row in _rows(service, system.services)]
    table(HEADS, rows, DROPPED_FIRST)


def _rows(
    service: "ServiceStatus", services: "Sequence[ServiceStatus]"
) -> list[tuple[object, ...]]:
    """Row of a service; under a gateway the rows of its members."""
    rows = [_row(service, service.name, service.state, service.detail)]
    running = {entry.name: entry for entry in services if entry.uptime_s}
    for member in service.members:
        own = running.get(member.name)
        if own is None:
            first = ""
            if member.phase == "unloaded":
                first = "starts at its first request"
            rows.append((f"  {member.name}", member.phase, *[""] * 7, first))
        else:
            rows.append(_row(own, f"  {own.name}", member.phase, own.detail))
    return rows


def _row(service: "ServiceStatus", name: str, state: object, detail: str) -> tuple[object, ...]:
    from mlxstack.core.formatting import size, tokens

    return (
        name,
        state,
        service.model,
        service.url if service.uptime_s and not name.startswith(" ") else "",
        f"{service.n_slots} x {tokens(service.n_ctx)}" if service.total_ctx else "",
        size(service.memory_bytes) if service.memory_bytes else "",
        _mlx(service),
        age(service.uptime_s) if service.uptime_s else "",
        service.n_restarts or "",
        detail,
    )


def _mlx(service: "ServiceStatus") -> str:
    """MLX's memory: arrays, buffers kept for the next ones, KV budget."""
    from mlxstack.core.formatting import size

    if not service.mlx_active_bytes:
        return ""
    cache = ""
    if service.mlx_cache_bytes:
        cache = f" + {size(service.mlx_cache_bytes)} cache"
    budget = ""
    if service.kv_budget_bytes:
        budget = f", KV {size(service.kv_budget_bytes)} at most"
    return size(service.mlx_active_bytes) + cache + budget


def _exit_of(system: "SystemStatus") -> Exit:
    states = {str(service.state) for service in system.services} - {"stopped"}
    if not states:
        return Exit.NOT_RUNNING
    if states == {"healthy"}:
        return Exit.OK
    return Exit.FAILED
