"""Mode switch: check, stop, start gateway and members, or roll back."""

import os
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import modes
from mlxstack.config.modes import Active
from mlxstack.config.presets import from_anywhere
from mlxstack.control import gateway, start
from mlxstack.control.gateway import GatewayPlan
from mlxstack.control.probe import ServiceHealthLevel, survey
from mlxstack.control.start import StartRequest
from mlxstack.core.errors import Broken, StackError
from mlxstack.core.preset import Preset, Residency
from mlxstack.gateway.spec import GatewaySpec
from mlxstack.host import services
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.host.services import ServiceSpec, is_gateway, owner, read_json, write_json
from mlxstack.planner.memory_room import MemoryRoom

Say = Callable[[str], None]


class ModeChange(Struct, frozen=True):
    """Service names of a switch: `stop` all, then `start` in order.

    Members that are only loaded when they are asked for are `on_demand`; the gateway of the mode,
    which answers at `url`, and the one before it are in none of these.
    """

    stop: tuple[str, ...]
    start: tuple[str, ...]
    keep: tuple[str, ...]
    on_demand: tuple[str, ...] = ()
    url: str = ""


def difference(running: Mapping[str, bool], names: Sequence[str]) -> ModeChange:
    """Minimum change from running to wanted services, in their order.

    A running service may stay where it answers and has the settings of the mode.
    """
    keep = tuple(name for name in names if running.get(name))
    return ModeChange(
        stop=tuple(name for name in running if name not in keep),
        start=tuple(name for name in names if name not in keep),
        keep=keep,
    )


class ModeBefore(Struct, frozen=True):
    """Service before the switch, with its preset or gateway."""

    spec: ServiceSpec
    served: Preset | GatewaySpec


def requests_of(name: str, home: Home) -> list[StartRequest]:
    """The start requests of a mode. Raises SetupError."""
    source = modes.listed(home).get(name)
    mode = modes.load(name, home)
    folder = source.parent if source is not None else home.presets
    return [
        StartRequest(from_anywhere(member.preset, folder), member.options, folder)
        for member in mode.members
    ]


def switch(name: str, home: Home, say: Say) -> ModeChange:
    """Make a mode's gateway and members the running services.

    Raises Broken after going back, and Taken while another switch goes on.
    """
    with services.starting(home, "a mode", waits=False):
        return _switch(name, home, say)


def _switch(name: str, home: Home, say: Say) -> ModeChange:
    before = _running(home)
    active = modes.active(home)
    former = [service.served for service in before if isinstance(service.served, GatewaySpec)]
    presets = _presets(former, home)
    planned = gateway.plan(
        name,
        requests_of(name, home),
        home,
        MemoryRoom(this_memory(os.environ)),
        former=presets,
        secret=former[0].secret if former else "",
    )
    healthy = {
        service.name
        for service in survey(home).services
        if service.state is ServiceHealthLevel.HEALTHY
    }
    members = {member.preset.name: member.preset for member in planned.members}
    running = {
        service.spec.name: service.spec.name in healthy
        and members.get(service.spec.name) == service.served
        for service in before
        if not is_gateway(service.spec)
    }
    change = _on_demand(difference(running, list(members)), planned)
    is_kept = name in healthy and any(_is_same(planned, presets, spec) for spec in former)
    try:
        url = _apply(change, planned, before, is_kept, home, say)
    except BaseException as error:
        try:
            begun = list(change.start)
            if not is_kept:
                begun.append(name)
            _go_back(before, begun, home, say)
        except StackError as worse:
            raise Broken(
                f"mode `{name}` could not start ({error}), and what ran before did not come back "
                f"({worse}); `mlx-stack status` shows what runs"
            ) from error
        modes.mark_active(home, active)
        if isinstance(error, Exception):
            raise Broken(f"mode `{name}` could not start, all is as before: {error}") from error
        raise
    modes.mark_active(home, Active(name, (name,)))
    return replace(change, url=url)


