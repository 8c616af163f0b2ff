"""Tool call replay: sampled calls as tokens for later prompts.

Clients send the arguments of a call back as JSON of their own making, and templates print them
in a third way; every difference would cost the rest of the cached conversation.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from mlxstack.core.conversation import ToolCall

CALL_BYTES = 512
"""Bytes of a call beside its tokens: digests, ids, containers."""


class Scope(Struct, frozen=True):
    """Scope of a conversation: tenant salt and name."""

    salt: str = ""
    name: str = ""


NAMELESS = Scope()


class Block(Struct, frozen=True):
    """Calls between one pair of marks, and their sampled tokens.

    `is_closed`: the closing mark was sampled too; otherwise the end of the answer closed it.
    """

    calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]
    is_closed: bool


class Sketch(Struct, frozen=True):
    """Rendered block: its length in characters, and a digest.

    A length of 0: it writes something else. `lead` is the offset of the name or id that the
    block is found by. `key` says what it was rendered with.
    """

    key: bytes
    lead: int = 0
    n_chars: int = 0
    digest: bytes = b""


class Entry:
    """Remembered block; `sketch` is its latest rendering, None before."""

    def __init__(self, block: Block) -> None:
        self.tokens = array("I", block.tokens)
        self.calls = tuple(digest_of(call) for call in block.calls)
        self.is_closed = block.is_closed
        self.sketch: Sketch | None = None
        self.n_bytes = 4 * len(block.tokens) + CALL_BYTES * len(block.calls)


class HasBytes(Protocol):
    """Entry of known size."""

    n_bytes: int


K = TypeVar("K")
E = TypeVar("E", bound=HasBytes)


class ReplayMemory(Generic[K, E]):
    """Latest entries by key, at most `max_bytes` in all. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, E] = OrderedDict()
        self.n_bytes = 0

    def get(self, key: K) -> E | None:
        """The entry of this key, if it is still known."""
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, entry: E) -> None:
        """Remember an entry in place of an earlier one of its key."""
        with self._lock:
            if (old := self._entries.pop(key, None)) is not None:
                self.n_bytes -= old.n_bytes
            self._entries[key] = entry
            self.n_bytes += entry.n_bytes
            while self.n_bytes > self._max:
                self.n_bytes -= self._entries.popitem(last=False)[1].n_bytes


class ToolCallReplay(ReplayMemory[tuple[Scope, str], Entry]):
    """Latest blocks by conversation and first call id. Thread-safe."""

    def __init__(self, max_bytes: int = 16_000_000) -> None:
        super().__init__(max_bytes)

    def remember(self, scope: Scope, block: Block) -> None:
        """Keep a sampled block for the later prompts of its conversation.

        Arguments nested too deeply to be compared are left out.
        """
        try:
            entry = Entry(block)
        except RecursionError:
            return
        self.put((scope, block.calls[0].id), entry)

    def known(self, scope: Scope, calls: Sequence[ToolCall]) -> dict[int, Entry]:
        """Remembered blocks of a turn, by index of the first call.

        Each call of a block must come back with the same id, name and arguments.
        """
        blocks: dict[int, Entry] = {}
        at = 0
        while at < len(calls):
            entry = self.get((scope, calls[at].id))
            if entry is not None and _is_same(entry, calls[at : at + len(entry.calls)]):
                blocks[at] = entry
                at += len(entry.calls)
            else:
                at += 1
        return blocks


def digest_of(call: ToolCall) -> bytes:
    """Digest of a call, which distinguishes 1, 1.0 and true."""
    spelled = json.dumps([call.id, call.name, call.arguments], sort_keys=True, default=str)
    return hashlib.blake2b(spelled.encode(), digest_size=16).digest()


def _is_same(entry: Entry, calls: Sequence[ToolCall]) -> bool:
    return entry.calls == tuple(digest_of(call) for call in calls)
