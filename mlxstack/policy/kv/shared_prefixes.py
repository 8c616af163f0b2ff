"""Shared prefixes: detection across conversations."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from mlxstack.core.request import Request
from mlxstack.policy.kv.block_hash import BlockHashes

MAX_BLOCKS = 1024
"""Watched blocks of a prompt; heads rarely exceed 131,072 tokens."""

MAX_KEYS = 65_536
"""Blocks that are remembered; the least recently seen go first."""


class SharedPrefix(Struct, frozen=True):
    """Shared prefix: key of its last block, and number of blocks."""

    key: bytes
    n_blocks: int


class SharedPrefixDetector:
    """Counts conversations per prefix. Not thread-safe.

    `need` different conversations make a prefix shared; shorter ones than `min_blocks` never are.
    `known` are prefixes learned before a restart.
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
        """Count a prompt; the prefix it makes shared, if any. O(blocks).

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
        """Forget a shared prefix, which may be detected again; ignores unknown keys."""
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


MOST_HEADS = 64
"""Heads that are known at once; the first learned goes first."""


class SharedPrefixTokens(Struct, frozen=True):
    """Shared prefix: hexadecimal key of its last block, and its tokens."""

    key: str
    tokens: tuple[int, ...]


class SharedPrefixes:
    """Shared prefixes with tokens; `save` gets a note of each one learned.

    Heads under a tenant's salt are protected like others, but written down nowhere.
    """

    def __init__(self, block_size: int, save: Callable[[bytes], None] | None = None) -> None:
        self._save = save
        self._block_size = block_size
        self._detector = SharedPrefixDetector()
        self._learned: dict[str, SharedPrefixTokens] = {}

    @property
    def named(self) -> dict[str, SharedPrefix]:
        """All shared prefixes by the names that protect them."""
        return {f"learned-{head.key.hex()[:8]}": head for head in self._detector.hot}

    @property
    def learned(self) -> tuple[SharedPrefixTokens, ...]:
        """Shared prefixes whose tokens are known."""
        return tuple(self._learned.values())

    def observe(self, conversation: str, chain: BlockHashes, request: Request) -> None:
        """A prompt with this chain arrived, in this conversation."""
        head = self._detector.observe(conversation, chain.keys)
        if head is None:
            return
        if len(self._detector.hot) > MOST_HEADS:
            self._forget(self._detector.hot[0])
        if not request.salt:
            tokens = request.tokens[: head.n_blocks * self._block_size]
            self._learned[head.key.hex()] = SharedPrefixTokens(head.key.hex(), tokens)
            if self._save is not None:
                self._save(msgspec.json.encode(self.learned))

    def recall(self, note: bytes | None) -> None:
        """Restore what an earlier run learned; an unreadable note is ignored."""
        try:
            known = msgspec.json.decode(note or b"[]", type=tuple[SharedPrefixTokens, ...])
            keys = [bytes.fromhex(one.key) for one in known]
        except (msgspec.MsgspecError, ValueError):
            return
        self._learned = {one.key: one for one in known}
        lengths = [len(one.tokens) // self._block_size for one in known]
        self._detector = SharedPrefixDetector(known=map(SharedPrefix, keys, lengths))

    def _forget(self, head: SharedPrefix) -> None:
        self._detector.forget(head.key)
        self._learned.pop(head.key.hex(), None)
