"""Launches a preset: resolve, check, start, wait until healthy."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxstack.client import Client, HealthResponse, Unreachable
from mlxstack.config import overrides, presets
from mlxstack.config.overrides import Override
from mlxstack.control import memory_refusal, preflight
from mlxstack.core.errors import Broken, Taken
from mlxstack.core.preset import PARKING_S, Preset, ServerSpec
from mlxstack.host import hardware, services
from mlxstack.host.home import Home, make_home, make_private
from mlxstack.host.logs import tail
from mlxstack.host.process import free_port, reachable
from mlxstack.host.service_state import (
    Phase,
    RestartPolicy,
    ServiceSpec,
    ServiceState,
    owner,
    read_json,
    read_state,
    write_atomic,
    write_json,
)

log = logging.getLogger(__name__)
"""Warnings reach the stderr of a command, which configures no handler."""

WORKER_VARIABLE = "MLX_STACK_WORKER"
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Worker environment: unbuffered UTF-8 lines, no PyTorch warnings."""

SAVING_S = PARKING_S + 3.0
FAILED_START_PATIENCE_S = 2.0
PROBE_S = 0.1
LOG_LINE = re.compile(r"\S+ \S+ (?:(?:INFO|WARNING|ERROR) \S+|\[supervisor \d+\]) (.+)")
ERROR_LINE = re.compile(r"(?:error:|\S+ \S+ ERROR \S+) (.+)")
DOWNLOADING = "downloading "
"""Prefix of the log lines of a worker's load progress."""


class DerivedFile(Struct, frozen=True):
    """File of a derived preset, not written before its service starts."""

    path: Path
    text: str


class LaunchRequest(Struct, frozen=True):
    """Start request: preset name or path, `--set` texts, folder `cwd`.

    `file` is the preset itself, where it is derived from a model.
    """

    preset: str
    sets: tuple[str, ...]
    cwd: Path
    file: DerivedFile | None = None


def resolve(request: LaunchRequest, home: Home) -> presets.LoadedPreset:
    """The preset after the environment and the command line. Raises SetupError."""
    over: list[Override] = overrides.from_environment(os.environ)
    over += [overrides.from_option(text) for text in request.sets]
    if request.file is not None:
        return presets.load_text(request.file.text, request.file.path, home, over, request.cwd)
    return presets.load(request.preset, home, over, request.cwd)


def prepare(request: LaunchRequest, loaded: presets.LoadedPreset, home: Home) -> ServiceSpec:
    """Check a start, and write the worker's spec."""
    make_home(home)
    warn_of_variables()
    preset = _with_port(loaded.preset)
    preflight.check(preset, home)
    unchecked = memory_refusal.check_memory(preset, home, os.environ)
    if unchecked is not None:
        log.warning("warning: %s", unchecked)
    return write(request, preset, home)


def warn_of_variables() -> None:
    """Name `MLX_STACK_` variables that nothing reads, on stderr."""
    for warning in overrides.unread_variables(os.environ).values():
        log.warning("warning: %s", warning)


def write(request: LaunchRequest, preset: Preset, home: Home) -> ServiceSpec:
    """Write down what the worker is to serve."""
    if request.file is not None:
        make_private(request.file.path.parent)
        write_atomic(request.file.path, request.file.text.encode())
    write_json(home.preset_file(preset.name), preset)
    env = hardware.for_mlx(os.environ)
    return ServiceSpec(
        name=preset.name,
        root=str(home.root),
        preset=request.preset,
        url=url_of(preset.server),
        worker=(*_worker_command(), str(home.preset_file(preset.name))),
        env=env | {"MLX_STACK_HOME": str(home.root)} | QUIET,
        overrides=request.sets,
        cwd=str(request.cwd),
        n_slots=preset.slots.count,
        n_ctx=preset.slots.n_ctx,
        patience=RestartPolicy(grace_s=preset.server.drain_s + SAVING_S),
    )


