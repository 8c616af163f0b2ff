"""A small KV memory over real tokens for the tests of the index: bytes are one per token."""

from collections.abc import Sequence

from mlxstack.core.prompt_tokens import KeptTokens
from mlxstack.policy.kv import block_hash, prefix_index
from mlxstack.policy.kv.prefix_index import (
    CheckpointMeta,
    PrefixIndex,
    PrefixMatch,
    SegmentMeta,
    StorageTier,
)

SIZE = 4
SALT = b"test"


class Memory:
    """Saves and finds token lists as the engine does."""

    def __init__(self, size: int = SIZE) -> None:
        self.index = PrefixIndex(size)
        self.size = size

    def chain(self, tokens: Sequence[int]) -> block_hash.BlockHashes:
        return block_hash.extend(block_hash.start(SALT, self.size), KeptTokens(tokens))

    def match(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> PrefixMatch:
        chain = self.chain(tokens)
        marks = [(at, block_hash.hash_at(chain, KeptTokens(tokens), at)) for at in cuts]
        return prefix_index.match(self.index, chain.keys, marks)

    def save(
        self,
        tokens: Sequence[int],
        now: float = 0.0,
        place: StorageTier = StorageTier.MEMORY,
        longest: int = 2048,
    ) -> list[str]:
        """Store what is not known yet; keys of the whole path."""
        found = self.match(tokens)
        path = [step.key for step in found.path]
        start = found.covered
        parent = path[-1] if path else None
        while start < len(tokens):
            end = min(start + longest, len(tokens))
            parent = self._insert(tokens, start, end, parent, place, now)
            path.append(parent)
            start = end
        return path

    def checkpoint(self, tokens: Sequence[int], n_bytes: int = 1, now: float = 0.0) -> str:
        """A checkpoint at the end of `tokens`, on the segment of the saved path that holds it."""
        state = block_hash.hash_at(self.chain(tokens), KeptTokens(tokens), len(tokens))
        holder = self.save(tokens)[-1]
        key = block_hash.checkpoint_key(state)
        self.index.insert(
            CheckpointMeta(key, holder, len(tokens), n_bytes, state), StorageTier.MEMORY, now
        )
        return key

    def _insert(
        self,
        tokens: Sequence[int],
        start: int,
        end: int,
        parent: str | None,
        place: StorageTier,
        now: float,
    ) -> str:
        chain = self.chain(tokens[:end])
        key = block_hash.segment_key(block_hash.hash_at(chain, KeptTokens(tokens), end), start)
        keys = chain.keys[start // self.size : end // self.size]
        self.index.insert(SegmentMeta(key, parent, start, end, end - start, keys), place, now)
        return key
