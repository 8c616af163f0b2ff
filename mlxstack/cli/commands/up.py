"""`up` and `restart`: start a service and wait until it is healthy."""

import os
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlxstack.cli.completion import service_names
from mlxstack.cli.exit_codes import Misuse, PipeClosed
from mlxstack.cli.output import as_json, note, spinner
from mlxstack.cli.units import sizes_of

if TYPE_CHECKING:
    from mlxstack.config.presets import LoadedPreset
    from mlxstack.control.launch import LaunchRequest
    from mlxstack.control.supervisor import Supervisor
    from mlxstack.core.preset import Preset
    from mlxstack.host.home import Home
    from mlxstack.host.service_state import ServiceSpec, ServiceState
    from mlxstack.planner.derived_preset import DerivedPreset

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as slots.count=5."),
]
Ctx = Annotated[
    str | None, typer.Option("--ctx", metavar="TOKENS", help="Context per slot, such as 64k.")
]
Slots = Annotated[int | None, typer.Option("--slots", min=1, max=256, help="Number of slots.")]
KvBits = Annotated[int | None, typer.Option("--kv-bits", help="KV precision: 16, 8 or 4.")]
COMPARED = ("model", "kind", "slots", "kv", "sampling", "speculation", "batch")
"""Sections of a preset that a running service is compared by."""

FRONT = "gateway"
"""Name of a gateway that has none."""

TEXT = '{"prompt": "The capital of France is", "max_tokens": 60}'
CHAT = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}'
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def preset_names(incomplete: str) -> list[str]:
    """The presets whose names begin so, for the completion of a shell."""
    from mlxstack.config.presets import listed
    from mlxstack.host.home import home_from

    return sorted(name for name in listed(home_from(os.environ)) if name.startswith(incomplete))


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
    bool,
    typer.Option("--if-needed", help="With --foreground: succeed when it is already running."),
]
HostsOption = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Machines that compute it together, this one first."),
]


def up(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Preset, hub id or model folder. Several get one address.",
            autocompletion=preset_names,
        ),
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
    from mlxstack.control import launch, model_request
    from mlxstack.host.home import home_from

    home, models = home_from(os.environ), models or []
    if bool(models or any_model) == (mode is not None):
        raise Misuse("give a preset, hub id or model folder, a mode with --mode, or --any-model")
    if any_model or len(models) != 1:
        if ctx or slots or kv_bits or draft or hosts or dry_run:
            raise Misuse(
                "--ctx, --slots, --kv-bits, --draft, --hosts and --dry-run go with one model"
            )
        front = Front(name or mode or FRONT, mode, host, port, any_model)
        _up_gateway(front, models, tuple(sets or ()), foreground, if_needed, json)
        return
    texts = _settings(
        {"server.host": host, "server.port": port, "name": name, "model.draft": draft}, hosts
    )
    sizes = sizes_of(ctx, slots, kv_bits)
    found = model_request.request_for(models[0], home, sizes, (*(sets or ()), *texts))
    loaded = launch.resolve(found.launch, home)
    if found.derived is not None and not json:
        _show_reasons(found.derived)
    if dry_run:
        _show_resolved(loaded, json)
        return
    if (owner := _up_one(found.launch, loaded, foreground, if_needed, json)) is not None:
        _settle_for(owner, port, loaded.preset, found.launch.sets, json)


def _is_member(home: "Home", wanted: "LaunchRequest", loaded: "LoadedPreset", json: bool) -> bool:
    """Print the gateway that has this name; False without one.

    With a port of its own it is to be another service.
    """
    from mlxstack.cli.target import membership

    has_port = any(one.startswith("server.port=") for one in wanted.sets)
    found = None if has_port else membership(home, loaded.preset.name)
    if found is None:
        return False
    if json:
        as_json(_facts(found.gateway, time.monotonic()))
    else:
        plan = found.gateway.plan
        typer.echo(f"{found.member} is a member of `{plan.name}` at {plan.url}, started on request")
    return True


def _settings(given: dict[str, str | int | None], hosts: str | None) -> list[str]:
    """Options as settings, as `--set` takes them; a draft model switches drafts on."""
    texts = [f"{key}={value}" for key, value in given.items() if value is not None]
    if given["model.draft"] is not None:
        texts.append("speculation=auto")
    return texts if hosts is None else [*texts, f"hosts=[{hosts}]"]


