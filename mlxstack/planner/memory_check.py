"""Memory check: fit of a service next to the running ones."""

import os
from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.core.errors import BadRequest, DoesNotFit, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.host import services
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import VARIABLE, MemoryBudget
from mlxstack.host.process import held_bytes
from mlxstack.host.service_state import ServiceSpec, ServiceState, read_json
from mlxstack.models.model_files import find_model
from mlxstack.planner.candidate import Candidate, excerpts, of_many, of_preset
from mlxstack.policy.memory.capacity import MemoryNeed, ServiceLoad, fits, need
from mlxstack.policy.memory.capacity_advice import CapacityOption, nearest
from mlxstack.policy.memory.kv_geometry import Geometry
from mlxstack.policy.memory.memory_shares import MemoryClaim

OPTION = "--set "
BUDGET_KEY = "prefix_cache.memory_budget_pct"


class MemoryUser(Struct, frozen=True):
    """Running service, and the bytes that it may take."""

    name: str
    n_bytes: int


class MemoryRoom(Struct, frozen=True):
    """Memory of this computer, and the services that use it already."""

    memory: MemoryBudget
    others: tuple[MemoryUser, ...]

    @property
    def free(self) -> int:
        """Bytes that one more service may take."""
        return self.memory.usable - sum(one.n_bytes for one in self.others)


class MemberService(Struct, frozen=True):
    """Part of a gateway's spec: a service behind it."""

    service: ServiceSpec


class GatewayMemory(Struct, frozen=True):
    """Part of a gateway's spec: `members` that take turns within `budget` bytes."""

    budget: int
    members: tuple[MemberService, ...]


class PresetFit(Struct, frozen=True):
    """Weights, fit and presence of a preset's model; None where unknown.

    `modalities` are those of the files, or of config.json before the download.
    """

    weights_bytes: int | None
    fits: bool | None
    is_downloaded: bool
    modalities: str = "text"


def preset_fit(candidate: Candidate, room: MemoryRoom) -> PresetFit:
    """Size and fit of a preset with its own settings."""
    modalities = "text, image" if candidate.vision.processor is not None else "text"
    try:
        n_bytes = candidate.weights.n_bytes()
        refuse_if_too_big(candidate, room)
    except BadRequest:
        return PresetFit(None, None, candidate.is_measured, modalities)
    except SetupError:
        return PresetFit(n_bytes, False, candidate.is_measured, modalities)
    return PresetFit(n_bytes, True, candidate.is_measured, modalities)


def preset_fits(home: Home, names: Iterable[str], memory: MemoryBudget) -> dict[str, PresetFit]:
    """Fit of each readable preset on an otherwise idle machine."""
    known = {}
    for name in names:
        with suppress(SetupError, BadRequest):
            preset = presets.load(name, home).preset
            known[name] = preset, find_model(preset.model, excerpts())
    room = MemoryRoom(memory, ())
    found = of_many(list(known.values()))
    return {name: preset_fit(one, room) for name, one in zip(known, found, strict=True)}


def room_in(home: Home, memory: MemoryBudget, but: str | None = None) -> MemoryRoom:
    """Memory next to all running services but `but` and this process itself."""
    taken = {one.name: one.least for one in claims_in(home, memory, but)}
    for name, one in gateways_in(home).items():
        for member in one.members:
            taken[name] = taken.get(name, 0) + taken.pop(member.service.name, 0)
    return MemoryRoom(memory, tuple(MemoryUser(*one) for one in taken.items()))


def refuse_if_too_big(candidate: Candidate, room: MemoryRoom, option: str = OPTION) -> str | None:
    """Raise DoesNotFit, with options that fit, for too large a service.

    Each key of an option comes after `option`. Of a model whose caches are unknown only the weights
    are counted; then the reason is returned.
    """
    unknown = None
    try:
        load = candidate.load(room.memory.half_bytes, room.memory.total)
    except BadRequest as why:
        if (why.param or "").startswith(("kv.", "hosts")):
            raise SetupError(f"{why.param}: {why.message}") from why
        unknown = why.message
        try:
            weights = candidate.weights.n_bytes(room.memory.half_bytes)
        except BadRequest:
            return unknown
        load = ServiceLoad(Geometry(()), weights)
    if not fits(load, room.free):
        raise DoesNotFit(_refusal(candidate, load, room, option))
    return unknown


def settings(option: CapacityOption, load: ServiceLoad, before: str = OPTION) -> str:
    """Differences of an option from `load`, each key after `before`."""
    changes = [
        (key, new)
        for key, new, old in (
            ("slots.count", option.n_slots, load.n_slots),
            ("slots.n_ctx", option.n_ctx, load.n_ctx),
            ("kv.bits", option.bits, load.geometry.bits),
        )
        if new != old
    ]
    settings = [f"{before}{key}={new}" for key, new in changes]
    if option.budget_pct is not None:
        settings.append(f"{before}{BUDGET_KEY}={option.budget_pct:g}")
    return " ".join(settings)


def _breakdown(load: ServiceLoad, is_measured: bool) -> list[tuple[str, int, str]]:
    """Parts of the load: name, bytes, explanation."""
    parts: MemoryNeed = need(load)
    n_slots, n_ctx, geometry = load.n_slots, load.n_ctx, load.geometry
    return [
        ("weights", parts.weights, "measured" if is_measured else "estimated"),
        ("KV full", parts.kv_full, f"{n_slots} x {n_ctx} tokens x {geometry.growth} bytes"),
        ("KV windows", parts.kv_state, "sliding windows and other states of fixed size"),
        ("workspace", parts.workspace, f"activations of {load.chunk} tokens, logits"),
        ("margin", parts.margin, "tokenizer, kernels, the process"),
    ]


