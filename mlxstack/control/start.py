"""Start of a service: resolve, check, write its spec, wait until healthy."""

import asyncio
import errno
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.client.client import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.types import HealthResponse
from mlxstack.config import overrides, presets
from mlxstack.config.presets import BUILTIN_MODEL, LoadedPreset, is_folder
from mlxstack.core.errors import BadRequest, DoesNotFit, SetupError, Taken
from mlxstack.core.preset import PARKING_S, Preset, ServerSpec
from mlxstack.host import log_lines, services
from mlxstack.host.hardware import for_mlx, this_memory
from mlxstack.host.home import Home, make_folder, make_home
from mlxstack.host.log_lines import SUPERVISOR, for_people
from mlxstack.host.process import free_port, listener, reachable, refusal
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import (
    Phase,
    ServiceSpec,
    ServiceState,
    last_error,
    owner,
    read_json,
    state_of,
    until_answered,
    write_json,
    write_private,
)
from mlxstack.models import reference
from mlxstack.models.folder_check import check_startable, check_weights
from mlxstack.planner import fit
from mlxstack.planner.candidate import Candidate, of_preset
from mlxstack.planner.derived_preset import DerivedPreset, derive, text_of
from mlxstack.planner.fit import as_sets
from mlxstack.planner.memory_room import MemoryRoom, room_in
from mlxstack.planner.ranking import proposal
from mlxstack.policy.memory.capacity_advice import SlotSizes

log = logging.getLogger(__name__)
"""Warnings reach the stderr of a command, which configures no handler."""

WORKER_VARIABLE = "MLX_STACK_WORKER"
QUIET = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""Worker environment: unbuffered UTF-8 lines, no PyTorch warnings."""

SAVING_S = PARKING_S + 3.0
FAILED_START_PATIENCE_S = 2.0
HEADER = (
    "# Derived from {id} for this machine. `mlx-stack presets new NAME --from {id}` keeps it.\n"
)


class DerivedFile(Struct, frozen=True):
    """File of a derived preset, not written before its service starts."""

    path: Path
    text: str
    preset: DerivedPreset


class StartRequest(Struct, frozen=True):
    """Request to start a service."""

    preset: str
    """Name or path."""
    sets: tuple[str, ...]
    """Texts of `--set`."""
    cwd: Path
    """Folder from which relative paths start."""
    file: DerivedFile | None = None
    """The preset itself, where it is derived from a model."""


class Started(Struct, frozen=True):
    """Service that answers, after so many `seconds`."""

    state: ServiceState
    seconds: float


Progress = Callable[[str], None]
Wait = Callable[[float, Progress], Started]


def request_for(
    source: str, home: Home, fixed: SlotSizes, sets: tuple[str, ...] = ()
) -> StartRequest:
    """Request for a preset, listed or derived from a model. Raises SetupError.

    A derived preset is written when it starts, and has the name of its service: two models of one
    name have a file each. A model that runs already under its name keeps its preset.
    """
    if presets.is_known(source, home):
        preset = presets.from_anywhere(source)
        return StartRequest(preset, (*as_sets(fixed), *sets), Path.cwd())
    model = reference.resolve(source, home)
    name = _name_in(sets) or model.name
    path = home.derived_presets / f"{name}.yaml"
    is_found = presets.file_of(name, home) in (None, path)
    preset = name if is_found else str(path)
    running = services.served(home).get(name)
    if path.is_file() and running is not None and running.model.id == model.id:
        # A restart reads the file.
        return StartRequest(preset, (*as_sets(fixed), *sets), Path.cwd())
    room = room_in(home, this_memory(os.environ), name)
    derived = derive(model, home, room, fixed)
    derived = replace(derived, preset=replace(derived.preset, name=name))
    text = HEADER.format(id=model.id) + text_of(derived)
    return StartRequest(preset, sets, Path.cwd(), DerivedFile(path, text, derived))


def resolve(request: StartRequest, home: Home) -> LoadedPreset:
    """The preset after the environment and the command line. Raises SetupError."""
    over = overrides.given_overrides(os.environ, request.sets)
    if request.file is not None:
        return presets.load_text(request.file.text, request.file.path, home, over, request.cwd)
    return presets.load(request.preset, home, over, request.cwd)


def prepare(request: StartRequest, loaded: LoadedPreset, home: Home) -> ServiceSpec:
    """Check a start, and write the worker's spec. Raises SetupError, Taken."""
    make_home(home)
    warn_of_variables()
    preset = loaded.preset
    if not preset.server.port:
        server = replace(preset.server, port=free_port(preset.server.host))
        preset = replace(preset, server=server)
    check_files(preset)
    check_port(preset.server, home)
    check_memory(preset, home)
    return write(request, preset, home)


def write(request: StartRequest, preset: Preset, home: Home) -> ServiceSpec:
    """Write down what the worker is to serve."""
    if request.file is not None:
        make_folder(request.file.path.parent)
        write_private(request.file.path, request.file.text.encode())
    write_json(home.preset_file(preset.name), preset)
    return spec_of(request, preset, home)


