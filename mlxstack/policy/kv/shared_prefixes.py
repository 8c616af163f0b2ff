"""Shared prefixes: detection across conversations."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from mlxstack.core.agent_labels import LEARNED
from mlxstack.core.prompt_tokens import check_images
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


MAX_HEADS = 64
"""Heads that are known at once; the first learned goes first."""


class SharedPrefixTokens(Struct, frozen=True):
    """Shared prefix: hexadecimal key of its last block, and its tokens.

    They are text. Raises ValueError for those of images, whose bytes are not here.
    """

    key: str
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_images(self.tokens, ())


class SharedPrefixes:
    """Prefixes that several conversations share. Not thread-safe.

    `need` different conversations make a prefix shared. Their tokens before the first image are
    known but for those under a tenant's salt, which are protected like others, but written down
    nowhere; `save` gets a note of each one learned.
    """

    def __init__(
        self, block_size: int, save: Callable[[bytes], None] | None = None, need: int = 3
    ) -> None:
        self._save = save
        self._block_size = block_size
        self._need = need
        self._seen: OrderedDict[bytes, set[str]] = OrderedDict()
        self._hot: dict[bytes, SharedPrefix] = {}
        self._learned: dict[bytes, SharedPrefixTokens] = {}

    @property
    def named(self) -> dict[str, SharedPrefix]:
        """All shared prefixes by the names that protect them, oldest first."""
        return {f"{LEARNED}{key.hex()[:8]}": head for key, head in self._hot.items()}

    @property
    def learned(self) -> tuple[SharedPrefixTokens, ...]:
        """Shared prefixes whose tokens are known."""
        return tuple(self._learned.values())

    def observe(
        self, conversation: str, chain: BlockHashes, request: Request
    ) -> SharedPrefix | None:
        """Count a prompt; the prefix that it makes shared, if any. O(blocks)."""
        head = self._find(conversation, chain.keys)
        if head is None:
            return None
        self._hot[head.key] = head
        if len(self._hot) > MAX_HEADS:
            self._forget(next(iter(self._hot)))
        n_text = min([image.start for image in request.images] or [len(request.tokens)])
        n_blocks = min(head.n_blocks, n_text // self._block_size)
        if n_blocks and not request.salt:
            key = chain.keys[n_blocks - 1].hex()
            tokens = request.tokens[: n_blocks * self._block_size]
            self._learned[head.key] = SharedPrefixTokens(key, tokens)
            if self._save is not None:
                self._save(msgspec.json.encode(self.learned))
        return head

    def recall(self, note: bytes | None) -> None:
        """Restore what an earlier run learned; an unreadable note is ignored."""
        try:
            records = msgspec.json.decode(note or b"[]", type=tuple[SharedPrefixTokens, ...])
            self._learned = {bytes.fromhex(prefix.key): prefix for prefix in records}
        except (msgspec.MsgspecError, ValueError):
            return
        self._hot = {
            key: SharedPrefix(key, len(prefix.tokens) // self._block_size)
            for key, prefix in self._learned.items()
        }

    def _find(self, conversation: str, keys: Sequence[bytes]) -> SharedPrefix | None:
        """The longest prefix that enough conversations share, once."""
        n_shared = 0
        for n_blocks, key in enumerate(keys[:MAX_BLOCKS], start=1):
            if self._count(conversation, key) >= self._need:
                n_shared = n_blocks
        while len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        is_new = n_shared and keys[n_shared - 1] not in self._hot
        if is_new:
            return SharedPrefix(keys[n_shared - 1], n_shared)
        return None

    def _count(self, conversation: str, key: bytes) -> int:
        who = self._seen.setdefault(key, set())
        self._seen.move_to_end(key)
        if len(who) < self._need:
            who.add(conversation)
        return len(who)

    def _forget(self, key: bytes) -> None:
        """Forget a prefix, which may be detected again."""
        self._hot.pop(key)
        self._seen.pop(key, None)
        self._learned.pop(key, None)
