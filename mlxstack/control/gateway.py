"""Plans a gateway: its members, their ports, keys and shares of memory."""

import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.api.api_keys import as_key, digest_of
from mlxstack.control import start
from mlxstack.control.start import StartRequest, request_for
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.preset import AUTO, ApiKey, Preset, Residency, ServerSpec, ServiceKind
from mlxstack.gateway.processes import HOST, STOP_S
from mlxstack.gateway.spec import (
    LINGER_S,
    GatewayMember,
    GatewaySpec,
    ModelSummary,
    internal_key,
    own_preset,
)
from mlxstack.host.hardware import MemoryBudget, this_memory
from mlxstack.host.home import Home, make_home, make_private
from mlxstack.host.process import free_port
from mlxstack.host.services import (
    Phase,
    RestartPolicy,
    ServiceSpec,
    owner,
    read_json,
    read_state,
    write_json,
)
from mlxstack.models.chat_capabilities import capabilities
from mlxstack.models.model_files import CONFIG, ModelFiles, quantization_in, read_config_object
from mlxstack.models.reference import service_name
from mlxstack.planner.fit import (
    Candidate,
    MemoryRoom,
    files_of,
    of_many,
    refuse_if_too_big,
    room_in,
    shapes_of,
)
from mlxstack.policy.memory.capacity import need
from mlxstack.policy.memory.capacity_advice import SlotSizes

if TYPE_CHECKING:
    from mlxstack.models.local_models import LocalModel

log = logging.getLogger(__name__)

IDLE_UNLOAD_S = 1800.0
"""Default idle time of a member, without one in its preset."""

READY_S = 60.0
"""Seconds in which a gateway must answer; its members have their own."""

MIN_PCT = 1
MAX_PCT = 90


class MemberPlan(Struct, frozen=True):
    """Member as requested and as served."""

    wanted: StartRequest
    preset: Preset


class GatewayPlan(Struct, frozen=True):
    """Startable gateway, before anything is written."""

    spec: GatewaySpec
    members: tuple[MemberPlan, ...]


class PlannedGateway(Struct, frozen=True):
    """A gateway for its worker, and for its supervisor."""

    spec: GatewaySpec
    service: ServiceSpec


class ModelsOnDisk(Struct, frozen=True):
    """Requests for models that can be served, and why others cannot."""

    wanted: tuple[StartRequest, ...]
    left_out: dict[str, str]


def find_all(home: Home, first: Sequence[str], sets: tuple[str, ...]) -> ModelsOnDisk:
    """Requests for `first`, then for every complete model on disk. Raises SetupError.

    Incomplete ones, those of unknown types and those that do not fit alone are left out.
    """
    from mlxstack.models.local_models import all_models  # noqa: PLC0415 - slow, rarely needed

    wanted = [request_for(one, home, SlotSizes(), sets) for one in first]
    room = room_in(home, this_memory(os.environ))
    given = {*first}
    others = (one for one in all_models(home) if given.isdisjoint((one.name, one.path)))
    models = list({one.name: one for one in others}.values())
    n_names = Counter(_service_name(one.name) for one in models)
    left_out = {}
    # All at once: each child process that builds shapes imports MLX.
    shapes_of(_configs(models))
    for one in models:
        if not one.is_complete:
            left_out[one.name] = one.fault or f"incomplete; `mlx-stack pull {one.name}` goes on"
            continue
        own = list(sets)
        if n_names[_service_name(one.name)] > 1:
            own.append(f"name={service_name(one.name)}")
        if one.where == "LM Studio":
            own.append(f"model.alias={one.name}")
        try:
            found = request_for(one.name, home, SlotSizes(), tuple(own))
            if found.file is not None:
                refuse_if_too_big(found.file.preset.candidate, room)
        except (SetupError, BadRequest) as why:
            left_out[one.name] = why.message
            continue
        wanted.append(found)
    if not wanted:
        raise SetupError(
            "no model on this disk can be served; `mlx-stack plan` proposes some, and "
            "`mlx-stack pull MODEL` downloads one" + _told(left_out)
        )
    return ModelsOnDisk(tuple(wanted), left_out)


