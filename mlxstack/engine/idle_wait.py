"""What the engine does when there is nothing to do: it checks its KV memory once, and waits."""

import logging
import queue
from collections.abc import Callable
from contextlib import suppress

from mlxstack.engine.kv.prefix_cache import PrefixCache

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""Seconds without a message after which nobody is likely to wait for the check."""

Message = Callable[[], None]


def wait(inbox: "queue.SimpleQueue[Message]", memory: PrefixCache) -> Message:
    """The next message, whenever it comes."""
    with suppress(queue.Empty):
        return inbox.get(timeout=QUIET_S)
    check(memory)
    return inbox.get()


def check(memory: PrefixCache) -> None:
    """Log what is wrong with the memory; it is a fault of ours, and no reason to stop serving."""
    try:
        memory.check()
    except (AssertionError, KeyError) as broken:
        log.error("the index of the KV memory contradicts itself: %s; please report it", broken)
