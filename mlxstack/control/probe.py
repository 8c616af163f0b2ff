"""Survey of the machine and of every service of a home."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

import psutil
from msgspec import Struct

from mlxstack.client.client import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.types import GenerationSettings, HealthResponse, PropsResponse
from mlxstack.config import modes
from mlxstack.core.errors import StackError
from mlxstack.core.preset import Preset
from mlxstack.core.status import DayWrites
from mlxstack.host import services
from mlxstack.host.hardware import this_hardware
from mlxstack.host.home import Home
from mlxstack.host.process import held_bytes
from mlxstack.host.services import (
    KEY_VARIABLE,
    Phase,
    ServiceSpec,
    ServiceState,
    is_gateway,
    owner,
    read_json,
    read_state,
    usable_key,
)
from mlxstack.store.write_counter import WriteCounter

T = TypeVar("T")

PROBE_TIMEOUT_S = 3.0
FORGET_S = 86_400.0
"""Age at which a stopped service leaves the list."""

NO_PROPS = PropsResponse(0, GenerationSettings(0))


class ServiceHealthLevel(StrEnum):
    """Health level. HEALTHY: answers. DEGRADED: answers, but cannot serve now.

    DOWN: it is supervised but does not answer. CRASHED: its supervisor is gone or gave up.
    STOPPED: it was ended on request.
    """

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    DOWN = "down"
    CRASHED = "crashed"
    STOPPED = "stopped"


class MemberStatus(Struct, frozen=True):
    """Member of a gateway: "unloaded", "loading", "loaded" or "unloading"."""

    name: str
    phase: str


class ServiceStatus(Struct, frozen=True):
    """Status of a service, running or not."""

    name: str
    preset: str
    state: ServiceHealthLevel
    url: str
    worker_pid: int | None
    supervisor_pid: int | None
    detail: str
    n_slots: int
    n_ctx: int
    """Tokens per slot."""
    total_ctx: int
    """Tokens of all slots."""
    n_restarts: int
    since: float
    """Unix seconds of the last start."""
    log: str
    model: str = ""
    uptime_s: float = 0.0
    """Of the worker that runs; 0 without one."""
    memory_bytes: int = 0
    """Of the worker; Metal buffers are not always part of its resident memory."""
    mlx_active_bytes: int = 0
    """Arrays of MLX, as the worker itself reports."""
    mlx_cache_bytes: int = 0
    """Freed buffers that MLX keeps."""
    kv_budget_bytes: int = 0
    why_not_batching: str | None = None
    prevents_sleep: bool = False
    members: tuple[MemberStatus, ...] = ()
    """Of a gateway, also those that were never started."""


class SystemStatus(Struct, frozen=True):
    """Everything that `status` shows."""

    device: str
    system: str
    n_cores: int
    memory_bytes: int
    memory_available_bytes: int
    mode: str
    services: tuple[ServiceStatus, ...]
    written: DayWrites = DayWrites("")
    """Bytes that all services wrote to disk today."""
    disk_free_bytes: int = 0


class ProcessStatus(Struct, frozen=True):
    """One process; `cpu_s` seconds of CPU used so far, `rss_bytes` resident memory."""

    service: str
    role: str
    pid: int
    cpu_s: float
    rss_bytes: int
    command: str


def survey(home: Home, is_recent_only: bool = False) -> SystemStatus:
    """Ask every service for its state, all at once.

    `is_recent_only` leaves out services that were stopped more than a day ago.
    """
    hardware = this_hardware()
    seen = asyncio.run(_service_statuses(home))
    if is_recent_only:
        seen = [service for service in seen if not _is_old(home, service)]
    alive = [service.name for service in seen if service.supervisor_pid is not None]
    return SystemStatus(
        device=hardware.chip,
        system=hardware.system,
        n_cores=hardware.n_cores,
        memory_bytes=hardware.total_bytes,
        memory_available_bytes=hardware.available_bytes,
        mode=_mode(modes.active(home), alive),
        written=_written(home),
        disk_free_bytes=shutil.disk_usage(home.root).free if home.root.is_dir() else 0,
        services=tuple(seen),
    )


def _written(home: Home) -> DayWrites:
    """Bytes written today; zeros where nothing was counted."""
    if home.writes_file.exists():
        with suppress(StackError):
            return WriteCounter(home.writes_file).today()
    return DayWrites("")


def _is_old(home: Home, service: ServiceStatus) -> bool:
    """Whether stopped for over a day, by the state file."""
    if service.state is not ServiceHealthLevel.STOPPED:
        return False
    return time.time() - home.state_file(service.name).stat().st_mtime > FORGET_S


def _mode(active: modes.Active | None, alive: list[str]) -> str:
    if not alive:
        return "none; nothing runs"
    if active is None or not set(active.services) & set(alive):
        return f"none; running: {', '.join(alive)}"
    missing = [name for name in active.services if name not in alive]
    if missing:
        return f"{active.name}, but {', '.join(missing)} does not run"
    return active.name


def processes(home: Home) -> list[ProcessStatus]:
    """The supervisors and workers that are alive."""
    alive = []
    for state in services.running(home):
        for role, process in (("supervisor", state.supervisor), ("worker", state.worker)):
            if process is not None:
                with suppress(psutil.Error):
                    alive.append(_process(state.spec.name, role, process.pid))
    return alive


def classify(
    state: ServiceState, is_owned: bool, health: HealthResponse | None
) -> tuple[ServiceHealthLevel, str]:
    """Condition of a service, with a note; `health` None: no answer."""
    last = ""
    if state.exit_summary:
        last = f"the last worker {state.exit_summary}"
    if not is_owned:
        if state.phase is Phase.STOPPED:
            return ServiceHealthLevel.STOPPED, ""
        if state.phase is Phase.CRASHED:
            remedy = f"see `mlx-stack logs {state.spec.name}`"
            parts = (f"gave up after {state.n_crashes} crashes", last, remedy)
            return ServiceHealthLevel.CRASHED, "; ".join(filter(None, parts))
        return ServiceHealthLevel.CRASHED, "the supervisor is gone; `mlx-stack up` starts it again"
    if health is None:
        return ServiceHealthLevel.DOWN, f"no answer ({state.phase})"
    if not health.is_ready:
        return ServiceHealthLevel.DEGRADED, health.message
    return ServiceHealthLevel.HEALTHY, last


async def _service_statuses(home: Home) -> list[ServiceStatus]:
    states = [read_state(home, name) for name in services.names(home)]
    return await asyncio.gather(*(_status_of(home, state) for state in states if state is not None))


async def _status_of(home: Home, state: ServiceState) -> ServiceStatus:
    spec = state.spec
    is_owned = owner(home, spec.name) is not None
    health = None
    if is_owned:
        health = await _ask(spec.url, Client.health)
    condition, detail = classify(state, is_owned, health)
    worker = None
    if is_owned:
        worker = state.worker
    # What is served may have been changed since the start.
    served = read_json(home.preset_file(spec.name), Preset)
    n_slots = spec.n_slots
    n_ctx = spec.n_ctx
    if served is not None:
        n_slots = served.slots.count
        n_ctx = served.slots.n_ctx
        serves = ""
        if served.name != spec.name:
            serves = f"serves {served.name}"
        detail = "; ".join(filter(None, (serves, detail)))
    props = NO_PROPS
    if condition is ServiceHealthLevel.HEALTHY and served is not None:
        props = await running_props(spec.url, served)
        detail = "; ".join(filter(None, (*props.remarks, detail)))
    return ServiceStatus(
        name=spec.name,
        preset=spec.preset,
        state=condition,
        url=spec.url,
        worker_pid=worker.pid if worker is not None else None,
        supervisor_pid=state.supervisor.pid if is_owned else None,
        detail=detail,
        n_slots=n_slots,
        n_ctx=n_ctx,
        total_ctx=n_slots * n_ctx,
        n_restarts=state.n_crashes,
        since=state.since,
        log=str(home.log_file(spec.name)),
        model=served.model.id if served is not None else "",
        uptime_s=max(0.0, time.time() - state.since) if worker is not None else 0.0,
        memory_bytes=held_bytes(worker.pid) if worker is not None else 0,
        mlx_active_bytes=props.mlx_active_bytes,
        mlx_cache_bytes=props.mlx_cache_bytes,
        kv_budget_bytes=props.kv_budget_bytes,
        why_not_batching=props.why_not_batching,
        prevents_sleep=props.prevents_sleep,
        members=await _members(spec) if is_owned else (),
    )


async def _members(spec: ServiceSpec) -> tuple[MemberStatus, ...]:
    """Phases of a gateway's members; empty for another service."""
    if not is_gateway(spec):
        return ()
    health = await _ask(spec.url, lambda client: client.get("/health", dict[str, Any])) or {}
    return tuple(MemberStatus(name, phase) for name, phase in health.get("members", {}).items())


async def running_props(url: str, preset: Preset) -> PropsResponse:
    """Properties of a running service; empty without an answer."""
    key = os.environ.get(KEY_VARIABLE) or usable_key(preset.server)
    return await _ask(url, Client.props, key) or NO_PROPS


async def _ask(url: str, ask: Callable[[Client], Awaitable[T]], key: str | None = None) -> T | None:
    """Answer of a service; None without one."""
    async with Client(url, key, timeout_s=PROBE_TIMEOUT_S) as client:
        with suppress(Unreachable, StackError):
            return await ask(client)
    return None


def _process(service: str, role: str, pid: int) -> ProcessStatus:
    """Status of a process. Raises psutil.Error."""
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return ProcessStatus(
            service=service,
            role=role,
            pid=pid,
            cpu_s=times.user + times.system,
            rss_bytes=held_bytes(pid),
            command=" ".join(process.cmdline())[:200],
        )
