"""What to do when something does not fit, and which model to take when several do."""

from collections.abc import Iterator, Sequence
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Unsupported
from mlxstack.policy.capacity import Load, fits, max_agents, max_ctx
from mlxstack.policy.geometry import QUANTIZED_BITS, quantized

ROUND_TOKENS = 1024
LEAST_TOKENS = 1024
"""A context shorter than this is not worth proposing."""


class Option(Struct, frozen=True):
    """Settings with which a load would fit: slots, tokens per slot, KV bits."""

    n_slots: int
    n_ctx: int
    bits: int


class Wish(Struct, frozen=True):
    """A model that could carry the load; `n_trained` tokens of context, 0 when unknown."""

    name: str
    load: Load
    n_trained: int = 0


class Verdict(IntEnum):
    """How well a model serves a wish; lower is better."""

    FITS = 0
    NEEDS_4_BIT = 1
    NOT_TRAINED = 2
    TOO_LARGE = 3


class Advice(Struct, frozen=True):
    """`load` is the wish in the highest KV precision that fits, else as it was wished.

    `n_agents` of the wished context would fit, in the precision of `load`.
    """

    name: str
    verdict: Verdict
    load: Load
    n_agents: int


def precisions(load: Load) -> Iterator[Load]:
    """The load as it is, then with KV of fewer bits, as far as its heads can be quantised."""
    yield load
    for bits in sorted(QUANTIZED_BITS, reverse=True):
        if bits < load.geometry.bits:
            try:
                geometry = quantized(load.geometry, bits, load.geometry.group_size)
            except Unsupported:
                return
            yield replace(load, geometry=geometry)


def nearest(load: Load, memory: int) -> tuple[Option, ...]:
    """One change that makes it fit, the least painful first; if none does, both sizes at once."""
    found = [_option(other) for other in precisions(load) if fits(other, memory)]
    n_slots = min(max_agents(load, memory), load.n_slots)
    if n_slots:
        found.append(_option(replace(load, n_slots=n_slots)))
    found += _shorter(load, memory)
    return tuple(found or _last_resort(load, memory))


def advise(wishes: Sequence[Wish], memory: int) -> tuple[Advice, ...]:
    """The wishes in order of preference: what fits first, and of that the largest weights.

    8-bit KV counts as good as 16-bit, 4-bit does not.
    """
    found = [_advice(wish, memory) for wish in wishes]
    return tuple(sorted(found, key=lambda one: (one.verdict, -one.load.weights, one.name)))


def _option(load: Load) -> Option:
    return Option(load.n_slots, load.n_ctx, load.geometry.bits)


def _shorter(load: Load, memory: int) -> list[Option]:
    n_ctx = min(max_ctx(load, memory), load.n_ctx) // ROUND_TOKENS * ROUND_TOKENS
    return [_option(replace(load, n_ctx=n_ctx))] if n_ctx >= LEAST_TOKENS else []


def _last_resort(load: Load, memory: int) -> list[Option]:
    for other in precisions(replace(load, n_slots=1)):
        if found := _shorter(other, memory):
            return found
    return []


def _advice(wish: Wish, memory: int) -> Advice:
    best = next((one for one in precisions(wish.load) if fits(one, memory)), None)
    load = best or wish.load
    return Advice(wish.name, _verdict(wish, best), load, max_agents(load, memory))


def _verdict(wish: Wish, best: Load | None) -> Verdict:
    if best is None:
        return Verdict.TOO_LARGE
    if 0 < wish.n_trained < wish.load.n_ctx:
        return Verdict.NOT_TRAINED
    return Verdict.NEEDS_4_BIT if best.geometry.bits == min(QUANTIZED_BITS) else Verdict.FITS
