"""Learns shared heads from traffic: what several conversations begin with deserves protection."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct

MAX_BLOCKS = 1024
"""Blocks of a prompt that are watched; a head is rarely longer than 131,072 tokens."""

MAX_KEYS = 65_536
"""Blocks that are remembered; the least recently seen go first."""


class SharedPrefix(Struct, frozen=True):
    """A head that became hot: its last block's key, and how many blocks it has."""

    key: bytes
    n_blocks: int


class SharedPrefixDetector:
    """Who began with what. Changed by one thread only.

    `need` different conversations make a head hot; shorter ones than `min_blocks` never are.
    `known` are heads learned before a restart.
    """

    def __init__(
        self, need: int = 3, min_blocks: int = 1, known: Iterable[SharedPrefix] = ()
    ) -> None:
        self._need = need
        self._min_blocks = min_blocks
        self._seen: OrderedDict[bytes, set[str]] = OrderedDict()
        self._hot = {head.key: head for head in known}

    @property
    def hot(self) -> tuple[SharedPrefix, ...]:
        """All heads that became hot, oldest first."""
        return tuple(self._hot.values())

    def observe(self, conversation: str, keys: Sequence[bytes]) -> SharedPrefix | None:
        """A prompt with these block keys arrived; the head it makes hot, if any. O(blocks).

        The longest head that enough conversations share is reported, once.
        """
        n_shared = 0
        for n_blocks, key in enumerate(keys[:MAX_BLOCKS], start=1):
            if self._count(conversation, key) >= self._need:
                n_shared = n_blocks
        self._shrink()
        if n_shared < self._min_blocks or keys[n_shared - 1] in self._hot:
            return None
        head = SharedPrefix(keys[n_shared - 1], n_shared)
        self._hot[head.key] = head
        return head

    def forget(self, key: bytes) -> None:
        """The head is no longer hot, and may become so again; unknown keys are ignored."""
        self._hot.pop(key, None)
        self._seen.pop(key, None)

    def _count(self, conversation: str, key: bytes) -> int:
        who = self._seen.setdefault(key, set())
        self._seen.move_to_end(key)
        if len(who) < self._need:
            who.add(conversation)
        return len(who)

    def _shrink(self) -> None:
        while len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
