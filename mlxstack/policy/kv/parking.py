"""Parking: which contexts are kept without a slot, and which are stored."""

from msgspec import Struct

from mlxstack.core.preset import Persist, PrefixCacheSpec

MIN_PARKED = 16
"""Tokens of the shortest context without an agent that is parked: fewer are computed as fast."""


class ContextFacts(Struct, frozen=True):
    """Facts about the context of a slot."""

    n_tokens: int
    has_agent: bool
    """Whether it belongs to an agent that was named by its caller."""
    is_sliceable: bool
    """Whether every layer can be cut anywhere."""
    is_storable: bool
    """Whether every layer can be stored and rebuilt."""


def is_worth_parking(context: ContextFacts, n_kept: int, block_size: int) -> bool:
    """Whether tokens after the first `n_kept` are many, or a whole conversation.

    Of layers that cannot be cut a short one has as much state as a long one.
    """
    if n_kept or context.n_tokens >= block_size:
        return context.n_tokens - n_kept >= block_size
    if context.has_agent:
        return context.n_tokens > 0
    return context.n_tokens >= MIN_PARKED and context.is_sliceable


def is_stored(context: ContextFacts, spec: PrefixCacheSpec, persist: Persist) -> bool:
    """Whether its KV goes to disk.

    That of an agent does at any length, other KV from one block on.
    """
    if not (context.is_storable and spec.enabled and spec.disk.enabled):
        return False
    if context.has_agent:
        return context.n_tokens > 0 and persist is not Persist.NEVER
    return context.n_tokens >= spec.block_size
