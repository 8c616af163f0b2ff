"""Plans a gateway: its members, their ports, keys and shares of memory."""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.api.api_keys import as_key
from mlxstack.cli.services import launch
from mlxstack.cli.services.launch import LaunchRequest
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.preset import AUTO, Preset, Residency, ServerSpec, ServiceKind
from mlxstack.gateway.processes import HOST, STOP_S
from mlxstack.gateway.spec import LINGER_S, GatewayMember, GatewaySpec, digest_of, internal_key
from mlxstack.host import preflight
from mlxstack.host.home import Home, make_home, make_private
from mlxstack.host.memory_budget import MemoryBudget, this_memory
from mlxstack.host.preset_paths import is_folder
from mlxstack.host.presets import LoadedPreset
from mlxstack.host.process import free_port
from mlxstack.host.service_state import RestartPolicy, ServiceSpec, owner, write_json
from mlxstack.policy.capacity import need
from mlxstack.service.memory_check import room_in
from mlxstack.service.plan_candidate import Candidate, of_preset

IDLE_UNLOAD_S = 1800.0
"""Idle time after which a member leaves memory where its preset does not say."""

LEAST_PCT, MOST_PCT = 1, 90


class PlannedGateway(Struct, frozen=True):
    """A gateway for its worker, and for its supervisor."""

    spec: GatewaySpec
    service: ServiceSpec


def prepare(
    name: str,
    wanted: Sequence[LaunchRequest],
    home: Home,
    linger_s: float = LINGER_S,
    **listening: Any,
) -> PlannedGateway:
    """Check everything that can be checked, and write down the specs of all processes.

    The first member is the default; the gateway listens where it would, or at `host` and `port`
    of `listening`, and lets in whom it would. Raises SetupError, or SlotTaken for a member that
    runs already.
    """
    make_home(home)
    loaded = [launch.resolve(one, home) for one in wanted]
    _refuse_twins(name, [one.preset.name for one in loaded])
    server = replace(loaded[0].preset.server, **listening)
    for one in loaded:
        if (running := owner(home, one.preset.name)) is not None:
            raise launch.already_running(running)
    _refuse_other_keys(server, [one.preset for one in loaded])
    if not server.port:
        server = replace(server, port=free_port(server.host))
    preflight.check_port(server, home)
    secret, memory = secrets.token_hex(32), this_memory(os.environ)
    budget = room_in(home, memory).free
    inner = [_inner(one.preset, server, secret) for one in loaded]
    sizes = _with_shares([(one, _candidate(one)) for one in inner], budget, memory)
    members = tuple(
        _member(one, part, preset, n_bytes, home)
        for one, part, (preset, n_bytes) in zip(wanted, loaded, sizes, strict=True)
    )
    _refuse_too_big(members, budget)
    spec = GatewaySpec(name, server, secret, members, members[0].name, budget, linger_s)
    return PlannedGateway(spec, _service(spec, home))


def _inner(preset: Preset, server: ServerSpec, secret: str) -> Preset:
    """The preset as its process serves it: on loopback, for the gateway only."""
    keys = [
        replace(key, key=digest_of(internal_key(secret, key)))
        for key in map(as_key, server.api_keys)
    ]
    own = preset.server
    idle_s = None if own.resident is Residency.ALWAYS else own.idle_unload_s or IDLE_UNLOAD_S
    inner = replace(
        own,
        host=HOST,
        port=free_port(HOST),
        allowed_hosts=server.allowed_hosts,
        api_keys=(internal_key(secret, None), *keys),
        max_body_bytes=server.max_body_bytes,
        strict_models=False,
        idle_unload_s=idle_s,
    )
    return replace(preset, server=inner)


def _candidate(preset: Preset) -> Candidate | None:
    """Planner input of a preset; None where nothing is known of its model."""
    try:
        found = of_preset(preset)
        found.load()
    except (SetupError, BadRequest):
        return None
    return found


