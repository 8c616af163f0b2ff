"""What is done with the KV of an agent: find it, keep it, let go of it."""

from typing import Any

from mlxstack.core.commands import (
    FreedBytes,
    LocateAgentKV,
    PinAgent,
    PinnedPrefix,
    PinPrefix,
    ReleaseAgentKV,
    pin_of,
)
from mlxstack.engine.kv.slot_preparation import SlotKVManager
from mlxstack.engine.prefix_admin import pin


def do(command: LocateAgentKV | PinAgent | ReleaseAgentKV, slot_kv: SlotKVManager) -> Any:
    """A tuple of Kept, Pinned, or Freed."""
    match command:
        case LocateAgentKV():
            return tuple(slot_kv.lookup.locate(agent) for agent in command.agents)
        case PinAgent():
            return _pin(slot_kv, command.agent)
        case ReleaseAgentKV():
            return FreedBytes(_let_go(slot_kv, command))


def _pin(slot_kv: SlotKVManager, agent: str) -> PinnedPrefix:
    last = slot_kv.lookup.last(agent)
    if last is None:
        return PinnedPrefix(pin_of(agent), 0, 0)
    return pin(slot_kv, PinPrefix(pin_of(agent), tuple(last.tokens), last.salt))


def _let_go(slot_kv: SlotKVManager, command: ReleaseAgentKV) -> int:
    """Bytes that left memory. What others claim stays."""
    memory, keys = slot_kv.memory, slot_kv.lookup.keys_of(command.agent)
    memory.retention.release(command.agent)
    if command.is_kept:
        return memory.release([key for key in keys if memory.is_on_disk(key)])
    slot_kv.lookup.forget(command.agent)
    return memory.release(keys)