def _apply(
    change: ModeChange, planned: GatewayPlan, before: list[ModeBefore], is_kept: bool, home: Home,
    say: Say,
) -> str:  # fmt: skip
    """Change the services; returns the address of the mode."""
    specs = {service.spec.name: service.spec for service in before}
    for service in before:
        is_front = is_kept and service.spec.name == planned.spec.name
        if isinstance(service.served, GatewaySpec) and not is_front:
            spec = replace(service.served, handed_over=change.keep)
            write_json(home.gateway_file(service.spec.name), spec)
            _stop(service.spec.name, home, say)
    for name in change.stop:
        _stop(name, home, say)
    if is_kept:
        front = specs[planned.spec.name]
    else:
        start.check_port(planned.spec.server, home)
        front = gateway.write(planned, home, {name: specs[name] for name in change.keep}).service
    for member in planned.spec.members:
        if member.name in change.start:
            _start(member.service, member.startup_timeout_s, home, say)
    if not is_kept:
        _start(front, gateway.READY_S, home, say)
    return front.url


def _on_demand(change: ModeChange, planned: GatewayPlan) -> ModeChange:
    """Defer members without room, or non-resident ones, to first use."""
    members = {member.name: member for member in planned.spec.members}
    kinds = {name: member.residency for name, member in members.items()}
    free = planned.spec.budget - sum(members[name].n_bytes for name in change.keep)
    begun = set()
    for name in sorted(change.start, key=lambda name: kinds[name] is not Residency.ALWAYS):
        if kinds[name] is not Residency.NEVER and members[name].n_bytes <= free:
            begun.add(name)
            free -= members[name].n_bytes
    return replace(
        change,
        start=tuple(name for name in change.start if name in begun),
        on_demand=tuple(name for name in change.start if name not in begun),
    )


def _go_back(before: list[ModeBefore], begun: Sequence[str], home: Home, say: Say) -> None:
    for name in begun:
        _stop(name, home, say)
    for service in sorted(before, key=lambda service: not is_gateway(service.spec)):
        if isinstance(service.served, Preset):
            timeout_s = service.served.server.startup_timeout_s
            write_json(home.preset_file(service.spec.name), service.served)
        else:
            timeout_s = gateway.READY_S
            write_json(home.gateway_file(service.spec.name), service.served)
        _start(service.spec, timeout_s, home, say)


def _start(spec: ServiceSpec, timeout_s: float, home: Home, say: Say) -> None:
    """Start a service unless it runs."""
    with services.starting(home, spec.name, waits=True) as running:
        if running is None:
            say(f"starting {spec.name}")
            start.start(spec, timeout_s, lambda now: say(f"starting {spec.name}: {now}"))


def _stop(name: str, home: Home, say: Say) -> None:
    state = owner(home, name)
    if state is not None:
        say(f"stopping {name}")
        services.stop(home, state)


def _running(home: Home) -> list[ModeBefore]:
    running = []
    for state in services.running(home):
        name = state.spec.name
        served: Preset | GatewaySpec | None = (
            read_json(home.gateway_file(name), GatewaySpec)
            if is_gateway(state.spec)
            else read_json(home.preset_file(name), Preset)
        )
        if served is not None:
            running.append(ModeBefore(state.spec, served))
    return running


def _presets(former: list[GatewaySpec], home: Home) -> dict[str, Preset]:
    """Presets of the members of gateways, as they were served last."""
    return {
        member.name: preset
        for spec in former
        for member in spec.members
        if (preset := read_json(home.preset_file(member.name), Preset)) is not None
    }


def _is_same(planned: GatewayPlan, presets: Mapping[str, Preset], spec: GatewaySpec) -> bool:
    """Whether a gateway and its members have the wanted settings."""
    is_same = all(presets.get(member.preset.name) == member.preset for member in planned.members)
    return is_same and _settings_of(planned.spec) == _settings_of(spec)


def _settings_of(spec: GatewaySpec) -> tuple[object, ...]:
    members = [(member.name, member.n_bytes, member.residency) for member in spec.members]
    return spec.name, spec.server, spec.budget, members
