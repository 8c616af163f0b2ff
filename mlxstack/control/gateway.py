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
from mlxstack.host.home import Home, make_folder, make_home
from mlxstack.host.process import free_port
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import Phase, ServiceSpec, owner, read_json, read_state, write_json
from mlxstack.models.bounded_json import read_config_object
from mlxstack.models.chat_capabilities import capabilities
from mlxstack.models.model_files import CONFIG, ModelFiles, quantization_in
from mlxstack.models.reference import service_name
from mlxstack.planner.candidate import Candidate, files_of, of_many
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import MemoryRoom, room_in
from mlxstack.planner.model_shapes import shapes_of
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

    request: StartRequest
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

    requests: tuple[StartRequest, ...]
    left_out: dict[str, str]


def find_all(home: Home, first: Sequence[str], sets: tuple[str, ...]) -> ModelsOnDisk:
    """Requests for `first`, then for every complete model on disk. Raises SetupError.

    Incomplete ones, those of unknown types and those that do not fit alone are left out.
    """
    from mlxstack.models.local_models import all_models  # noqa: PLC0415 - slow, rarely needed

    requests = [request_for(model, home, SlotSizes(), sets) for model in first]
    room = room_in(home, this_memory(os.environ))
    names = {*first}
    installed = (model for model in all_models(home) if names.isdisjoint((model.name, model.path)))
    models = list({model.name: model for model in installed}.values())
    n_names = Counter(_service_name(model.name) for model in models)
    left_out = {}
    # All at once: each child process that builds shapes imports MLX.
    shapes_of(_configs(models))
    for model in models:
        if not model.is_complete:
            left_out[model.name] = (
                model.fault or f"incomplete; `mlx-stack pull {model.name}` goes on"
            )
            continue
        own = list(sets)
        if n_names[_service_name(model.name)] > 1:
            own.append(f"name={service_name(model.name)}")
        if model.where == "LM Studio":
            own.append(f"model.alias={model.name}")
        try:
            request = request_for(model.name, home, SlotSizes(), tuple(own))
            if request.file is not None:
                refuse_if_too_big(request.file.preset.candidate, room)
        except (SetupError, BadRequest) as error:
            left_out[model.name] = error.message
            continue
        requests.append(request)
    if not requests:
        raise SetupError(
            "no model on this disk can be served; `mlx-stack plan` proposes some, and "
            "`mlx-stack pull MODEL` downloads one" + _lines_of(left_out)
        )
    return ModelsOnDisk(tuple(requests), left_out)


def _configs(models: "Iterable[LocalModel]") -> list[dict[str, Any]]:
    """Configs of complete models, without those that cannot be read."""
    configs = []
    for model in models:
        with suppress(SetupError):
            if model.is_complete:
                configs.append(read_config_object(Path(model.path) / CONFIG))
    return configs


