"""Takes a slot for a prompt and reuses whatever KV is nearest: its own, or another slot's."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.ask import Ask
from mlxstack.core.event import Miss, Source
from mlxstack.engine.context import Context
from mlxstack.policy.prefix import common_prefix


class Reuse(Struct, frozen=True):
    """How many tokens of the prompt stand in the slot, whence, and why not more."""

    n_cached: int
    source: Source = Source.NONE
    miss: Miss | None = None


def take(slots: Sequence[Context], slot: int, ask: Ask, block: int) -> Reuse:
    """Make the slot's context the longest reusable beginning of the prompt.

    What comes from another slot is copied, in whole blocks. The longest wins; ties go to the
    slot's own, which costs nothing.
    """
    mine = slots[slot]
    if not ask.use_cache:
        mine.clear()
        mine.salt = ask.salt
        return Reuse(0, miss=Miss("disabled"))
    miss = _miss(slots, ask)
    own = mine.shared(ask.tokens, ask.salt)
    best, position = _best_other(slots, slot, ask, block)
    if best is not None and position > own:
        fresh = mine.fresh()
        n_cached = fresh.copy_from(best, position)
        mine.become(fresh)
        return Reuse(n_cached, Source.FORK, miss)
    if own == 0:
        mine.clear()
    n_cached = mine.rewind(own)
    mine.salt = ask.salt
    return Reuse(n_cached, Source.SLOT if n_cached else Source.NONE, miss)


def _best_other(
    slots: Sequence[Context], slot: int, ask: Ask, block: int
) -> tuple[Context | None, int]:
    best, most = None, 0
    for index, context in enumerate(slots):
        if index == slot or not len(context):
            continue
        position = context.shared(ask.tokens, ask.salt)
        if context.is_sliceable:
            position -= position % block
        if position > most:
            best, most = context, position
    return best, most


def _miss(slots: Sequence[Context], ask: Ask) -> Miss | None:
    """Why less than the whole prompt can be reused, seen from the context that shares most."""
    known = [c for c in slots if len(c) and c.salt == ask.salt]
    if not known:
        return Miss("cold")
    shared = max(common_prefix(c.tokens, ask.tokens) for c in known)
    nearest = max(known, key=lambda c: common_prefix(c.tokens, ask.tokens))
    if shared >= len(ask.tokens) - 1:
        return None
    if nearest.reach(shared) < shared:
        return Miss("no checkpoint", nearest.reach(shared))
    if shared == len(nearest):
        return None
    return Miss("diverged", shared) if shared else Miss("cold")
