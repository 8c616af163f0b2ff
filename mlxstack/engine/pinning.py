"""Names prefixes, so that they are kept whatever happens, or longer than others."""

import time
from typing import Any

from mlxstack.core.act import Pin, PinKnown, Pinned, Protect, Recall, Unpin
from mlxstack.core.errors import NotFound
from mlxstack.engine.memory import Memory
from mlxstack.engine.seating import Seating
from mlxstack.policy.owners import Name
from mlxstack.policy.prefix import common_prefix


def do(chore: Pin | PinKnown | Unpin | Recall | Protect, seating: Seating) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match chore:
        case Pin():
            return pin(seating, chore)
        case PinKnown():
            return pin_known(seating, chore)
        case Unpin():
            if not seating.memory.owners.unpin(chore.name):
                raise NotFound(f"no prefix is called {chore.name}")
        case Recall():
            return tuple(one.tokens for one in seating.learned)
        case Protect():
            _park_nearest(seating, chore.tokens, "")
    return None


def pin(seating: Seating, wanted: Pin) -> Pinned:
    """A live context that begins with the tokens is parked first, so that there is something."""
    memory = seating.memory
    _park_nearest(seating, wanted.tokens, wanted.salt)
    found = seating.finding.kept(wanted.tokens, wanted.salt, seating.slots[0])
    return _pin(memory, Name(wanted.name, found.keys, found.position, time.monotonic()))


def pin_known(seating: Seating, wanted: PinKnown) -> Pinned:
    """Raises NotFound when what has this id was forgotten meanwhile."""
    owners = seating.memory.owners
    known = owners.known(wanted.id)
    if known is None:
        raise NotFound(f"no prefix has the id {wanted.id}; it may have been evicted")
    name = Name(wanted.name, known.keys, known.n_tokens, time.monotonic())
    return _pin(seating.memory, name)


def _pin(memory: Memory, name: Name) -> Pinned:
    memory.owners.pin(name)
    nodes = memory.index.nodes
    n_bytes = sum(nodes[key].record.n_bytes for key in name.keys if key in nodes)
    return Pinned(name.name, name.n_tokens, n_bytes)


def _park_nearest(seating: Seating, tokens: tuple[int, ...], salt: str) -> None:
    """Park the live context that shares most of these tokens, if any shares some."""
    live = [c for c in seating.slots if c.salt == salt and len(c)]
    nearest = max(live, key=lambda c: common_prefix(c.tokens, tokens), default=None)
    if nearest is not None and common_prefix(nearest.tokens, tokens):
        seating.park(nearest)
