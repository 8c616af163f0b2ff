"""`up` and `restart`: start a service and wait until it is healthy."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mlxstack.cli.completion import service_argument, service_option
from mlxstack.cli.exit_codes import Misuse, PipeClosed
from mlxstack.cli.output import as_json, note, say, spinner
from mlxstack.cli.start_choice import StartChoice
from mlxstack.cli.start_report import facts, report_gateway, report_service
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import Json

if TYPE_CHECKING:
    from mlxstack.config.presets import LoadedPreset
    from mlxstack.control.start import Started, StartRequest
    from mlxstack.control.supervisor import Supervisor
    from mlxstack.core.preset import Preset
    from mlxstack.host.home import Home
    from mlxstack.host.services import ServiceSpec, ServiceState
    from mlxstack.planner.derived_preset import DerivedPreset

COMPARED = ("model", "kind", "slots", "kv", "sampling", "speculation", "batch")
"""Sections of a preset that a running service is compared by."""

IfNeeded = Annotated[
    bool, typer.Option("--if-needed", help="With --foreground: succeed when it is already running.")
]


@finishes("foreground", "dry_run")
def up(
    choice: StartChoice,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run.")] = False,
    json: Json = False,
    if_needed: IfNeeded = False,
) -> None:
    """Start a service and wait until it is healthy.

    Several models, those of a mode, or by --any-model all on this disk get one address: a gateway.
    It starts each at the first request that names it, and unloads others where memory is short.

    Values are taken from the command line, then from variables such as MLX_STACK_SLOTS_COUNT,
    then from the preset, then from the preset that it extends.
    """
    from mlxstack.control import start
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    options = StartOptions(foreground, if_needed, json)
    choice.check()
    if choice.is_gateway:
        if dry_run:
            raise Misuse("--dry-run goes with one model")
        _up_gateway(choice, options)
        return
    [request] = choice.requests(home)
    loaded = start.resolve(request, home)
    if request.file is not None and not json:
        _show_reasons(request.file.preset)
    if dry_run:
        _show_resolved(loaded, json)
    elif not _is_member(home, request, loaded, json):
        _up_one(request, loaded, choice.port, options)


class StartOptions(NamedTuple):
    """Options of a start, whatever is started."""

    foreground: bool
    if_needed: bool
    json: bool

    @property
    def accepts_running(self) -> bool:
        """Whether a service that runs already is enough."""
        return self.if_needed or not self.foreground


def _is_member(home: "Home", request: "StartRequest", loaded: "LoadedPreset", json: bool) -> bool:
    """Print the gateway that has this name; False without one.

    With a port of its own it is to be another service.
    """
    from mlxstack.control.start import Started

    if any(setting.startswith("server.port=") for setting in request.sets):
        return False
    from mlxstack.cli.target import membership

    owner = membership(home, loaded.preset.name)
    if owner is None:
        return False
    if json:
        as_json(facts(Started(owner.gateway, 0.0)))
    else:
        spec = owner.gateway.spec
        say(f"{owner.member} is a member of `{spec.name}` at {spec.url}, started on request")
    return True


def _up_one(
    request: "StartRequest", loaded: "LoadedPreset", port: int | None, options: StartOptions
) -> None:
    """Start a service, or compare the running one."""
    from mlxstack.control import start
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    preset = loaded.preset
    timeout_s = preset.server.startup_timeout_s
    outcome = _start(
        home, preset.name, lambda: start.prepare(request, loaded, home), timeout_s, options
    )
    if isinstance(outcome, start.Started):
        report_service(outcome, preset, options.json)
        return
    start.refuse_other_model(outcome, request, preset)
    if not options.accepts_running or (port and not outcome.spec.url.endswith(f":{port}")):
        raise start.already_running(outcome)
    ready = start.wait_for(outcome, timeout_s)
    if options.json:
        as_json(facts(ready))
    else:
        say(f"{outcome.spec.name} is already running at {outcome.spec.url}")
    if remedy := _difference(outcome, preset, request.sets):
        note(f"warning: its settings differ; {remedy}")


def _start(
    home: "Home",
    name: str,
    prepare: "Callable[[], ServiceSpec]",
    timeout_s: float,
    options: StartOptions,
) -> "Started | ServiceState":
    """Start a service; the state of one that runs already."""
    import asyncio

    from mlxstack.host import services

    with services.starting(home, name, waits=options.accepts_running) as running:
        if running is not None:
            return running
        spec = prepare()
        if not options.foreground:
            return _started(spec, timeout_s)
        supervisor = _claimed(spec)
    raise typer.Exit(asyncio.run(supervisor.run()))


def _started(spec: "ServiceSpec", timeout_s: float) -> "Started":
    """Start in the background; what takes its time is told."""
    from mlxstack.control.start import worker

    try:
        with worker(spec) as wait, spinner(f"starting {spec.name}") as advance:
            return wait(timeout_s, advance)
    except KeyboardInterrupt:
        note(f"interrupted; {spec.name} is stopped")
        raise


def _up_gateway(choice: StartChoice, options: StartOptions) -> None:
    from mlxstack.config import modes
    from mlxstack.control import gateway, start
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    requests = choice.requests(home)
    name = choice.gateway_name

    def prepare() -> "ServiceSpec":
        start.warn_of_variables()
        planned = gateway.prepare(
            name, requests, home, of_disk=choice.any_model, **choice.listening
        )
        if choice.mode is not None:
            modes.mark_active(home, modes.Active(choice.mode, (name,)))
        return planned.service

    outcome = _start(home, name, prepare, gateway.READY_S, options)
    if isinstance(outcome, start.Started):
        report_gateway(outcome, options.json)
        return
    if not options.accepts_running:
        raise start.already_running(outcome)
    report_gateway(start.wait_for(outcome, gateway.READY_S), options.json)
    names = ", ".join(start.resolve(request, home).preset.name for request in requests)
    if outcome.spec.preset != names:
        note(f"warning: its members differ; `mlx-stack down {name}` first")


@finishes()
def restart(
    name: Annotated[str | None, service_argument("Service (default: the only one).")] = None,
    named: Annotated[str | None, service_option("Service (default: the only one).")] = None,
    json: Json = False,
) -> None:
    """Restart a service; its preset is read again."""
    from mlxstack.cli.target import known_service, one_name
    from mlxstack.control import gateway, start
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    spec = known_service(home, one_name(name, named)).spec
    if services.is_gateway(spec):
        with services.starting(home, spec.name, waits=True) as former:
            if former is not None:
                services.stop(home, former)
            report_gateway(_started(spec, gateway.READY_S), json)
        return
    request = start.StartRequest(spec.preset, spec.overrides, Path(spec.cwd))
    loaded = start.resolve(request, home)
    start.check_memory(loaded.preset, home)
    start.check_files(loaded.preset)
    with services.starting(home, spec.name, waits=True) as former:
        if former is not None:
            services.stop(home, former)
        spec = start.prepare(request, loaded, home)
        report_service(_started(spec, loaded.preset.server.startup_timeout_s), loaded.preset, json)


def _difference(owner: "ServiceState", preset: "Preset", sets: tuple[str, ...]) -> str:
    """Remedy for a running service with other settings, or ""."""
    from mlxstack.core.preset import Preset
    from mlxstack.host.services import read_json

    spec = owner.spec
    served = read_json(spec.home.preset_file(spec.name), Preset)
    if served is None or all(
        getattr(served, section) == getattr(preset, section) for section in COMPARED
    ):
        return ""
    if sets == spec.overrides:
        return f"`mlx-stack restart {spec.name}` reads them again"
    return f"`mlx-stack down {spec.name}`, then `up` again, takes these"


def _claimed(spec: "ServiceSpec") -> "Supervisor":
    """A supervisor in this process that has the name already."""
    from mlxstack.control.supervisor import Supervisor
    from mlxstack.host.logs import rotate

    # Only units write there in the foreground, and they append for ever.
    rotate(spec.home.supervisor_log(spec.name))
    note(f"{spec.name} will be at {spec.url}; Ctrl-C stops it")
    os.umask(0o077)
    supervisor = Supervisor(spec, echo=_echo)
    supervisor.claim()
    return supervisor


def _echo(line: str) -> None:
    """Print a log line; where nothing reads it, stop the service."""
    from mlxstack.host.log_lines import for_people, read

    try:
        say(for_people(read(line)))
    except PipeClosed:
        os.kill(os.getpid(), signal.SIGTERM)


def _show_resolved(loaded: "LoadedPreset", json: bool) -> None:
    import msgspec
    import yaml

    if json:
        as_json(loaded)
        return
    builtins = msgspec.to_builtins(loaded.preset)
    say(yaml.safe_dump(builtins, sort_keys=False, allow_unicode=True), nl=False)
    for key, origin in loaded.origins.items():
        say(f"# {key}: {origin}")


def _show_reasons(derived: "DerivedPreset") -> None:
    from mlxstack.cli.plan_tables import show_reasons

    show_reasons(derived)
