"""Names prefixes, so that they are kept whatever happens, or longer than others."""

import time
from typing import Any

from mlxstack.core.commands import (
    ListSharedPrefixes,
    PinKnownPrefix,
    PinnedPrefix,
    PinPrefix,
    RetainPrefix,
    UnpinPrefix,
)
from mlxstack.core.errors import NotFound
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_preparation import SlotKVManager
from mlxstack.policy.common_prefix import common_prefix
from mlxstack.policy.retention import PinnedPrefixName


def do(
    command: PinPrefix | PinKnownPrefix | UnpinPrefix | ListSharedPrefixes | RetainPrefix,
    slot_kv: SlotKVManager,
) -> Any:
    """The answer to the chore, as its own words say. Raises NotFound."""
    match command:
        case PinPrefix():
            return pin(slot_kv, command)
        case PinKnownPrefix():
            return pin_known(slot_kv, command)
        case UnpinPrefix():
            if not slot_kv.memory.retention.unpin(command.name):
                raise NotFound(f"no prefix is called {command.name}")
        case ListSharedPrefixes():
            return tuple(one.tokens for one in slot_kv.learned)
        case RetainPrefix():
            _park_nearest(slot_kv, command.tokens, "")
    return None


def pin(slot_kv: SlotKVManager, wanted: PinPrefix) -> PinnedPrefix:
    """A live context that begins with the tokens is parked first, so that there is something."""
    memory = slot_kv.memory
    _park_nearest(slot_kv, wanted.tokens, wanted.salt)
    found = slot_kv.lookup.kept(wanted.tokens, wanted.salt, slot_kv.slots[0])
    return _pin(memory, PinnedPrefixName(wanted.name, found.keys, found.position, time.monotonic()))


def pin_known(slot_kv: SlotKVManager, wanted: PinKnownPrefix) -> PinnedPrefix:
    """Raises NotFound when what has this id was forgotten meanwhile."""
    retention = slot_kv.memory.retention
    known = retention.known(wanted.id)
    if known is None:
        raise NotFound(f"no prefix has the id {wanted.id}; it may have been evicted")
    name = PinnedPrefixName(wanted.name, known.keys, known.n_tokens, time.monotonic())
    return _pin(slot_kv.memory, name)


def _pin(memory: PrefixCache, name: PinnedPrefixName) -> PinnedPrefix:
    memory.retention.pin(name)
    nodes = memory.index.nodes
    n_bytes = sum(nodes[key].record.n_bytes for key in name.keys if key in nodes)
    return PinnedPrefix(name.name, name.n_tokens, n_bytes)


def _park_nearest(slot_kv: SlotKVManager, tokens: tuple[int, ...], salt: str) -> None:
    """Park the live context that shares most of these tokens, if any shares some."""
    live = [c for c in slot_kv.slots if c.salt == salt and len(c)]
    nearest = max(live, key=lambda c: common_prefix(c.tokens, tokens), default=None)
    if nearest is not None and common_prefix(nearest.tokens, tokens):
        slot_kv.park(nearest)