def _configs(models: "Iterable[LocalModel]") -> list[dict[str, Any]]:
    """Configs of complete models, without those that cannot be read."""
    configs = []
    for one in models:
        with suppress(SetupError):
            if one.is_complete:
                configs.append(read_config_object(Path(one.path) / CONFIG))
    return configs


def prepare(
    name: str,
    wanted: Sequence[StartRequest],
    home: Home,
    linger_s: float = LINGER_S,
    of_disk: bool = False,
    **listening: Any,
) -> PlannedGateway:
    """Check a start, and write the specs of all processes.

    The members are all models `of_disk` where it says so. Raises as `plan` does, and Taken for a
    member that runs already.
    """
    room = room_in(home, this_memory(os.environ))
    found = plan(name, wanted, home, room, linger_s, of_disk=of_disk, **listening)
    check_free(found, home)
    return write(found, home)


def check_free(gateway: GatewayPlan, home: Home) -> None:
    """Raise Taken for a running member or a busy port."""
    for member in gateway.spec.members:
        running = owner(home, member.name)
        if running is not None:
            raise start.already_running(running)
    start.check_port(gateway.spec.server, home)


def room_of(name: str, home: Home) -> MemoryRoom:
    """Memory next to all services but the gateway `name`."""
    room = room_in(home, this_memory(os.environ), name)
    others = {service: n_bytes for service, n_bytes in room.others.items() if service != name}
    return replace(room, others=others)


def grace_s(drain_s: float, members_s: Iterable[float]) -> float:
    """Seconds that a gateway may take to stop its members and itself."""
    return drain_s + max(members_s) + 2 * STOP_S


def plan(
    name: str,
    wanted: Sequence[StartRequest],
    home: Home,
    room: MemoryRoom,
    linger_s: float = LINGER_S,
    former: Mapping[str, Preset] | None = None,
    secret: str = "",
    of_disk: bool = False,
    **listening: Any,
) -> GatewayPlan:
    """Plan a gateway within `room`. Raises SetupError.

    The first member is the default; the gateway listens where it would, or at `host` and `port`
    of `listening`, and lets in whom it would. Members keep the ports of their `former` presets,
    and their keys where the gateway has the same `secret`.
    """
    make_home(home)
    loaded = [start.resolve(one, home) for one in wanted]
    _refuse_twins(name, [one.preset.name for one in loaded])
    server = replace(loaded[0].preset.server, **listening)
    _refuse_other_keys(server, [one.preset for one in loaded])
    if not server.port:
        server = replace(server, port=free_port(server.host))
    secret = secret or secrets.token_hex(32)
    ports = {name: one.server.port for name, one in (former or {}).items()}
    inner = [
        replace(
            one.preset,
            server=inner_server(
                one.preset.server, server, secret, ports.get(one.preset.name) or free_port(HOST)
            ),
        )
        for one in loaded
    ]
    found = _candidates(inner, room)
    held = [_as_before(one, (former or {}).get(one.name)) for one in inner]
    free = room.free
    sizes = _with_shares(list(zip(held, found, strict=True)), free, room.memory)
    if sum(n_bytes for _, n_bytes in sizes) > free:
        sizes = _with_shares(list(zip(inner, found, strict=True)), free, room.memory)
    n_same = Counter(one.model.served_name for one in inner)
    members = tuple(
        _member(start.spec_of(one, preset, home), preset, n_bytes, candidate, of_disk, n_same)
        for one, candidate, (preset, n_bytes) in zip(wanted, found, sizes, strict=True)
    )
    _refuse_too_big(members, free)
    spec = GatewaySpec(
        name, server, secret, members, members[0].name, free, linger_s, of_disk=of_disk
    )
    each = zip(wanted, sizes, strict=True)
    return GatewayPlan(spec, tuple(MemberPlan(one, preset) for one, (preset, _) in each))