def url_of(server: ServerSpec) -> str:
    """URL of the service for local clients."""
    host = reachable(server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def start(plan: ServiceSpec, timeout_s: float, progress: Callable[[str], None]) -> ServiceState:
    """Start in the background until healthy. Raises Broken.

    A download that goes on may take as long as it takes. Whatever goes wrong, Ctrl-C included,
    nothing is left running.
    """
    process = services.start(plan)
    try:
        return asyncio.run(_until_healthy(plan, process, timeout_s, progress))
    except BaseException:
        _abandon(plan, process)
        raise


def wait_for(
    state: ServiceState, timeout_s: float, progress: Callable[[str], None]
) -> ServiceState:
    """Wait until a service of another launch is healthy. Raises Broken."""
    return asyncio.run(_until_healthy(state.plan, None, timeout_s, progress))


async def _until_healthy(
    plan: ServiceSpec,
    process: "subprocess.Popen[bytes] | None",
    timeout_s: float,
    progress: Callable[[str], None],
) -> ServiceState:
    deadline, last_line = time.monotonic() + timeout_s, ""
    async with Client(plan.url, timeout_s=5.0) as client:
        while time.monotonic() < deadline:
            _raise_if_dead(plan, process)
            health = await probe(client)
            state = owner(plan.home, plan.name)
            if state is not None and state.worker is not None and health.is_ready:
                return state
            line = _last_line(plan)
            if _said(line).startswith(DOWNLOADING) and line != last_line:
                deadline, last_line = time.monotonic() + timeout_s, line
            progress(_said(line) or health.message)
            await asyncio.sleep(PROBE_S)
    raise Broken(
        f"`{plan.name}` was not healthy within {timeout_s:g} s (server.startup_timeout_s); "
        f"see its log {plan.home.log_file(plan.name)}"
    )


async def probe(client: Client) -> HealthResponse:
    """Health of a service; without an answer it is not ready."""
    try:
        return await client.health()
    except Unreachable as why:
        return HealthResponse(False, str(why))


def _raise_if_dead(plan: ServiceSpec, process: "subprocess.Popen[bytes] | None") -> None:
    log = plan.home.log_file(plan.name)
    if process is None:
        if owner(plan.home, plan.name) is None:
            raise Broken(f"`{plan.name}` ended while it was waited for; see its log {log}")
        return
    code = process.poll()
    state = _state_of(plan, process)
    if state is not None and state.n_crashes:
        raise Broken(_why(plan, state))
    if state is not None and state.phase is Phase.STOPPED:
        raise Broken(f"`{plan.name}` was stopped while it was starting")
    if code is not None:
        told = plan.home.supervisor_log(plan.name).read_text(errors="replace").strip()
        why = told.removeprefix("error: ") or f"exit code {code}; see {log}"
        raise Broken(f"the supervisor of `{plan.name}` ended at once: {why}")


def _state_of(plan: ServiceSpec, process: "subprocess.Popen[bytes]") -> ServiceState | None:
    """State that this supervisor wrote, not an earlier one."""
    state = read_state(plan.home, plan.name)
    return state if state is not None and state.supervisor.pid == process.pid else None


def _why(plan: ServiceSpec, state: ServiceState) -> str:
    words = state.last_log_lines
    said = [line for line in words if line.strip() and "[supervisor " not in line]
    errors = [found[1] for line in said if (found := ERROR_LINE.match(line))]
    log = plan.home.log_file(plan.name)
    if errors:
        return f"`{plan.name}` did not start: {errors[-1]}"
    shown = "\n  ".join(said[-8:]) or "(no output)"
    return (
        f"`{plan.name}` did not start: its worker {state.exit_summary}; "
        f"last log lines (full log: {log}):\n  {shown}"
    )


def _last_line(plan: ServiceSpec) -> str:
    lines = tail(plan.home.log_file(plan.name), 1)
    return lines[0].strip() if lines else ""


def _said(line: str) -> str:
    """A line of the log without its time and its logger."""
    found = LOG_LINE.match(line)
    return found[1] if found else line


def _abandon(plan: ServiceSpec, process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAILED_START_PATIENCE_S)
    state = _state_of(plan, process)
    if state is not None and state.phase not in {Phase.STOPPED, Phase.CRASHED}:
        services.finish(plan.home, state)
    process.kill()
    process.wait()


def _with_port(preset: Preset) -> Preset:
    if preset.server.port:
        return preset
    server = msgspec.structs.replace(preset.server, port=free_port(preset.server.host))
    return msgspec.structs.replace(preset, server=server)


def _worker_command() -> tuple[str, ...]:
    given = os.environ.get(WORKER_VARIABLE)
    if given:
        return tuple(shlex.split(given))
    return (sys.executable, "-m", "mlxstack.cli.main", "serve")


def refuse_other_model(state: ServiceState, request: LaunchRequest, preset: Preset) -> None:
    """Raise Taken where a running service serves another model.

    One that was started from the same preset may have been given another model by a swap.
    """
    name = state.plan.name
    if request.file is None and request.preset == state.plan.preset:
        return
    served = read_json(state.plan.home.preset_file(name), Preset)
    if served is not None and served.model.id != preset.model.id:
        wanted = request.preset if request.file is None else preset.model.id
        raise Taken(
            f"`{name}` is already running with the model {served.model.id}; start {wanted} under "
            f"another name (`mlx-stack up {wanted} --name NAME`), or stop the other one "
            f"(`mlx-stack down {name}`)"
        )


def already_running(state: ServiceState) -> Taken:
    """The refusal of a second start, naming the owner."""
    return Taken(
        f"`{state.plan.name}` is already running: supervisor pid {state.supervisor.pid}, preset "
        f"{state.plan.preset}, {state.plan.url}; `mlx-stack down {state.plan.name}` stops it"
    )
