"""Names a prefix, so that it is kept whatever happens."""

import time

from mlxstack.core.act import Pin, Pinned
from mlxstack.engine.seating import Seating
from mlxstack.policy.owners import Name
from mlxstack.policy.prefix import common_prefix


def pin(seating: Seating, wanted: Pin) -> Pinned:
    """A live context that begins with the tokens is parked first, so that there is something."""
    memory = seating.memory
    live = [c for c in seating.slots if c.salt == wanted.salt and len(c)]
    nearest = max(live, key=lambda c: common_prefix(c.tokens, wanted.tokens), default=None)
    if nearest is not None and common_prefix(nearest.tokens, wanted.tokens):
        seating.park(nearest)
    path = memory.path_of(wanted.tokens, wanted.salt)
    n_tokens = path[-1].upto if path else 0
    keys = tuple(step.key for step in path)
    memory.owners.pin(Name(wanted.name, keys, n_tokens, time.monotonic()))
    return Pinned(wanted.name, n_tokens, sum(step.n_bytes for step in path))