def write(
    found: GatewayPlan, home: Home, running: Mapping[str, ServiceSpec] | None = None
) -> PlannedGateway:
    """Write all specs, except of `running` members. Raises SetupError."""
    kept = running or {}
    for one in found.members:
        if one.preset.name not in kept:
            start.check_files(one.preset)
            start.check_port(one.preset.server, home)
            start.write(one.wanted, one.preset, home)
    members = [replace(one, service=kept.get(one.name, one.service)) for one in found.spec.members]
    spec = replace(found.spec, members=tuple(members))
    return PlannedGateway(spec, _service(spec, home))


def inner_server(own: ServerSpec, server: ServerSpec, secret: str, port: int) -> ServerSpec:
    """Loopback server section of a member, with the gateway's keys."""
    keys = [
        replace(key, key=digest_of(internal_key(secret, key)))
        for key in map(as_key, server.api_keys)
    ]
    # Requests of a gateway without keys come with its own; a service without keys allows all.
    own_key = ApiKey(internal_key(secret, None), may_raise=not keys)
    idle_s = None if own.resident is Residency.ALWAYS else own.idle_unload_s or IDLE_UNLOAD_S
    return replace(
        own,
        host=HOST,
        port=port,
        allowed_hosts=server.allowed_hosts,
        api_keys=(own_key, *keys),
        max_body_bytes=server.max_body_bytes,
        max_bodies_bytes=server.max_bodies_bytes,
        strict_models=False,
        idle_unload_s=idle_s,
    )


def running_members(home: Home, name: str) -> list[str]:
    """Members that run, of a gateway that runs or was killed."""
    state = read_state(home, name)
    spec = read_json(home.gateway_file(name), GatewaySpec)
    if state is None or spec is None or state.phase is Phase.STOPPED:
        return []
    return [
        one.name
        for one in spec.members
        # Another gateway that runs it now has given it another key.
        if own_preset(home, one.name, spec.secret) is not None
        if one.name not in spec.handed_over and owner(home, one.name) is not None
    ]


def _candidates(presets: Sequence[Preset], room: MemoryRoom) -> list[Candidate | None]:
    """Planner inputs from files, or the hub; None where unknown.

    Raises SetupError where one would not even fit alone.
    """
    pairs: list[tuple[Preset, ModelFiles]] = []
    unknown: dict[str, str] = {}
    for one in presets:
        try:
            pairs.append((one, files_of(one.model)))
        except SetupError as why:
            unknown[one.name] = why.message
    found = {candidate.preset.name: candidate for candidate in of_many(pairs)}
    for name, candidate in found.items():
        if (why_not := refuse_if_too_big(candidate, room)) is not None:
            unknown[name] = why_not
    for name, why_not in unknown.items():
        log.warning("warning: `%s` is loaded alone, its size is not known: %s", name, why_not)
    return [None if one.name in unknown else found[one.name] for one in presets]


def _with_shares(
    members: Sequence[tuple[Preset, Candidate | None]], budget: int, memory: MemoryBudget
) -> list[tuple[Preset, int]]:
    """Presets with KV budgets, and the bytes that each may take.

    Of the memory that is left when all are loaded, each whose share is not set gets a part in
    proportion to its KV. One of unknown size takes all that the members leave which are never
    unloaded.
    """
    spare = max(0, budget - sum(_n_bytes(*one, memory) or 0 for one in members))
    free = [(one, found) for one, found in members if found is not None and _is_free(one)]
    kv = {one.name: need(found.load(memory, has_kv_share=False)).kv for one, found in free}
    shared = []
    for one, found in members:
        own = one
        if one.name in kv:
            n_kv = kv[one.name] + spare * kv[one.name] // sum(kv.values())
            pct = min(MAX_PCT, max(MIN_PCT, 100 * n_kv / memory.total))
            own = replace(one, prefix_cache=replace(one.prefix_cache, memory_budget_pct=pct))
        shared.append((own, _n_bytes(own, found, memory)))
    kept = sum(n or 0 for one, n in shared if one.server.resident is Residency.ALWAYS)
    return [(one, max(0, budget - kept) if n is None else n) for one, n in shared]


