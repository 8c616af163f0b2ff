"""`install` and `uninstall`: services started at login by launchd or systemd."""

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import failed_if
from mlxstack.cli.output import emit, note
from mlxstack.cli.places import HOME, PLACES, absolute
from mlxstack.cli.start_choice import StartChoice
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from mlxstack.control.service_units import ServiceUnit
    from mlxstack.control.start import StartRequest
    from mlxstack.core.preset import Preset
    from mlxstack.host.home import Home

PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
KEPT_VARIABLES = (
    "PATH", *PLACES, *PROXIES, *map(str.lower, PROXIES), "HF_ENDPOINT", "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_XET", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT", "TRANSFORMERS_OFFLINE",
    "MLX_STACK_MEMORY", "MLX_STACK_CPU",
)  # fmt: skip
"""Variables of the shell that a unit, which has none of them, gets."""
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLX_STACK_PEER_KEY", "MLX_STACK_SERVER_API_KEYS")
"""Variables for the unit's file, which only its owner reads, and not for `--print`."""

PROBE_S = 0.2
KILL_S = 5.0
"""Seconds of launchd to kill a job after its timeout."""

RUN_FAULTS = (FileNotFoundError, subprocess.TimeoutExpired)

Service = Annotated[str, preset_argument("The service's name, or its preset.")]


@finishes("show")
def install(
    choice: StartChoice,
    show: Annotated[bool, typer.Option("--print", help="Print the unit only.")] = False,
) -> VerbResult:
    """Start a service at every login, by launchd or systemd.

    It takes the models and options of `up`: several models, those of a mode or all on this disk
    get one address, a gateway.
    """
    from mlxstack.control import start
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    choice.check()
    requests = choice.requests(home)
    presets = [start.resolve(request, home).preset for request in requests]
    unit = _unit(choice, presets, home, is_printed=show)
    if show:
        if left := [name for name in (*SECRETS, *KEPT_VARIABLES) if _is_secret(name)]:
            note(f"without {', '.join(left)}, which only the installed file holds")
        note(unit.remark)
        return VerbResult(unit, lambda: emit(unit.text))
    if choice.is_gateway:
        _write_gateway(unit, choice, requests, home)
    else:
        _write(unit, presets[0], home)
    failed = _first_failure(unit.start)
    note(unit.remark)
    text = ""
    if failed is None:
        remedy = f"remove it with `mlx-stack uninstall {unit.name}`"
        text = f"{unit.path} is written and started; {remedy}"
    else:
        note(f"warning: {unit.path} is written, but not started: {failed}")
    facts = {"path": str(unit.path), "started": failed is None, "failed": failed}
    return VerbResult(facts, text, failed_if(failed is not None))


@finishes()
def uninstall(service: Service) -> VerbResult:
    """Stop an installed service and remove its unit."""
    unit = _installed(service)
    failed = _stop(unit)
    unit.path.unlink()
    if failed is not None:
        note(f"warning: it may still run: {failed}")
    facts = {"path": str(unit.path), "stopped": failed is None, "failed": failed}
    return VerbResult(facts, f"{unit.path} is removed")


def _write(unit: "ServiceUnit", preset: "Preset", home: "Home") -> None:
    """Write the unit of one model.

    Raises SetupError and Taken where `up` would: nothing starts such a unit again.
    """
    from mlxstack.control import start

    start.check_memory(preset, home)
    start.check_files(preset)

    def check_free() -> None:
        if preset.server.port:
            start.check_port(preset.server, home)

    _replace_unit(unit, home, check_free)


def _write_gateway(
    unit: "ServiceUnit", choice: StartChoice, requests: "list[StartRequest]", home: "Home"
) -> None:
    """Write the unit of a gateway. Raises SetupError, Taken."""
    from mlxstack.control import gateway, start

    room = gateway.room_of(unit.name, home)
    plan = gateway.plan(
        unit.name, requests, home, room, of_disk=choice.any_model, **choice.listening
    )
    for member in plan.members:
        start.check_files(member.preset)
    _replace_unit(unit, home, lambda: gateway.check_free(plan, home))


def _replace_unit(unit: "ServiceUnit", home: "Home", check_free: Callable[[], None]) -> None:
    """Write the unit file (0600) after stopping the older unit's service.

    Raises Taken for a service of this name that no unit started, and what `check_free` raises.
    """
    from mlxstack.control import start
    from mlxstack.host import services

    start.warn_of_variables()
    if unit.path.exists():
        _stop(unit)
    with services.starting(home, unit.name, waits=True) as running:
        if running is not None:
            raise start.already_running(running)
    check_free()
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    services.write_private(unit.path, unit.text.encode())


