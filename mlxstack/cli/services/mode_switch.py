"""Switches to a mode: check, stop, start, and roll back on failure."""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

from mlxstack.cli.services import launch
from mlxstack.cli.services.launch import LaunchRequest
from mlxstack.cli.services.probe import ServiceHealthLevel, survey
from mlxstack.core.errors import BadRequest, Broken, SetupError, StackError
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset
from mlxstack.host import modes, services
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import MemoryBudget, this_memory
from mlxstack.host.modes import Active
from mlxstack.host.presets import LoadedPreset, from_anywhere
from mlxstack.host.service_state import ServiceSpec, read_json, write_json
from mlxstack.policy.capacity import need
from mlxstack.service import plan_candidate


class ServiceCondition(StrEnum):
    """A service before the switch. STALE: it runs with other settings, or does not answer."""

    RIGHT = "right"
    STALE = "stale"


class ModeChange(Struct, frozen=True):
    """Names of services: first all of `stop` end, then `start` begin one after another."""

    stop: tuple[str, ...]
    start: tuple[str, ...]
    keep: tuple[str, ...]


def difference(running: Mapping[str, ServiceCondition], wanted: Sequence[str]) -> ModeChange:
    """The least change from what runs to what is wanted, in the order of `wanted`."""
    keep = tuple(name for name in wanted if running.get(name) is ServiceCondition.RIGHT)
    return ModeChange(
        stop=tuple(name for name in running if name not in keep),
        start=tuple(name for name in wanted if name not in keep),
        keep=keep,
    )


Say = Callable[[str], None]


class ModeMember(Struct, frozen=True):
    """A member of a mode, resolved."""

    wanted: LaunchRequest
    loaded: LoadedPreset

    @property
    def preset(self) -> Preset:
        """Preset that the member serves."""
        return self.loaded.preset


class ModeBefore(Struct, frozen=True):
    """A service that ran before the switch, with all that starts it again."""

    plan: ServiceSpec
    preset: Preset


def requests_of(name: str, home: Home) -> list[LaunchRequest]:
    """The start requests of a mode. Raises SetupError."""
    source = modes.listed(home).get(name)
    mode = modes.load(name, home)
    folder = source.parent if source is not None else home.presets
    return [
        LaunchRequest(from_anywhere(one.preset, folder), one.options, folder)
        for one in mode.members
    ]


def members_of(name: str, home: Home) -> list[ModeMember]:
    """The members of a mode. Raises SetupError when they cannot run together."""
    parts = [ModeMember(one, launch.resolve(one, home)) for one in requests_of(name, home)]
    _refuse_twins("name", [part.preset.name for part in parts])
    _refuse_twins("server.port", [part.preset.server.port for part in parts])
    return parts


def check_sum(parts: list[ModeMember], memory: MemoryBudget) -> None:
    """Raises SetupError when the members do not fit together, though each may alone.

    A member of which nothing is known beforehand counts nothing.
    """
    sizes = {part.preset.name: _size(part.preset, memory) for part in parts}
    total = sum(sizes.values())
    if total > memory.usable:
        told = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in sizes.items())
        raise SetupError(
            f"the members of this mode do not fit together: {size(total)} are needed ({told}), "
            f"{memory.owner} has {size(memory.usable)} for models; give them fewer or shorter "
            "slots by `set`, or leave one out"
        )


def switch(name: str, home: Home, say: Say) -> ModeChange:
    """Make the members of a mode the services that run.

    Raises Broken after going back, and Taken while somebody else switches.
    """
    with services.starting(home, "a mode", waits=False):
        return _switch(name, home, say)


def _switch(name: str, home: Home, say: Say) -> ModeChange:
    parts = members_of(name, home)
    check_sum(parts, this_memory(os.environ))
    before, active = _running(home), modes.active(home)
    change = difference(_state_of(before, parts, home), [part.preset.name for part in parts])
    try:
        _apply(change, parts, home, say)
    except BaseException as why:
        try:
            _go_back(before, change, home, say)
        except StackError as worse:
            raise Broken(
                f"mode `{name}` could not start ({why}), and what ran before did not come back "
                f"({worse}); `mlx-stack status` tells what runs"
            ) from why
        modes.mark_active(home, active)
        if isinstance(why, Exception):
            raise Broken(f"mode `{name}` could not start, all is as before: {why}") from why
        raise
    modes.mark_active(home, Active(name, tuple(part.preset.name for part in parts)))
    return change


def _apply(change: ModeChange, parts: list[ModeMember], home: Home, say: Say) -> None:
    for name in change.stop:
        _stop(name, home, say)
    for part in parts:
        if part.preset.name in change.start:
            with services.starting(home, part.preset.name, waits=True):
                services.sweep(home, part.preset.name)
                plan = launch.prepare(part.wanted, part.loaded, home)
                _start(plan, part.preset, say)


def _go_back(before: list[ModeBefore], change: ModeChange, home: Home, say: Say) -> None:
    for name in change.start:
        _stop(name, home, say)
    alive = {state.plan.name for state in services.running(home)}
    for one in before:
        if one.plan.name not in alive:
            with services.starting(home, one.plan.name, waits=True):
                write_json(home.preset_file(one.plan.name), one.preset)
                _start(one.plan, one.preset, say)


def _start(plan: ServiceSpec, preset: Preset, say: Say) -> None:
    say(f"starting {plan.name}")
    launch.start(
        plan, preset.server.startup_timeout_s, lambda now: say(f"starting {plan.name}: {now}")
    )


def _stop(name: str, home: Home, say: Say) -> None:
    for state in services.running(home):
        if state.plan.name == name:
            say(f"stopping {name}")
            services.stop(home, state, state.plan.patience.grace_s + 1.0)


def _running(home: Home) -> list[ModeBefore]:
    found = []
    for state in services.running(home):
        preset = read_json(home.preset_file(state.plan.name), Preset)
        if preset is not None:
            found.append(ModeBefore(state.plan, preset))
    return found


def _state_of(
    before: list[ModeBefore], parts: list[ModeMember], home: Home
) -> dict[str, ServiceCondition]:
    healthy = {one.name for one in survey(home).services if one.state is ServiceHealthLevel.HEALTHY}
    wanted = {part.preset.name: part.preset for part in parts}
    return {
        one.plan.name: ServiceCondition.RIGHT
        if one.plan.name in healthy and _is_same(one.preset, wanted.get(one.plan.name))
        else ServiceCondition.STALE
        for one in before
    }


def _is_same(running: Preset, wanted: Preset | None) -> bool:
    """Port 0 means any."""
    if wanted is None:
        return False
    if not wanted.server.port:
        server = msgspec.structs.replace(wanted.server, port=running.server.port)
        wanted = msgspec.structs.replace(wanted, server=server)
    return running == wanted


def _size(preset: Preset, memory: MemoryBudget) -> int:
    try:
        return need(plan_candidate.of_preset(preset).load(memory.half_bytes)).total
    except (SetupError, BadRequest):
        return 0


def _refuse_twins(key: str, values: list[str] | list[int]) -> None:
    for value in values:
        if value and list(values).count(value) > 1:
            raise SetupError(
                f"two members of this mode have {key} {value}; give one of them another, "
                f"such as `set: {{{key}: ...}}`"
            )