def _with_shares(
    members: Sequence[tuple[Preset, Candidate | None]], budget: int, memory: MemoryBudget
) -> list[tuple[Preset, int]]:
    """Each preset with its own KV budget, and the bytes that it may take in all.

    Of the memory that is left when all are loaded, each gets a part in proportion to its KV.
    """
    needs = [need(found.load(memory.half_bytes)) if found else None for _, found in members]
    kv = sum(one.kv for one in needs if one)
    spare = max(0, budget - sum(one.total for one in needs if one))
    sizes = []
    for (preset, found), parts in zip(members, needs, strict=True):
        if found is None or parts is None:
            sizes.append((preset, 0))
            continue
        cache, shared = preset.prefix_cache, preset
        if cache.memory_budget_pct == AUTO and preset.kind is ServiceKind.CHAT:
            n_kv = parts.kv + spare * parts.kv // kv
            pct = min(MOST_PCT, max(LEAST_PCT, 100 * n_kv / memory.total))
            shared = replace(preset, prefix_cache=replace(cache, memory_budget_pct=pct))
        load = replace(found, preset=shared).load(memory.half_bytes, memory.total)
        n_kv = max(parts.kv, load.budget.n_bytes if load.budget else 0)
        sizes.append((shared, parts.total - parts.kv + n_kv))
    return sizes


def _member(
    wanted: LaunchRequest, loaded: LoadedPreset, preset: Preset, n_bytes: int, home: Home
) -> GatewayMember:
    model = preset.model
    plain = PurePath(model.id).name if is_folder(model.id) else model.id
    return GatewayMember(
        names=tuple(dict.fromkeys((model.alias or plain, plain, preset.name))),
        service=launch.prepare(wanted, replace(loaded, preset=preset), home),
        n_bytes=n_bytes,
        residency=preset.server.resident,
        startup_timeout_s=preset.server.startup_timeout_s,
    )


def _service(spec: GatewaySpec, home: Home) -> ServiceSpec:
    """The gateway's own process; its spec is written down for it."""
    file = home.gateway_file(spec.name)
    make_private(file.parent)
    write_json(file, spec)
    members_s = max(one.service.patience.grace_s for one in spec.members)
    return ServiceSpec(
        name=spec.name,
        root=str(home.root),
        preset=", ".join(one.name for one in spec.members),
        url=launch.url_of(spec.server),
        worker=(sys.executable, "-m", "mlxstack.gateway", str(file)),
        env={"MLX_STACK_HOME": str(home.root)} | launch.QUIET,
        patience=RestartPolicy(grace_s=spec.server.drain_s + members_s + 2 * STOP_S),
    )


def _refuse_too_big(members: Sequence[GatewayMember], budget: int) -> None:
    """Raises SetupError where a member never fits beside those that stay loaded."""
    kept = sum(one.n_bytes for one in members if one.residency is Residency.ALWAYS)
    largest = max(
        (one.n_bytes for one in members if one.residency is not Residency.ALWAYS), default=0
    )
    if kept + largest > budget:
        told = ", ".join(f"{one.name} {size(one.n_bytes)}" for one in members)
        raise SetupError(
            f"the members of this gateway do not fit: {size(kept + largest)} are needed at once "
            f"({told}), {size(budget)} are there; give them fewer or shorter slots, or "
            "`server.resident: auto`"
        )


def _refuse_twins(name: str, names: Sequence[str]) -> None:
    for one in (name, *names):
        if (name, *names).count(one) > 1:
            raise SetupError(
                f"two services of this gateway are called `{one}`; give one of them another "
                "`name`, or the gateway another `--name`"
            )


def _refuse_other_keys(server: ServerSpec, presets: Sequence[Preset]) -> None:
    """Raises SetupError where a member has keys that the gateway would not ask for."""
    for one in presets:
        if one.server.api_keys and one.server.api_keys != server.api_keys:
            raise SetupError(
                f"`{one.name}` has other server.api_keys than the gateway, which are those of its "
                "first member; give both the same"
            )
