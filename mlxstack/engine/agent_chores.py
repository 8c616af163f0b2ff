"""What is done with the KV of an agent: find it, keep it, let go of it."""

from typing import Any

from mlxstack.core.act import (
    FreedBytes,
    LocateAgentKV,
    PinAgent,
    PinnedPrefix,
    PinPrefix,
    ReleaseAgentKV,
    pin_of,
)
from mlxstack.engine.pinning import pin
from mlxstack.engine.seating import SlotKVManager


def do(chore: LocateAgentKV | PinAgent | ReleaseAgentKV, seating: SlotKVManager) -> Any:
    """A tuple of Kept, Pinned, or Freed."""
    match chore:
        case LocateAgentKV():
            return tuple(seating.lookup.locate(agent) for agent in chore.agents)
        case PinAgent():
            return _pin(seating, chore.agent)
        case ReleaseAgentKV():
            return FreedBytes(_let_go(seating, chore))


def _pin(seating: SlotKVManager, agent: str) -> PinnedPrefix:
    last = seating.lookup.last(agent)
    if last is None:
        return PinnedPrefix(pin_of(agent), 0, 0)
    return pin(seating, PinPrefix(pin_of(agent), tuple(last.tokens), last.salt))


def _let_go(seating: SlotKVManager, chore: ReleaseAgentKV) -> int:
    """Bytes that left memory. What others claim stays."""
    memory, keys = seating.memory, seating.lookup.keys_of(chore.agent)
    memory.retention.release(chore.agent)
    if chore.is_kept:
        return memory.release([key for key in keys if memory.is_on_disk(key)])
    seating.lookup.forget(chore.agent)
    return memory.release(keys)
