"""`up` and `restart`: start a service and wait until it is healthy."""

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlxstack.cli.completion import preset_argument, preset_names, service_argument, service_option
from mlxstack.cli.exit_codes import Misuse, PipeClosed
from mlxstack.cli.output import as_json, note, say, spinner
from mlxstack.cli.streams import finishes
from mlxstack.cli.units import tokens_of
from mlxstack.cli.verbs import Json

if TYPE_CHECKING:
    from mlxstack.config.presets import LoadedPreset
    from mlxstack.control.start import Started, StartRequest
    from mlxstack.control.supervisor import Supervisor
    from mlxstack.core.preset import Preset
    from mlxstack.host.home import Home
    from mlxstack.host.services import ServiceSpec, ServiceState
    from mlxstack.planner.derived_preset import DerivedPreset

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as slots.count=5."),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx", metavar="TOKENS", parser=tokens_of, help="Context per slot, such as 64k."
    ),
]
Slots = Annotated[int | None, typer.Option("--slots", min=1, max=256, help="Number of slots.")]
KvBits = Annotated[int | None, typer.Option("--kv-bits", help="KV precision: 16, 8 or 4.")]
COMPARED = ("model", "kind", "slots", "kv", "sampling", "speculation", "batch")
"""Sections of a preset that a running service is compared by."""

ONE_MODEL = "--ctx, --slots, --kv-bits, --draft, --hosts and --dry-run"
FRONT = "gateway"
"""Name of a gateway that has none."""

TEXT = '{"prompt": "The capital of France is", "max_tokens": 60}'
CHAT = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}'


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Preset, hub id or folder to start first, where it is not running.",
        autocompletion=preset_names,
    ),
]


Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="MODEL", help="Small model that drafts for this one."),
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help="The members of this mode, at one address.")
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Every model on this disk, at one address.")
]
IfNeeded = Annotated[
    bool, typer.Option("--if-needed", help="With --foreground: succeed when it is already running.")
]
HostsOption = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Machines that compute it together, this one first."),
]


