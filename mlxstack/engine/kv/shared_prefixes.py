"""Learns what several conversations begin with, and remembers it across restarts."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from mlxstack.core.request import Request
from mlxstack.policy.block_hash import BlockHashes
from mlxstack.policy.shared_prefix_detector import SharedPrefix, SharedPrefixDetector

MOST_HEADS = 64
"""Heads that are known at once; the first learned goes first."""


class SharedPrefixTokens(Struct, frozen=True):
    """A head: the key of its last block in hexadecimal, and its tokens."""

    key: str
    tokens: tuple[int, ...]


class SharedPrefixes:
    """Belongs to the MLX thread. `keep` gets the note to be kept when something was learned.

    Heads under a tenant's salt are protected like others, but written down nowhere.
    """

    def __init__(self, block_size: int) -> None:
        self.keep: Callable[[bytes], None] | None = None
        self._block_size = block_size
        self._heads = SharedPrefixDetector()
        self._learned: dict[str, SharedPrefixTokens] = {}

    @property
    def named(self) -> dict[str, SharedPrefix]:
        """All heads that are shared, by the names under which they are protected."""
        return {f"learned-{head.key.hex()[:8]}": head for head in self._heads.hot}

    @property
    def learned(self) -> tuple[SharedPrefixTokens, ...]:
        """Those of them that are remembered with their tokens."""
        return tuple(self._learned.values())

    def observe(self, conversation: str, chain: BlockHashes, request: Request) -> None:
        """A prompt with this chain arrived, in this conversation."""
        head = self._heads.observe(conversation, chain.keys)
        if head is None:
            return
        if len(self._heads.hot) > MOST_HEADS:
            self._forget(self._heads.hot[0])
        if not request.salt:
            tokens = request.tokens[: head.n_blocks * self._block_size]
            self._learned[head.key.hex()] = SharedPrefixTokens(head.key.hex(), tokens)
            if self.keep is not None:
                self.keep(msgspec.json.encode(self.learned))

    def recall(self, note: bytes | None) -> None:
        """Take back what an earlier run learned; a note that cannot be read says nothing."""
        try:
            known = msgspec.json.decode(note or b"[]", type=tuple[SharedPrefixTokens, ...])
            keys = [bytes.fromhex(one.key) for one in known]
        except (msgspec.MsgspecError, ValueError):
            return
        self._learned = {one.key: one for one in known}
        lengths = [len(one.tokens) // self._block_size for one in known]
        self._heads = SharedPrefixDetector(known=map(SharedPrefix, keys, lengths))

    def _forget(self, head: SharedPrefix) -> None:
        self._heads.forget(head.key)
        self._learned.pop(head.key.hex(), None)