def spec_of(request: StartRequest, preset: Preset, home: Home) -> ServiceSpec:
    """Spec of the service of a preset that is written down."""
    return ServiceSpec(
        name=preset.name,
        root=str(home.root),
        preset=request.preset,
        url=url_of(preset.server),
        worker=(*_worker_command(), str(home.preset_file(preset.name))),
        env=for_mlx(os.environ) | {"MLX_STACK_HOME": str(home.root)} | QUIET,
        overrides=request.sets,
        cwd=str(request.cwd),
        n_slots=preset.slots.count,
        n_ctx=preset.slots.n_ctx,
        policy=RestartPolicy(grace_s=preset.server.drain_s + SAVING_S),
    )


def url_of(server: ServerSpec) -> str:
    """URL of the service for local clients."""
    host = reachable(server.host)
    if ":" in host:
        return f"http://[{host}]:{server.port}"
    return f"http://{host}:{server.port}"


def _worker_command() -> tuple[str, ...]:
    command = os.environ.get(WORKER_VARIABLE)
    if command:
        return tuple(shlex.split(command))
    return (sys.executable, "-m", "mlxstack.cli.main", "serve")


def warn_of_variables() -> None:
    """Name `MLX_STACK_` variables that nothing reads, on stderr."""
    for warning in overrides.unread_variables(os.environ).values():
        log.warning("warning: %s", warning)


def check_files(preset: Preset) -> None:
    """Check model, drafts and adapter, and that the slot folder is writable.

    Hub ids are checked by their form. Raises SetupError.
    """
    model = preset.model
    for key, model_id in (("id", model.id), ("draft", model.draft), ("mtp", model.mtp)):
        if model_id is not None:
            _check_model_id(f"model.{key}", model_id)
    if model.adapter is not None:
        _check_adapter_folder(Path(model.adapter))
    folder = Path(preset.slots.save_path or ".")
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except SetupError as error:
        raise SetupError(f"slots.save_path: {error.message}") from error
    except OSError as error:
        raise SetupError(
            f"slots.save_path: {folder} cannot be written to ({error.strerror})"
        ) from error


def check_port(server: ServerSpec, home: Home) -> None:
    """Check that the port is free, else name process and remedy."""
    error = refusal(server.host, server.port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise SetupError(
            f"server: nothing can listen on {server.host}:{server.port} ({error.strerror}); "
            "choose another --host or --port"
        )
    for state in services.running(home):
        if state.spec.url.endswith(f":{server.port}"):
            raise Taken(
                f"port {server.port} is taken by the service `{state.spec.name}` "
                f"(pid {state.supervisor.pid}); stop it with `mlx-stack down {state.spec.name}`, "
                "or choose another port with --port"
            )
    who = listener(server.port) or "another program"
    raise Taken(
        f"{server.host}:{server.port} cannot be used: port {server.port} is taken by {who}; "
        "end that, or choose another port with --port"
    )


def check_memory(preset: Preset, home: Home) -> None:
    """Check that a preset fits beside what runs.

    Raises SetupError, naming presets that fit. A model of unknown needs passes, with a warning.
    """
    room = room_in(home, this_memory(os.environ), preset.name)
    try:
        candidate = of_preset(preset)
    except (SetupError, BadRequest) as error:
        unknown: str | None = error.message
    else:
        unknown = _refuse_if_too_big(candidate, room, home)
    if unknown:
        log.warning(
            "warning: whether `%s` fits into memory is not checked: %s", preset.name, unknown
        )


def _refuse_if_too_big(candidate: Candidate, room: MemoryRoom, home: Home) -> str | None:
    try:
        return fit.refuse_if_too_big(candidate, room)
    except DoesNotFit as error:
        left = replace(room.memory, usable=room.free)
        raise SetupError(f"{error.message}\n{proposal(home, left)}") from error


def _check_model_id(key: str, model_id: str) -> None:
    if not is_folder(model_id):
        if model_id != BUILTIN_MODEL and model_id.count("/") != 1:
            raise SetupError(
                f"{key} is `{model_id}`, but must be `{BUILTIN_MODEL}`, a folder that starts with "
                "`/`, `./` or `~/`, or a hub id such as `mlx-community/name`"
            )
        return
    folder = Path(model_id)
    if not folder.is_dir():
        raise SetupError(f"{key}: there is no folder {folder}; download the model, or correct it")
    try:
        check_startable(folder)
        check_weights(folder)
    except SetupError as error:
        raise SetupError(f"{key}: {error.message}") from error


def _check_adapter_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SetupError(f"model.adapter: there is no folder {folder}")
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).is_file():
            raise SetupError(
                f"model.adapter: {folder} holds no {name}; give the folder that "
                "`mlx_lm.lora --adapter-path` wrote"
            )