@finishes("foreground", "dry_run")
def up(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    models: Annotated[
        list[str] | None,
        preset_argument("Preset, hub id or model folder. Several get one address.", "MODEL"),
    ] = None,
    mode: ModeOption = None,
    any_model: AnyModel = False,
    ctx: Ctx = None,
    slots: Slots = None,
    kv_bits: KvBits = None,
    draft: Draft = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the service.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    hosts: HostsOption = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run.")] = False,
    sets: Set = None,
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
    from mlxstack.policy.memory.capacity_advice import SlotSizes

    home, models = home_from(os.environ), models or []
    options = StartOptions(foreground, if_needed, json)
    if bool(models or any_model) == (mode is not None):
        raise Misuse("give a preset, hub id or model folder, a mode with --mode, or --any-model")
    if any_model or len(models) != 1:
        if ctx or slots or kv_bits or draft or hosts or dry_run:
            raise Misuse(f"{ONE_MODEL} go with one model")
        front = Front(name or mode or FRONT, mode, host, port, any_model)
        _up_gateway(front, models, tuple(sets or ()), options)
        return
    texts = _settings(
        {"server.host": host, "server.port": port, "name": name, "model.draft": draft}, hosts
    )
    sizes = SlotSizes(slots, ctx, kv_bits)
    request = start.request_for(models[0], home, sizes, (*(sets or ()), *texts))
    loaded = start.resolve(request, home)
    if request.file is not None and not json:
        _show_reasons(request.file.preset)
    if dry_run:
        _show_resolved(loaded, json)
    elif not _is_member(home, request, loaded, json):
        _up_one(request, loaded, port, options)


class StartOptions(NamedTuple):
    """Options of a start, whatever is started."""

    foreground: bool
    if_needed: bool
    json: bool

    @property
    def accepts_running(self) -> bool:
        """Whether a service that runs already is enough."""
        return self.if_needed or not self.foreground


def _is_member(home: "Home", wanted: "StartRequest", loaded: "LoadedPreset", json: bool) -> bool:
    """Print the gateway that has this name; False without one.

    With a port of its own it is to be another service.
    """
    from mlxstack.control.start import Started

    if any(one.startswith("server.port=") for one in wanted.sets):
        return False
    from mlxstack.cli.target import membership

    found = membership(home, loaded.preset.name)
    if found is None:
        return False
    if json:
        as_json(_facts(Started(found.gateway, 0.0)))
    else:
        plan = found.gateway.plan
        say(f"{found.member} is a member of `{plan.name}` at {plan.url}, started on request")
    return True


def _settings(given: dict[str, str | int | None], hosts: str | None) -> list[str]:
    """Options as settings, as `--set` takes them; a draft model switches drafts on."""
    texts = [f"{key}={value}" for key, value in given.items() if value is not None]
    if given["model.draft"] is not None:
        texts.append("speculation=auto")
    return texts if hosts is None else [*texts, f"hosts=[{hosts}]"]


def _up_one(
    request: "StartRequest", loaded: "LoadedPreset", port: int | None, options: StartOptions
) -> None:
    """Start a service, or compare the running one."""
    from mlxstack.control import start
    from mlxstack.host.home import home_from

    home, preset = home_from(os.environ), loaded.preset
    timeout_s = preset.server.startup_timeout_s
    found = _start(
        home, preset.name, lambda: start.prepare(request, loaded, home), timeout_s, options
    )
    if isinstance(found, start.Started):
        _report(found, preset, options.json)
        return
    start.refuse_other_model(found, request, preset)
    if not options.accepts_running or (port and not found.plan.url.endswith(f":{port}")):
        raise start.already_running(found)
    there = start.wait_for(found, timeout_s)
    if options.json:
        as_json(_facts(there))
    else:
        say(f"{found.plan.name} is already running at {found.plan.url}")
    if remedy := _difference(found, preset, request.sets):
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
        plan = prepare()
        if not options.foreground:
            return _started(plan, timeout_s)
        supervisor = _claimed(plan)
    raise typer.Exit(asyncio.run(supervisor.run()))


def _started(plan: "ServiceSpec", timeout_s: float) -> "Started":
    """Start in the background; what takes its time is told."""
    from mlxstack.control.start import worker

    try:
        with worker(plan) as wait, spinner(f"starting {plan.name}") as advance:
            return wait(timeout_s, advance)
    except KeyboardInterrupt:
        note(f"interrupted; {plan.name} is stopped")
        raise


class Front(NamedTuple):
    """Start request of a gateway."""

    name: str
    mode: str | None
    host: str | None
    port: int | None
    is_any: bool = False


def _wanted(
    front: Front, models: list[str], sets: tuple[str, ...], home: "Home"
) -> "list[StartRequest]":
    """Start requests of a gateway's members."""
    from mlxstack.control import gateway, mode_switch
    from mlxstack.control.start import request_for
    from mlxstack.policy.memory.capacity_advice import SlotSizes

    if front.mode is not None:
        if sets:
            raise Misuse(
                "--set goes with models; the options of a mode's members are in the mode's file"
            )
        return mode_switch.requests_of(front.mode, home)
    if front.is_any:
        found = gateway.find_all(home, models, sets)
        for name, why in found.left_out.items():
            note(f"left out: {name}: {why}")
        return list(found.wanted)
    return [request_for(one, home, SlotSizes(), sets) for one in models]


def _up_gateway(
    front: Front, models: list[str], sets: tuple[str, ...], options: StartOptions
) -> None:
    from mlxstack.config import modes
    from mlxstack.control import gateway, start
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    wanted = _wanted(front, models, sets, home)
    given = {"host": front.host, "port": front.port, "strict_models": front.is_any or None}
    listening: dict[str, Any] = {key: value for key, value in given.items() if value is not None}

    def prepare() -> "ServiceSpec":
        start.warn_of_variables()
        plan = gateway.prepare(front.name, wanted, home, of_disk=front.is_any, **listening)
        if front.mode is not None:
            modes.mark_active(home, modes.Active(front.mode, (front.name,)))
        return plan.service

    found = _start(home, front.name, prepare, gateway.READY_S, options)
    if isinstance(found, start.Started):
        _tell_gateway(found, options.json)
        return
    if not options.accepts_running:
        raise start.already_running(found)
    _tell_gateway(start.wait_for(found, gateway.READY_S), options.json)
    names = ", ".join(start.resolve(one, home).preset.name for one in wanted)
    if found.plan.preset != names:
        note(f"warning: its members differ; `mlx-stack down {front.name}` first")


def _tell_gateway(started: "Started", json: bool) -> None:
    plan = started.state.plan
    if json:
        as_json(_facts(started))
        return
    first, *others = plan.preset.split(", ")
    say(f"{plan.name} is ready at {plan.url} after {started.seconds:.1f} s")
    say(f"  {first} answers requests without a model; others: {', '.join(others) or 'none'}")


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
    plan = known_service(home, one_name(name, named)).plan
    if services.is_gateway(plan):
        with services.starting(home, plan.name, waits=True) as former:
            if former is not None:
                services.stop(home, former)
            _tell_gateway(_started(plan, gateway.READY_S), json)
        return
    wanted = start.StartRequest(plan.preset, plan.overrides, Path(plan.cwd))
    loaded = start.resolve(wanted, home)
    start.check_memory(loaded.preset, home)
    start.check_files(loaded.preset)
    with services.starting(home, plan.name, waits=True) as former:
        if former is not None:
            services.stop(home, former)
        plan = start.prepare(wanted, loaded, home)
        _report(_started(plan, loaded.preset.server.startup_timeout_s), loaded.preset, json)


def _report(started: "Started", preset: "Preset", json: bool) -> None:
    """Print a started service, its warnings, and a first request."""
    import asyncio

    from mlxstack.control.probe import running_props
    from mlxstack.core.formatting import tokens
    from mlxstack.core.preset import ServiceKind

    plan = started.state.plan
    props = asyncio.run(running_props(plan.url, preset))
    if json:
        notes = {"why_not_batching": props.why_not_batching, "template_notes": props.template_notes}
        as_json(_facts(started) | notes)
        return
    agents = "1 agent" if plan.n_slots == 1 else f"{plan.n_slots} agents"
    say(
        f"{plan.name} is ready at {plan.url} after {started.seconds:.1f} s "
        f"({agents} at once, {tokens(plan.n_ctx)} tokens of context each)"
    )
    if 0 < props.n_ctx_train < plan.n_ctx:
        note(f"warning: trained for {props.n_ctx_train} tokens; answers beyond them get worse")
    for remark in props.remarks:
        note(f"note: {remark}")
    for finding in () if props.is_base_model else props.template_notes:
        note(f"warning: chat template: {finding}")
    is_base = props.is_base_model and preset.kind is ServiceKind.CHAT
    if is_base:
        note("warning: a base model: it continues text and answers no chat (no chat template)")
    say(f"Try it:\n  {_curl(plan, preset, is_base)}")


def _difference(owner: "ServiceState", preset: "Preset", sets: tuple[str, ...]) -> str:
    """Remedy for a running service with other settings, or ""."""
    from mlxstack.core.preset import Preset
    from mlxstack.host.services import read_json

    plan = owner.plan
    served = read_json(plan.home.preset_file(plan.name), Preset)
    if served is None or all(getattr(served, one) == getattr(preset, one) for one in COMPARED):
        return ""
    if sets == plan.overrides:
        return f"`mlx-stack restart {plan.name}` reads them again"
    return f"`mlx-stack down {plan.name}`, then `up` again, takes these"


def _claimed(plan: "ServiceSpec") -> "Supervisor":
    """A supervisor in this process that has the name already."""
    from mlxstack.control.supervisor import Supervisor
    from mlxstack.host.logs import rotate

    # Only units write there in the foreground, and they append for ever.
    rotate(plan.home.supervisor_log(plan.name))
    note(f"{plan.name} will be at {plan.url}; Ctrl-C stops it")
    os.umask(0o077)
    supervisor = Supervisor(plan, echo=_echo)
    supervisor.claim()
    return supervisor


def _echo(line: str) -> None:
    """Print a log line; where nothing reads it, stop the service."""
    try:
        say(line)
    except PipeClosed:
        os.kill(os.getpid(), signal.SIGTERM)


def _facts(started: "Started") -> dict[str, object]:
    state, plan = started.state, started.state.plan
    return {
        "name": plan.name,
        "preset": plan.preset,
        "url": plan.url,
        "supervisor_pid": state.supervisor.pid,
        "worker_pid": state.worker.pid if state.worker is not None else None,
        "log": str(plan.home.log_file(plan.name)),
        "seconds": round(started.seconds, 3),
    }


def _curl(plan: "ServiceSpec", preset: "Preset", is_base: bool) -> str:
    key = " -H 'authorization: Bearer YOUR_KEY'" if preset.server.api_keys else ""
    from mlxstack.core.preset import ServiceKind

    path, body = "chat/completions", CHAT
    if preset.kind is ServiceKind.EMBEDDING:
        path, body = "embeddings", '{"input": "Hello!"}'
    elif is_base:
        path, body = "completions", TEXT
    return (
        f"curl {plan.url}/v1/{path}{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
    )


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
