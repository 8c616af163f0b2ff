"""Advice on plans that do not fit, and the choice of models."""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Unsupported
from mlxstack.policy.memory.capacity import (
    QUANTIZED_BITS,
    ServiceLoad,
    fits,
    max_agents,
    max_ctx,
    need,
    quantized,
)

ROUND_TOKENS = 1024
MIN_TOKENS = 1024
"""A context shorter than this is not worth proposing."""
SHORT_TOKENS = 16 * 1024
"""A shorter context is proposed only where nothing else fits: a client's prompt needs more."""
MAX_BUDGET_PCT = 90
"""Largest `prefix_cache.memory_budget_pct` that a preset may have."""


class CapacityOption(Struct, frozen=True):
    """Settings with which a load fits: slots, context, KV bits.

    `budget_pct` is the share of the memory that KV then needs; None where the present one is
    enough.
    """

    n_slots: int
    n_ctx: int
    bits: int
    budget_pct: float | None = None


class CapacityRequest(Struct, frozen=True):
    """Candidate model for a load; `n_trained` is 0 when unknown.

    That is the context of its training in tokens.
    """

    name: str
    load: ServiceLoad
    n_trained: int = 0


class FitLevel(IntEnum):
    """Degree to which a model serves a wish; lower is better."""

    FITS = 0
    NEEDS_4_BIT = 1
    NOT_TRAINED = 2
    TOO_LARGE = 3


class Advice(Struct, frozen=True):
    """The wished `load`, in the highest KV precision that fits if any.

    `n_agents` of the wished context would fit, in the precision of `load`.
    """

    name: str
    verdict: FitLevel
    load: ServiceLoad
    n_agents: int


def precisions(load: ServiceLoad) -> Iterator[ServiceLoad]:
    """The load, then with fewer KV bits where heads can be quantized."""
    yield load
    for bits in sorted(QUANTIZED_BITS, reverse=True):
        if bits < load.geometry.bits:
            try:
                geometry = quantized(load.geometry, bits, load.geometry.group_size)
            except Unsupported:
                return
            yield replace(load, geometry=geometry)


def nearest(load: ServiceLoad, memory: int) -> tuple[CapacityOption, ...]:
    """Single changes that make it fit, least painful first, else several at once.

    A context below `SHORT_TOKENS` is proposed only where no other change fits.

    Where only the KV budget is too small, the first is a larger one. Where the memory is, each
    comes with the budget that it needs.
    """
    unbounded = replace(load, budget=None)
    if load.budget is not None and fits(unbounded, memory):
        loads = [load, *_smaller(load, memory)]
    else:
        loads = _smaller(unbounded, memory) or _combined(unbounded, memory)
    options = (option(replace(smaller, budget=load.budget)) for smaller in loads)
    return tuple(choice for choice in options if (choice.budget_pct or 0) <= MAX_BUDGET_PCT)


def option(load: ServiceLoad) -> CapacityOption:
    """Settings of a load, with a larger KV share where needed."""
    pct = None
    if load.budget is not None:
        larger = load.budget.holding(need(load).kv)
        if larger != load.budget:
            pct = larger.pct
    return CapacityOption(load.n_slots, load.n_ctx, load.geometry.bits, pct)


def _smaller(load: ServiceLoad, memory: int) -> list[ServiceLoad]:
    smaller = [denser for denser in precisions(load) if fits(denser, memory)]
    n_slots = min(max_agents(load, memory), load.n_slots)
    if n_slots:
        smaller.append(replace(load, n_slots=n_slots))
    # Of a load with short contexts, a shorter one is a mild change.
    least = 0
    if load.n_ctx > SHORT_TOKENS:
        least = SHORT_TOKENS
    return smaller + _shorter(load, memory, least)


def advise(wishes: Sequence[CapacityRequest], memory: int) -> tuple[Advice, ...]:
    """Wishes that fit by order of preference, then by largest weights.

    8-bit KV counts as good as 16-bit, 4-bit does not.
    """
    advice = [_advice(wish, memory) for wish in wishes]
    return tuple(sorted(advice, key=lambda row: (row.verdict, -row.load.weights, row.name)))


