"""Fit of a candidate: refusals, and settings that fit."""

from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, DoesNotFit, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset
from mlxstack.host.hardware import MEMORY_VARIABLE
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.memory_room import MemoryRoom
from mlxstack.policy.memory.capacity import Geometry, MemoryNeed, ServiceLoad, fits, need
from mlxstack.policy.memory.capacity_advice import CapacityOption, SlotSizes, nearest

OPTION = "--set "
BUDGET_KEY = "prefix_cache.memory_budget_pct"
SIZES = ("slots.count", "slots.n_ctx", "kv.bits")
"""Keys of slots, tokens per slot and KV bits."""
REFUSED = ("kv.", "hosts", "model_type")
"""Keys whose refusals no start would overcome; the type of a model needs a library that has it."""


def refuse_if_too_big(candidate: Candidate, room: MemoryRoom, option: str = OPTION) -> str | None:
    """Raise DoesNotFit, with options that fit, for too large a service.

    Each key of an option comes after `option`. Of a model whose caches are unknown only the weights
    are counted; then the reason is returned.
    """
    unknown = None
    try:
        load = candidate.load(room.memory)
    except BadRequest as error:
        if (error.param or "").startswith(REFUSED):
            raise SetupError(f"{error.param}: {error.message}") from error
        unknown = error.message
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
    new = (option.n_slots, option.n_ctx, option.bits)
    sizes = zip(SIZES, new, (load.n_slots, load.n_ctx, load.geometry.bits), strict=True)
    changes = [f"{before}{key}={value}" for key, value, old in sizes if value != old]
    if option.budget_pct is not None:
        changes.append(f"{before}{BUDGET_KEY}={option.budget_pct:g}")
    return " ".join(changes)


def sized(preset: Preset, option: CapacityOption) -> Preset:
    """A preset with the settings of an option."""
    cache = preset.prefix_cache
    pct = option.budget_pct
    return replace(
        preset,
        slots=replace(preset.slots, count=option.n_slots, n_ctx=option.n_ctx),
        kv=replace(preset.kv, bits=option.bits),
        prefix_cache=cache if pct is None else replace(cache, memory_budget_pct=pct),
    )


def as_sets(fixed: SlotSizes) -> tuple[str, ...]:
    """The sizes that are given, as `--set` takes them."""
    sizes = zip(SIZES, (fixed.n_slots, fixed.n_ctx, fixed.bits), strict=True)
    return tuple(f"{key}={value}" for key, value in sizes if value is not None)


def _breakdown(load: ServiceLoad, is_measured: bool) -> list[tuple[str, int, str]]:
    """Parts of the load: name, bytes, explanation."""
    parts: MemoryNeed = need(load)
    n_slots = load.n_slots
    n_ctx = load.n_ctx
    geometry = load.geometry
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
    lines += [(f"`{name}`", n, "runs beside it") for name, n in room.claims.items()]
    total = sum(n_bytes for _, n_bytes, _ in lines)
    rows = [f"  {name:<11} {size(n_bytes):>9}  {word}" for name, n_bytes, word in lines if n_bytes]
    reason = (
        f"{size(total)} are needed, {memory.owner} has {size(memory.usable)} for models "
        f"(of {size(memory.total)})"
    )
    if total <= memory.usable:
        reason = over_budget(load)
    return "\n".join(
        [
            f"`{candidate.preset.name}` does not fit: {reason}",
            *rows,
            _way_out(candidate, load, room, option),
        ]
    )


def over_budget(load: ServiceLoad) -> str:
    """Sentence on live KV over the engine's budget; "" where it fits."""
    budget = load.budget
    kv = need(load).kv
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
        for change in nearest(load, room.free)
        if fits_with(candidate, change, room, has_kv_share=True)
        if (way := settings(change, load, option))
    ]
    ways += [f"mlx-stack down {' '.join(names)}" for names in _stops(load, room)]
    if ways:
        return "what would help: " + ", or ".join(ways)
    return (
        "no setting makes it fit; take a smaller model, or set "
        f"{MEMORY_VARIABLE} to the memory that there is, such as 48GB"
    )


def fits_with(
    candidate: Candidate, option: CapacityOption, room: MemoryRoom, *, has_kv_share: bool = False
) -> bool:
    """Whether the service fits with these settings and their buffers."""
    changed = replace(candidate, preset=sized(candidate.preset, option))
    try:
        return fits(changed.load(room.memory, has_kv_share=has_kv_share), room.free)
    except BadRequest:
        return False


def _stops(load: ServiceLoad, room: MemoryRoom) -> list[tuple[str, ...]]:
    """Services to stop so that the load fits: one, else all."""
    single: list[tuple[str, ...]] = [
        (name,) for name, n_bytes in room.claims.items() if fits(load, room.free + n_bytes)
    ]
    if single or len(room.claims) < 2 or not fits(load, room.memory.usable):
        return single
    return [tuple(room.claims)]