def _stop(unit: "ServiceUnit") -> str | None:
    """Stop the service and wait; returns a failure's reason, else None."""
    from mlxstack.control.service_units import exit_timeout_s

    failed = _first_failure(unit.stop)
    if not unit.probe:
        return failed
    timeout_s = exit_timeout_s(unit.path) + KILL_S
    deadline = time.monotonic() + timeout_s
    while _run(unit.probe) is None:
        if time.monotonic() > deadline:
            return failed or f"it has not ended within {timeout_s:g} s"
        time.sleep(PROBE_S)
    return None


def _installed(service: str) -> "ServiceUnit":
    """Unit of a service, by its name, its preset or its model."""
    from mlxstack.control.service_units import LoginJob, unit_of
    from mlxstack.core.errors import NotFound

    names = _service_names(service)
    units = [unit_of(LoginJob(name, (), "", {}, "", 0.0), os.environ) for name in names]
    for unit in units:
        if unit.path.exists():
            return unit
    path = units[0].path
    files = ", ".join(sorted(file.name for file in path.parent.glob("mlx-stack*")))
    installed = "nothing is installed"
    if files:
        installed = f"installed: {files}"
    raise NotFound(f"`{service}` is not installed: there is no {path}; {installed}")


def _service_names(service: str) -> list[str]:
    """Possible service names of a preset or model, which may be gone."""
    from mlxstack.config import presets
    from mlxstack.control import start
    from mlxstack.core.errors import SetupError
    from mlxstack.host.home import home_from
    from mlxstack.models.reference import service_name

    home = home_from(os.environ)
    is_file = service.endswith(presets.ENDINGS)
    name = service_name(Path(service).stem if is_file else Path(service).name)
    if not presets.is_known(service, home):
        return [name]
    try:
        request = start.StartRequest(service, (), Path.cwd())
        own = start.resolve(request, home).preset.name
    except SetupError:
        return [name]
    if is_file:
        return [own, name]
    return [name, own]


def _unit(
    choice: StartChoice, presets: "list[Preset]", home: "Home", *, is_printed: bool
) -> "ServiceUnit":
    """Unit that runs `up --foreground` with this choice and its variables.

    Paths in settings are relative to the folder of the installation.
    """
    from mlxstack.config.overrides import variables
    from mlxstack.control import gateway
    from mlxstack.control.service_units import LoginJob, unit_of
    from mlxstack.control.start import SAVING_S

    over = [name for name in variables() if name in os.environ]
    kept = (*KEPT_VARIABLES, *SECRETS, *over, *([HOME] if _is_other_home() else ()))
    inherited = [name for name in kept if name in os.environ]
    env = {name: _kept_value(name) for name in inherited if not (is_printed and _is_secret(name))}
    drains_s = [preset.server.drain_s for preset in presets]
    name = presets[0].name
    stop_s = drains_s[0] + SAVING_S
    if choice.is_gateway:
        name = choice.gateway_name
        stop_s = gateway.grace_s(drains_s[0], [drain_s + SAVING_S for drain_s in drains_s])
    up = (sys.executable, "-m", "mlxstack.cli.main", "up")
    job = LoginJob(
        name=name,
        command=(*up, *choice.arguments(home), "--foreground"),
        cwd=str(Path.cwd() if choice.sets or over else home.root),
        env={"MLX_STACK_HOME": str(home.root), **env},
        log=str(home.supervisor_log(name)),
        stop_s=stop_s,
    )
    return unit_of(job, os.environ)


def _is_secret(name: str) -> bool:
    """Whether a variable is set and may hold a secret."""
    value = os.environ.get(name)
    is_proxy = name.upper() in PROXIES
    return value is not None and (name in SECRETS or (is_proxy and "@" in value))


def _kept_value(name: str) -> str:
    """Value of a variable for a unit, with an absolute path."""
    value = os.environ[name]
    if name == "PATH":
        folders = dict.fromkeys(value.split(os.pathsep))
        rooted = (folder for folder in folders if folder.startswith("/"))
        return os.pathsep.join(folder for folder in rooted if Path(folder).is_dir())
    if name in PLACES and value:
        return absolute(value)
    return value


def _is_other_home() -> bool:
    """Whether HOME is another one than the user's."""
    try:
        own = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return HOME in os.environ
    return os.environ.get(HOME, own) != own


def _first_failure(commands: tuple[tuple[str, ...], ...]) -> str | None:
    """Run commands in order; the message of the first failure, else None."""
    for command in commands:
        failure = _run(command)
        if failure is not None:
            return f"`{' '.join(command)}`: {failure}"
    return None


def _run(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except RUN_FAULTS as error:
        return str(error)
    output = (done.stderr or done.stdout).strip()
    if done.returncode == 0:
        return None
    return output or f"exit code {done.returncode}"