def prepare(
    name: str,
    requests: Sequence[StartRequest],
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
    planned = plan(name, requests, home, room, linger_s, of_disk=of_disk, **listening)
    check_free(planned, home)
    return write(planned, home)


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
    claims = {service: n_bytes for service, n_bytes in room.claims.items() if service != name}
    return replace(room, claims=claims)


def grace_s(drain_s: float, members_s: Iterable[float]) -> float:
    """Seconds that a gateway may take to stop its members and itself."""
    return drain_s + max(members_s) + 2 * STOP_S


def plan(
    name: str,
    requests: Sequence[StartRequest],
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
    loaded = [start.resolve(request, home) for request in requests]
    _refuse_twins(name, [loaded_preset.preset.name for loaded_preset in loaded])
    server = replace(loaded[0].preset.server, **listening)
    _refuse_other_keys(server, [loaded_preset.preset for loaded_preset in loaded])
    if not server.port:
        server = replace(server, port=free_port(server.host))
    secret = secret or secrets.token_hex(32)
    ports = {name: preset.server.port for name, preset in (former or {}).items()}
    inner = [
        replace(
            loaded_preset.preset,
            server=inner_server(
                loaded_preset.preset.server,
                server,
                secret,
                ports.get(loaded_preset.preset.name) or free_port(HOST),
            ),
        )
        for loaded_preset in loaded
    ]
    candidates = _candidates(inner, room)
    held = [_as_before(preset, (former or {}).get(preset.name)) for preset in inner]
    free = room.free
    sizes = _with_shares(list(zip(held, candidates, strict=True)), free, room.memory)
    if sum(n_bytes for _, n_bytes in sizes) > free:
        sizes = _with_shares(list(zip(inner, candidates, strict=True)), free, room.memory)
    n_same = Counter(preset.model.served_name for preset in inner)
    members = tuple(
        _member(start.spec_of(request, preset, home), preset, n_bytes, candidate, of_disk, n_same)
        for request, candidate, (preset, n_bytes) in zip(requests, candidates, sizes, strict=True)
    )
    _refuse_too_big(members, free)
    spec = GatewaySpec(
        name, server, secret, members, members[0].name, free, linger_s, of_disk=of_disk
    )
    served = zip(requests, sizes, strict=True)
    return GatewayPlan(spec, tuple(MemberPlan(request, preset) for request, (preset, _) in served))


def write(
    planned: GatewayPlan, home: Home, running: Mapping[str, ServiceSpec] | None = None
) -> PlannedGateway:
    """Write all specs, except of `running` members. Raises SetupError."""
    specs = running or {}
    for member in planned.members:
        if member.preset.name not in specs:
            start.check_files(member.preset)
            start.check_port(member.preset.server, home)
            start.write(member.request, member.preset, home)
    members = [
        replace(member, service=specs.get(member.name, member.service))
        for member in planned.spec.members
    ]
    spec = replace(planned.spec, members=tuple(members))
    return PlannedGateway(spec, _service(spec, home))


def inner_server(own: ServerSpec, server: ServerSpec, secret: str, port: int) -> ServerSpec:
    """Loopback server section of a member, with the gateway's keys."""
    keys = [
        replace(key, key=digest_of(internal_key(secret, key)))
        for key in map(as_key, server.api_keys)
    ]
    # Requests of a gateway without keys come with its own; a service without keys allows all.
    own_key = ApiKey(internal_key(secret, None), may_raise=not keys)
    idle_s = None
    if own.resident is not Residency.ALWAYS:
        idle_s = own.idle_unload_s or IDLE_UNLOAD_S
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
        member.name
        for member in spec.members
        # Another gateway that runs it now has given it another key.
        if own_preset(home, member.name, spec.secret) is not None
        if member.name not in spec.handed_over and owner(home, member.name) is not None
    ]


def _candidates(presets: Sequence[Preset], room: MemoryRoom) -> list[Candidate | None]:
    """Planner inputs from files, or the hub; None where unknown.

    Raises SetupError where one would not even fit alone.
    """
    pairs: list[tuple[Preset, ModelFiles]] = []
    unknown: dict[str, str] = {}
    for preset in presets:
        try:
            pairs.append((preset, files_of(preset.model)))
        except SetupError as error:
            unknown[preset.name] = error.message
    by_name = {candidate.preset.name: candidate for candidate in of_many(pairs)}
    for name, candidate in by_name.items():
        if (why_not := refuse_if_too_big(candidate, room)) is not None:
            unknown[name] = why_not
    for name, why_not in unknown.items():
        log.warning("warning: `%s` is loaded alone, its size is not known: %s", name, why_not)
    return [None if preset.name in unknown else by_name[preset.name] for preset in presets]


def _with_shares(
    members: Sequence[tuple[Preset, Candidate | None]], budget: int, memory: MemoryBudget
) -> list[tuple[Preset, int]]:
    """Presets with KV budgets, and the bytes that each may take.

    Of the memory that is left when all are loaded, each whose share is not set gets a part in
    proportion to its KV. One of unknown size takes all that the members leave which are never
    unloaded.
    """
    spare = max(0, budget - sum(_n_bytes(*member, memory) or 0 for member in members))
    free = [
        (preset, candidate)
        for preset, candidate in members
        if candidate is not None and _is_free(preset)
    ]
    kv = {
        preset.name: need(candidate.load(memory, has_kv_share=False)).kv
        for preset, candidate in free
    }
    shared = []
    for preset, candidate in members:
        own = preset
        if preset.name in kv:
            n_kv = kv[preset.name] + spare * kv[preset.name] // sum(kv.values())
            pct = min(MAX_PCT, max(MIN_PCT, 100 * n_kv / memory.total))
            own = replace(preset, prefix_cache=replace(preset.prefix_cache, memory_budget_pct=pct))
        shared.append((own, _n_bytes(own, candidate, memory)))
    resident = sum(n or 0 for preset, n in shared if preset.server.resident is Residency.ALWAYS)
    return [(preset, max(0, budget - resident) if n is None else n) for preset, n in shared]


def _n_bytes(preset: Preset, candidate: Candidate | None, memory: MemoryBudget) -> int | None:
    """Bytes of a member with its whole KV budget; None where unknown."""
    if candidate is None:
        return None
    load = replace(candidate, preset=preset).load(memory)
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
    if same == former:
        return former
    return preset


def _summary(preset: Preset, candidate: Candidate | None) -> ModelSummary:
    if candidate is None:
        return ModelSummary(preset.kind)
    names: tuple[str, ...] = ("embedding",)
    if preset.kind is ServiceKind.CHAT:
        names = capabilities(candidate.files.source.parent, preset.kv.bits)
    return ModelSummary(
        kind=preset.kind,
        architecture=candidate.architecture,
        quantization=quantization_in(candidate.files.config),
        n_bytes=candidate.weights.n_bytes(),
        n_ctx_train=candidate.n_trained,
        capabilities=names,
    )


def _member(
    service: ServiceSpec, preset: Preset, n_bytes: int, candidate: Candidate | None, stops: bool,
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
        model=_summary(preset, candidate),
        stops=stops,
    )


def _service(spec: GatewaySpec, home: Home) -> ServiceSpec:
    """The gateway's own process; its spec is written down for it."""
    file = home.gateway_file(spec.name)
    make_folder(file.parent)
    write_json(file, spec)
    members_s = (member.service.policy.grace_s for member in spec.members)
    return ServiceSpec(
        name=spec.name,
        root=str(home.root),
        preset=", ".join(member.name for member in spec.members),
        url=start.url_of(spec.server),
        worker=(sys.executable, "-m", "mlxstack.gateway", str(file)),
        env={"MLX_STACK_HOME": str(home.root)} | start.QUIET,
        policy=RestartPolicy(grace_s=grace_s(spec.server.drain_s, members_s)),
    )


def _refuse_too_big(members: Sequence[GatewayMember], budget: int) -> None:
    """Raises SetupError where a member never fits beside those that stay loaded."""
    always = [member for member in members if member.residency is Residency.ALWAYS]
    resident = sum(member.n_bytes for member in always)
    largest = max((member.n_bytes for member in members if member not in always), default=0)
    if resident + largest > budget:
        sizes = ", ".join(f"{member.name} {size(member.n_bytes)}" for member in members)
        raise SetupError(
            f"the members of this gateway do not fit: {size(resident + largest)} are needed at "
            f"once ({sizes}), {size(budget)} are there; give them fewer or shorter slots, or "
            "`server.resident: auto`"
        )


def _refuse_twins(name: str, names: Sequence[str]) -> None:
    for service in (name, *names):
        if (name, *names).count(service) > 1:
            raise SetupError(
                f"two services of this gateway are called `{service}`; give one of them another "
                "`name`, or the gateway another `--name`"
            )


def _refuse_other_keys(server: ServerSpec, presets: Sequence[Preset]) -> None:
    """Raise SetupError for member keys that the gateway lacks."""
    for preset in presets:
        if preset.server.api_keys and preset.server.api_keys != server.api_keys:
            raise SetupError(
                f"`{preset.name}` has other server.api_keys than the gateway, which are those of "
                "its first member; give both the same"
            )


def _service_name(model: str) -> str:
    return service_name(model.rpartition("/")[2])


def _lines_of(left_out: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