def _shorter(load: ServiceLoad, memory: int, least: int) -> list[ServiceLoad]:
    n_ctx = min(max_ctx(load, memory), load.n_ctx) // ROUND_TOKENS * ROUND_TOKENS
    if n_ctx >= max(least, MIN_TOKENS):
        return [replace(load, n_ctx=n_ctx)]
    return []


def _combined(load: ServiceLoad, memory: int) -> list[ServiceLoad]:
    """The first that fits: fewer KV bits and slots, then one slot of a shorter context."""
    dense = list(precisions(load))
    for denser in dense[1:]:
        if n_slots := min(max_agents(denser, memory), load.n_slots):
            return [replace(denser, n_slots=n_slots)]
    single = [replace(denser, n_slots=1) for denser in dense]
    for least in (SHORT_TOKENS, MIN_TOKENS):
        for denser in single:
            if shorter := _shorter(denser, memory, least):
                return shorter
    return []


def _advice(wish: CapacityRequest, memory: int) -> Advice:
    wished = replace(wish.load, budget=None)
    best = next((precision for precision in precisions(wished) if fits(precision, memory)), None)
    load = best or wished
    n_agents = max_agents(load, memory)
    return Advice(wish.name, _verdict(wish, best), replace(load, budget=wish.load.budget), n_agents)


def _verdict(wish: CapacityRequest, best: ServiceLoad | None) -> FitLevel:
    if best is None:
        return FitLevel.TOO_LARGE
    if 0 < wish.n_trained < wish.load.n_ctx:
        return FitLevel.NOT_TRAINED
    if best.geometry.bits == min(QUANTIZED_BITS):
        return FitLevel.NEEDS_4_BIT
    return FitLevel.FITS


class SlotSizes(Struct, frozen=True):
    """Slots, tokens per slot, KV bits; None where the planner may choose."""

    n_slots: int | None = None
    n_ctx: int | None = None
    bits: int | None = None


AGENT_TOKENS = 64 * 1024
"""The context that coding agents ask for."""
LARGE_TOKENS = 2 * AGENT_TOKENS
SMALL_TOKENS = 4096
MANY_SLOTS = 4
FEW_SLOTS = 2


def choose_sizes(
    is_fitting: Callable[[CapacityOption], bool],
    n_trained: int,
    sizes: SlotSizes,
    batch_size: int = MANY_SLOTS,
) -> CapacityOption | None:
    """Sizes within `sizes` that serve several agents best, of those that fit.

    Where `MANY_SLOTS` fit, there are as many more as do, up to `batch_size`: the rows that are
    decoded together.
    """
    best = next((choice for choice in _choices(n_trained, sizes) if is_fitting(choice)), None)
    if best is None or sizes.n_slots is not None or best.n_slots < MANY_SLOTS:
        return best
    wider = (replace(best, n_slots=n) for n in range(batch_size, MANY_SLOTS, -1))
    return next((choice for choice in wider if is_fitting(choice)), best)


def _choices(n_trained: int, sizes: SlotSizes) -> Iterator[CapacityOption]:
    """Sizes by preference: long contexts, several agents, then 8-bit KV, fewer slots."""
    most = n_trained or AGENT_TOKENS
    large = min(most, LARGE_TOKENS)
    agent = min(most, AGENT_TOKENS)
    shorter = [agent >> step for step in range(1, 8) if agent >> step >= SMALL_TOKENS]
    several = range(MANY_SLOTS, FEW_SLOTS - 1, -1)
    ladder = [(MANY_SLOTS, large, 16), *((n, agent, 16) for n in several)]
    ladder += [*((n, agent, 8) for n in several), (1, agent, 16), (1, agent, 8)]
    ladder += [(n, n_ctx, bits) for n_ctx in shorter for bits in (16, 8) for n in (3, 2, 1)]
    chosen = (
        CapacityOption(sizes.n_slots or n, sizes.n_ctx or n_ctx, sizes.bits or bits)
        for n, n_ctx, bits in ladder
    )
    yield from dict.fromkeys(chosen)