def _up_one(
    wanted: "LaunchRequest", loaded: "LoadedPreset", foreground: bool, if_needed: bool, json: bool
) -> "ServiceState | None":
    """Start a service, or return the sufficient running one."""
    import asyncio

    from mlxstack.control import launch
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if _is_member(home, wanted, loaded, json):
        return None
    if_needed = if_needed or not foreground
    with services.starting(home, loaded.preset.name, waits=if_needed):
        owner = live_owner(loaded.preset.name, home)
        if owner is None:
            plan = launch.prepare(wanted, loaded, home)
            if not foreground:
                _start(plan, loaded.preset, json)
                return None
            supervisor = _claimed(plan)
    if owner is None:
        raise typer.Exit(asyncio.run(supervisor.run()))
    launch.refuse_other_model(owner, wanted, loaded.preset)
    if not if_needed:
        raise launch.already_running(owner)
    return owner


class Front(NamedTuple):
    """Start request of a gateway."""

    name: str
    mode: str | None
    host: str | None
    port: int | None
    is_any: bool = False


def _wanted(
    front: Front, models: list[str], sets: tuple[str, ...], home: "Home"
) -> "list[LaunchRequest]":
    """Start requests of a gateway's members."""
    from mlxstack.control import any_model, mode_switch, model_request
    from mlxstack.policy.memory.capacity_advice import SlotSizes

    if front.mode is not None:
        if sets:
            raise Misuse(
                "--set goes with models; the options of a mode's members are in the mode's file"
            )
        return mode_switch.requests_of(front.mode, home)
    if front.is_any:
        found = any_model.find_all(home, models, sets)
        for name, why in found.left_out.items():
            note(f"left out: {name}: {why}")
        return list(found.wanted)
    return [model_request.request_for(one, home, SlotSizes(), sets).launch for one in models]


def _up_gateway(
    front: Front,
    models: list[str],
    sets: tuple[str, ...],
    foreground: bool,
    if_needed: bool,
    json: bool,
) -> None:
    import asyncio

    from mlxstack.config import modes
    from mlxstack.control import gateway, launch
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    wanted = _wanted(front, models, sets, home)
    listening: dict[str, Any] = {
        key: value
        for key, value in (("host", front.host), ("port", front.port))
        if value is not None
    }
    if front.is_any:
        listening["strict_models"] = True
    if_needed = if_needed or not foreground
    with services.starting(home, front.name, waits=if_needed):
        owner = live_owner(front.name, home)
        if owner is not None:
            if not if_needed:
                raise launch.already_running(owner)
            began = time.monotonic()
            state = launch.wait_for(owner, gateway.READY_S, lambda _: None)
            facts = _facts(state, began)
            _tell_gateway(facts, json)
            names = [launch.resolve(one, home).preset.name for one in wanted]
            if facts["preset"] != ", ".join(names):
                note(f"warning: its members differ; `mlx-stack down {front.name}` first")
            return
        launch.warn_of_variables()
        plan = gateway.prepare(front.name, wanted, home, of_disk=front.is_any, **listening)
        if front.mode is not None:
            modes.mark_active(home, modes.Active(front.mode, (front.name,)))
        if not foreground:
            began = time.monotonic()
            with spinner(f"starting {front.name}") as turn:
                state = launch.start(plan.service, gateway.READY_S, turn)
            _tell_gateway(_facts(state, began), json)
            return
        supervisor = _claimed(plan.service)
    raise typer.Exit(asyncio.run(supervisor.run()))


def _tell_gateway(facts: dict[str, object], json: bool) -> None:
    if json:
        as_json(facts)
        return
    first, *others = str(facts["preset"]).split(", ")
    typer.echo(f"{facts['name']} is ready at {facts['url']} after {facts['seconds']:.1f} s")
    typer.echo(f"  {first} answers requests without a model; others: {', '.join(others) or 'none'}")


