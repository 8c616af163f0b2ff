"""What is done with the KV of an agent: find it, keep it, let go of it."""

from typing import Any

from mlxstack.core.act import Freed, LetGo, Locate, Pin, PinAgent, Pinned, pin_of
from mlxstack.engine.pinning import pin
from mlxstack.engine.seating import Seating


def do(chore: Locate | PinAgent | LetGo, seating: Seating) -> Any:
    """A tuple of Kept, Pinned, or Freed."""
    match chore:
        case Locate():
            return tuple(seating.finding.locate(agent) for agent in chore.agents)
        case PinAgent():
            return _pin(seating, chore.agent)
        case LetGo():
            return Freed(_let_go(seating, chore))


def _pin(seating: Seating, agent: str) -> Pinned:
    last = seating.finding.last(agent)
    if last is None:
        return Pinned(pin_of(agent), 0, 0)
    return pin(seating, Pin(pin_of(agent), tuple(last.tokens), last.salt))


def _let_go(seating: Seating, chore: LetGo) -> int:
    """Bytes that left memory. What others claim stays."""
    memory, keys = seating.memory, seating.finding.keys_of(chore.agent)
    memory.owners.release(chore.agent)
    if chore.is_kept:
        return memory.let_go([key for key in keys if memory.is_on_disk(key)])
    seating.finding.forget(chore.agent)
    return memory.let_go(keys)
