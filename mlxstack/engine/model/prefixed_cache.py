"""KV of a layer: prefix shared by contexts, and own tail."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask
from msgspec import Struct


class PrefixedArray(Struct, frozen=True, eq=False):
    """Keys or values (1, heads, tokens, dim) of prefix and tail."""

    prefix: mx.array
    tail: mx.array

    @property
    def n_tokens(self) -> int:
        """Tokens of prefix and tail."""
        return int(self.prefix.shape[2] + self.tail.shape[2])

    def first(self, n_tokens: int) -> "PrefixedArray":
        """Only the first tokens, the whole prefix among them."""
        return PrefixedArray(self.prefix, self.tail[..., : n_tokens - self.prefix.shape[2], :])

    def joined(self) -> mx.array:
        """An ordinary array, copied."""
        return mx.concatenate([self.prefix, self.tail], axis=2)


class PrefixedKVCache(_BaseCache):  # type: ignore[misc]
    """KV of one layer: `prefix` is shared and immutable, `tail` owned."""

    def __init__(self, prefix: Sequence[mx.array], tail: KVCache) -> None:
        self.prefix = prefix
        self.tail = tail

    @property
    def n_shared(self) -> int:
        """Tokens of the prefix."""
        return int(self.prefix[0].shape[2])

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self.n_shared + int(self.tail.offset)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add tokens to the tail."""
        self.tail.update_and_fetch(keys, values)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens to the tail; all keys and values, copied."""
        self.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All keys and values, copied."""
        keys, values = self.split()
        return keys.joined(), values.joined()

    def split(self) -> tuple[PrefixedArray, PrefixedArray]:
        """All keys and values without a copy; the tail must have tokens."""
        keys, values = self.tail.keys_and_values()
        return PrefixedArray(self.prefix[0], keys), PrefixedArray(self.prefix[1], values)

    def size(self) -> int:
        """Tokens of prefix and tail."""
        return self.offset

    @property
    def state(self) -> Any:
        """Arrays of the tail; those of the prefix never change."""
        return self.tail.state

    def is_trimmable(self) -> bool:
        """As every cache that keeps all tokens."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last tokens, which must belong to the tail."""
        assert n <= self.tail.offset, "a shared prefix cannot be trimmed"
        return int(self.tail.trim(n))

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """As `KVCache.make_mask`."""
        return create_attention_mask(*args, offset=self.offset, **options)

    def empty(self) -> bool:
        """Never: the prefix has tokens."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the tail alone."""
        return int(self.tail.nbytes)