def _n_bytes(preset: Preset, found: Candidate | None, memory: MemoryBudget) -> int | None:
    """Bytes of a member with its whole KV budget; None where unknown."""
    if found is None:
        return None
    load = replace(found, preset=preset).load(memory)
    parts = need(load)
    return parts.total - parts.kv + max(parts.kv, load.budget.n_bytes if load.budget else 0)


def _is_free(preset: Preset) -> bool:
    """Whether the gateway sets the KV budget."""
    is_chat = preset.kind is ServiceKind.CHAT
    return is_chat and preset.prefix_cache.memory_budget_pct == AUTO


def _as_before(preset: Preset, former: Preset | None) -> Preset:
    """The former preset, where it differs by its share of memory only."""
    if former is None or not _is_free(preset):
        return preset
    pct = former.prefix_cache.memory_budget_pct
    same = replace(preset, prefix_cache=replace(preset.prefix_cache, memory_budget_pct=pct))
    return former if same == former else preset


def _summary(preset: Preset, found: Candidate | None) -> ModelSummary:
    if found is None:
        return ModelSummary(preset.kind)
    return ModelSummary(
        kind=preset.kind,
        architecture=found.architecture,
        quantization=quantization_in(found.files.config),
        n_bytes=found.weights.n_bytes(),
        n_ctx_train=found.n_trained,
        capabilities=(
            capabilities(found.files.source.parent, preset.kv.bits)
            if preset.kind is ServiceKind.CHAT
            else ("embedding",)
        ),
    )


def _member(
    service: ServiceSpec, preset: Preset, n_bytes: int, found: Candidate | None, stops: bool,
    n_same: Mapping[str, int],
) -> GatewayMember:  # fmt: skip
    """Member; its preset names it first where others share its model."""
    model = preset.model
    server = preset.server
    names = (model.served_name, model.plain_id, preset.name)
    return GatewayMember(
        names=tuple(dict.fromkeys(names if n_same[names[0]] == 1 else names[::-1])),
        service=service,
        n_bytes=n_bytes,
        residency=server.resident,
        startup_timeout_s=server.startup_timeout_s,
        model=_summary(preset, found),
        stops=stops,
    )


def _service(spec: GatewaySpec, home: Home) -> ServiceSpec:
    """The gateway's own process; its spec is written down for it."""
    file = home.gateway_file(spec.name)
    make_private(file.parent)
    write_json(file, spec)
    members_s = (member.service.patience.grace_s for member in spec.members)
    return ServiceSpec(
        name=spec.name,
        root=str(home.root),
        preset=", ".join(one.name for one in spec.members),
        url=start.url_of(spec.server),
        worker=(sys.executable, "-m", "mlxstack.gateway", str(file)),
        env={"MLX_STACK_HOME": str(home.root)} | start.QUIET,
        patience=RestartPolicy(grace_s=grace_s(spec.server.drain_s, members_s)),
    )


def _refuse_too_big(members: Sequence[GatewayMember], budget: int) -> None:
    """Raises SetupError where a member never fits beside those that stay loaded."""
    always = [one for one in members if one.residency is Residency.ALWAYS]
    kept = sum(one.n_bytes for one in always)
    largest = max((one.n_bytes for one in members if one not in always), default=0)
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
    """Raise SetupError for member keys that the gateway lacks."""
    for one in presets:
        if one.server.api_keys and one.server.api_keys != server.api_keys:
            raise SetupError(
                f"`{one.name}` has other server.api_keys than the gateway, which are those of its "
                "first member; give both the same"
            )


def _service_name(model: str) -> str:
    return service_name(model.rpartition("/")[2])


def _told(left_out: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {why}" for name, why in left_out.items())