def _name_in(sets: tuple[str, ...]) -> str | None:
    """Valid service name that variables or options give."""
    over = overrides.given_overrides(os.environ, sets)
    names = [override.raw for override in over if override.keys == ("name",)]
    if names and presets.NAME.fullmatch(names[-1]):
        return names[-1]
    return None


@contextmanager
def worker(spec: ServiceSpec) -> Iterator[Wait]:
    """Supervisor that starts a worker, to wait for; a failure, Ctrl-C too, ends it.

    The wait raises Broken.
    """
    began = time.monotonic()
    process = services.start(spec)

    def wait(timeout_s: float, progress: Progress) -> Started:
        why_ended = partial(_why_ended, spec, process)
        state = asyncio.run(_until_healthy(spec, why_ended, timeout_s, progress))
        return Started(state, time.monotonic() - began)

    try:
        yield wait
    except BaseException:
        _abandon(spec, process)
        raise


def start(spec: ServiceSpec, timeout_s: float, progress: Progress) -> Started:
    """Start in the background until healthy. Raises Broken, with nothing left running."""
    with worker(spec) as wait:
        return wait(timeout_s, progress)


def wait_for(state: ServiceState, timeout_s: float) -> Started:
    """Wait until a service of another start is healthy. Raises Broken."""
    spec = state.spec
    began = time.monotonic()

    def why_ended() -> str:
        if owner(spec.home, spec.name) is not None:
            return ""
        log_file = spec.home.log_file(spec.name)
        return f"`{spec.name}` ended while it was waited for; see its log {log_file}"

    healthy = asyncio.run(_until_healthy(spec, why_ended, timeout_s, lambda _: None))
    return Started(healthy, time.monotonic() - began)


def _abandon(spec: ServiceSpec, process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(FAILED_START_PATIENCE_S)
    state = state_of(spec, process)
    if state is not None and state.phase not in {Phase.STOPPED, Phase.CRASHED}:
        services.finish(spec.home, state)
    process.kill()
    process.wait()


def _why_ended(spec: ServiceSpec, process: "subprocess.Popen[bytes]") -> str:
    """Reason for the end of a start; "" while it goes on."""
    code = process.poll()
    state = state_of(spec, process)
    if state is not None and state.n_crashes:
        return _why_crashed(spec, state)
    if state is not None and state.phase is Phase.STOPPED:
        return f"`{spec.name}` was stopped while it was starting"
    if code is None:
        return ""
    output = spec.home.supervisor_log(spec.name).read_text(errors="replace").strip()
    reason = (
        output.removeprefix("error: ") or f"exit code {code}; see {spec.home.log_file(spec.name)}"
    )
    return f"the supervisor of `{spec.name}` ended at once: {reason}"


async def _until_healthy(
    spec: ServiceSpec, why_ended: Callable[[], str], timeout_s: float, progress: Progress
) -> ServiceState:
    async with Client(spec.url, timeout_s=5.0) as client:
        health = HealthResponse(is_ready=False, message="")

        async def ask() -> ServiceState | None:
            nonlocal health
            try:
                health = await client.health()
            except Unreachable as error:
                health = HealthResponse(False, str(error))
            state = owner(spec.home, spec.name)
            is_here = state is not None and state.worker is not None
            if is_here and health.is_ready:
                return state
            return None

        return await until_answered(
            spec, ask, why_ended, timeout_s, lambda line: progress(line or health.message)
        )


def _why_crashed(spec: ServiceSpec, state: ServiceState) -> str:
    if error := last_error(state):
        return f"`{spec.name}` did not start: {error}"
    lines = map(log_lines.read, state.last_log_lines)
    messages = [
        for_people(line) for line in lines if line.message.strip() and line.source != SUPERVISOR
    ]
    text = "\n  ".join(messages[-8:]) or "(no output)"
    return (
        f"`{spec.name}` did not start: its worker {state.exit_summary}; "
        f"last log lines (full log: {spec.home.log_file(spec.name)}):\n  {text}"
    )


def refuse_other_model(state: ServiceState, request: StartRequest, preset: Preset) -> None:
    """Raise Taken where a running service serves another model.

    One that was started from the same preset may have been given another model by a swap.
    """
    name = state.spec.name
    if request.file is None and request.preset == state.spec.preset:
        return
    served = read_json(state.spec.home.preset_file(name), Preset)
    if served is not None and served.model.id != preset.model.id:
        new = preset.model.id
        if request.file is None:
            new = request.preset
        raise Taken(
            f"`{name}` is already running with the model {served.model.id}; start {new} under "
            f"another name (`mlx-stack up {new} --name NAME`), or stop the other one "
            f"(`mlx-stack down {name}`)"
        )


def already_running(state: ServiceState) -> Taken:
    """The refusal of a second start, naming the owner."""
    return Taken(
        f"`{state.spec.name}` is already running: supervisor pid {state.supervisor.pid}, preset "
        f"{state.spec.preset}, {state.spec.url}; `mlx-stack down {state.spec.name}` stops it"
    )