def restart(
    name: Annotated[
        str | None,
        typer.Argument(help="Service (default: the only one).", autocompletion=service_names),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option(
            "--name", help="Service (default: the only one).", autocompletion=service_names
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Restart a service; its preset is read again."""
    from mlxstack.cli.target import known_service, one_name
    from mlxstack.control import gateway, launch, preflight
    from mlxstack.control.memory_refusal import check_memory
    from mlxstack.host import services
    from mlxstack.host.home import home_from
    from mlxstack.host.services import is_gateway

    home = home_from(os.environ)
    state = known_service(home, one_name(name, named))
    plan = state.plan
    if is_gateway(plan):
        with services.starting(home, plan.name, waits=True):
            former = live_owner(plan.name, home)
            if former is not None:
                services.stop(home, former, plan.patience.grace_s + 1.0)
            began = time.monotonic()
            _tell_gateway(_facts(launch.start(plan, gateway.READY_S, lambda _: None), began), json)
        return
    wanted = launch.LaunchRequest(plan.preset, plan.overrides, Path(plan.cwd))
    loaded = launch.resolve(wanted, home)
    check_memory(loaded.preset, home, os.environ)
    preflight.check_model(loaded.preset)
    preflight.check_slot_folder(loaded.preset)
    with services.starting(home, plan.name, waits=True):
        former = live_owner(plan.name, home)
        if former is not None:
            services.stop(home, former, former.plan.patience.grace_s + 1.0)
        _start(launch.prepare(wanted, loaded, home), loaded.preset, json)


def live_owner(name: str, home: "Home") -> "ServiceState | None":
    """Owner of the name, after departures and cleaning of dead ones."""
    from mlxstack.host import services
    from mlxstack.host.process import wait_gone
    from mlxstack.host.service_state import Phase, owner

    found = owner(home, name)
    if found is not None and found.phase is Phase.STOPPING:
        note(f"waiting until {name} has stopped")
        wait_gone(found.supervisor, found.plan.patience.grace_s + 1.0)
    cleared = services.sweep(home, name)
    if cleared is not None:
        note(cleared)
    return owner(home, name)


def _start(plan: "ServiceSpec", preset: "Preset", json: bool) -> None:
    import asyncio

    from mlxstack.control import launch
    from mlxstack.control.probe import running_props
    from mlxstack.core.formatting import tokens
    from mlxstack.core.preset import ServiceKind

    began = time.monotonic()
    try:
        with spinner(f"starting {plan.name}") as turn:
            state = launch.start(plan, preset.server.startup_timeout_s, turn)
    except KeyboardInterrupt:
        note(f"interrupted; {plan.name} is stopped")
        raise
    props = asyncio.run(running_props(plan.url, preset))
    if json:
        notes = {"why_not_batching": props.why_not_batching, "template_notes": props.template_notes}
        as_json(_facts(state, began) | notes)
        return
    seconds = time.monotonic() - began
    agents = "1 agent" if plan.n_slots == 1 else f"{plan.n_slots} agents"
    typer.echo(
        f"{plan.name} is ready at {plan.url} after {seconds:.1f} s "
        f"({agents} at once, {tokens(plan.n_ctx)} tokens of context each)"
    )
    if 0 < props.n_ctx_train < plan.n_ctx:
        note(f"warning: trained for {props.n_ctx_train} tokens; answers beyond them get worse")
    for remark in props.remarks:
        note(f"warning: {remark}")
    for finding in () if props.is_base_model else props.template_notes:
        note(f"warning: chat template: {finding}")
    is_base = props.is_base_model and preset.kind is ServiceKind.CHAT
    if is_base:
        note("warning: a base model: it continues text and answers no chat (no chat template)")
    typer.echo(f"Try it:\n  {_curl(plan, preset, is_base)}")


def _settle_for(
    owner: "ServiceState", port: int | None, preset: "Preset", sets: tuple[str, ...], json: bool
) -> None:
    from mlxstack.control import launch

    if port and not owner.plan.url.endswith(f":{port}"):
        raise launch.already_running(owner)
    began = time.monotonic()
    state = launch.wait_for(owner, preset.server.startup_timeout_s, lambda _: None)
    if json:
        as_json(_facts(state, began))
    else:
        typer.echo(f"{owner.plan.name} is already running at {owner.plan.url}")
    if remedy := _difference(owner, preset, sets):
        note(f"warning: its settings differ; {remedy}")


def _difference(owner: "ServiceState", preset: "Preset", sets: tuple[str, ...]) -> str:
    """Remedy for a running service with other settings, or ""."""
    from mlxstack.core.preset import Preset
    from mlxstack.host.service_state import read_json

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
        typer.echo(line)
    except PipeClosed:
        os.kill(os.getpid(), signal.SIGTERM)


def _facts(state: "ServiceState", began: float) -> dict[str, object]:
    plan = state.plan
    return {
        "name": plan.name,
        "preset": plan.preset,
        "url": plan.url,
        "supervisor_pid": state.supervisor.pid,
        "worker_pid": state.worker.pid if state.worker is not None else None,
        "log": str(plan.home.log_file(plan.name)),
        "seconds": round(time.monotonic() - began, 3),
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
        as_json({"preset": loaded.preset, "source": str(loaded.source), "origins": loaded.origins})
        return
    builtins = msgspec.to_builtins(loaded.preset)
    typer.echo(yaml.safe_dump(builtins, sort_keys=False, allow_unicode=True), nl=False)
    for key, origin in loaded.origins.items():
        typer.echo(f"# {key}: {origin}")


def _show_reasons(derived: "DerivedPreset") -> None:
    from mlxstack.cli.plan_tables import show_reasons

    show_reasons(derived)