def _refusal(candidate: Candidate, load: ServiceLoad, room: MemoryRoom, option: str) -> str:
    memory = room.memory
    lines = _breakdown(load, candidate.is_measured)
    lines += [(f"`{one.name}`", one.n_bytes, "runs beside it") for one in room.others]
    total = sum(n_bytes for _, n_bytes, _ in lines)
    rows = [f"  {name:<11} {size(n_bytes):>9}  {word}" for name, n_bytes, word in lines if n_bytes]
    why = (
        f"{size(total)} are needed, {memory.owner} has {size(memory.usable)} for models "
        f"(of {size(memory.total)})"
    )
    if total <= memory.usable:
        why = over_budget(load)
    return "\n".join(
        [
            f"`{candidate.preset.name}` does not fit: {why}",
            *rows,
            _way_out(candidate, load, room, option),
        ]
    )


def over_budget(load: ServiceLoad) -> str:
    """Sentence on live KV over the engine's budget; "" where it fits."""
    budget, kv = load.budget, need(load).kv
    if budget is None or kv <= budget.n_bytes:
        return ""
    return (
        f"{load.n_slots} slots x {load.n_ctx} tokens are {size(kv)} of KV, and "
        f"{BUDGET_KEY} {budget.pct:g} gives KV {size(budget.n_bytes)} "
        f"({budget.pct:g} % of {size(budget.total)})"
    )


def _way_out(candidate: Candidate, load: ServiceLoad, room: MemoryRoom, option: str) -> str:
    """Settings and stops with which the service fits, each one computed."""
    ways = [
        way
        for one in nearest(load, room.free)
        if _fits_with(candidate, one, room) and (way := settings(one, load, option))
    ]
    ways += [f"mlx-stack down {' '.join(names)}" for names in _stops(load, room)]
    if ways:
        return "what would help: " + ", or ".join(ways)
    return (
        f"no setting makes it fit; take a smaller model, or set {VARIABLE} to the memory that "
        "there is, such as 48GB"
    )


def _fits_with(candidate: Candidate, option: CapacityOption, room: MemoryRoom) -> bool:
    """Whether the service fits with these settings and their buffers."""
    preset, pct = candidate.preset, option.budget_pct
    cache = preset.prefix_cache
    changed = replace(
        preset,
        slots=replace(preset.slots, count=option.n_slots, n_ctx=option.n_ctx),
        kv=replace(preset.kv, bits=option.bits),
        prefix_cache=cache if pct is None else replace(cache, memory_budget_pct=pct),
    )
    memory = room.memory
    try:
        load = replace(candidate, preset=changed).load(memory.half_bytes, memory.total)
    except BadRequest:
        return False
    return fits(load, room.free)


def _stops(load: ServiceLoad, room: MemoryRoom) -> list[tuple[str, ...]]:
    """Services to stop so that the load fits: one, else all."""
    single: list[tuple[str, ...]] = [
        (one.name,) for one in room.others if fits(load, room.free + one.n_bytes)
    ]
    if single or len(room.others) < 2 or not fits(load, room.memory.usable):
        return single
    return [tuple(one.name for one in room.others)]


def claim_of(preset: Preset, memory: MemoryBudget, name: str) -> MemoryClaim:
    """Claim of a preset's service. Raises SetupError, BadRequest."""
    load = of_preset(preset).load(memory.half_bytes, memory.total)
    parts, share = need(load), load.budget
    if preset.kind is ServiceKind.EMBEDDING:
        return MemoryClaim(name, parts.total, share=0)
    fixed_share = None if share is None else share.n_bytes
    return MemoryClaim(name, parts.total - parts.kv, parts.kv, fixed_share)


def gateways_in(home: Home) -> dict[str, GatewayMemory]:
    """Memory of each running gateway, by its name."""
    names = [one.plan.name for one in services.running(home) if services.is_gateway(one.plan)]
    found = {name: read_json(home.gateway_file(name), GatewayMemory) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def claims_in(home: Home, memory: MemoryBudget, but: str | None) -> tuple[MemoryClaim, ...]:
    """Claims of all running services but `but` and this process itself.

    Members of a gateway take turns: its own claim is negative where theirs exceed its budget.
    """
    running = [state for state in services.running(home) if state.plan.name != but]
    others = [state for state in running if not (state.worker and state.worker.pid == os.getpid())]
    claims = {one.plan.name: _claim(home, one, memory) for one in others}
    for name, one in gateways_in(home).items():
        members = [claims[m.service.name] for m in one.members if m.service.name in claims]
        excess = max(0, sum(member.least for member in members) - one.budget)
        if name in claims:
            claims[name] = MemoryClaim(name, -excess, share=0)
    return tuple(claims.values())


def _claim(home: Home, state: ServiceState, memory: MemoryBudget) -> MemoryClaim:
    """Claim of a running service; its footprint where its model is unknown."""
    name = state.plan.name
    if services.is_gateway(state.plan):
        # Its plan leaves nothing for its own process, which the system's reserve covers.
        return MemoryClaim(name, 0, share=0)
    preset = read_json(home.preset_file(name), Preset)
    if preset is not None:
        with suppress(SetupError, BadRequest):
            return claim_of(preset, memory, name)
    process = state.worker or state.supervisor
    return MemoryClaim(name, held_bytes(process.pid), share=0)
