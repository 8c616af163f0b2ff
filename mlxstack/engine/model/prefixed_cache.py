"""KV of a layer: prefix shared by contexts, and own tail."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, _BaseCache, create_attention_mask
from msgspec import Struct

Part = Any
"""Keys or values (1, heads, tokens, dim): an array, or the three of quantized ones."""


def length(part: Part) -> int:
    """Number of tokens in keys or values."""
    return int((part if isinstance(part, mx.array) else part[0]).shape[2])


def cut_tokens(part: Part, start: int, stop: int) -> Part:
    """Keys or values of the tokens [start, stop)."""
    if isinstance(part, mx.array):
        return part[..., start:stop, :]
    return tuple(array[..., start:stop, :] for array in part)


class PrefixedArray(Struct, frozen=True, eq=False):
    """Keys or values of a row: of the shared prefix, and of its tail.

    Or products with them: latent attention multiplies outside of the attention function.
    """

    prefix: Part
    tail: Part

    @property
    def n_tokens(self) -> int:
        """Tokens of prefix and tail."""
        return length(self.prefix) + length(self.tail)

    @property
    def prefix_id(self) -> int:
        """Identity of the prefix: the same for all rows that share it."""
        return id(self.prefix if isinstance(self.prefix, mx.array) else self.prefix[0])

    @property
    def n_heads(self) -> int:
        """Heads of the keys or values."""
        return int((self.prefix if isinstance(self.prefix, mx.array) else self.prefix[0]).shape[1])

    def first(self, n_tokens: int) -> "PrefixedArray":
        """Only the first tokens, the whole prefix among them."""
        return PrefixedArray(self.prefix, cut_tokens(self.tail, 0, n_tokens - length(self.prefix)))

    def swapaxes(self, one: int, other: int) -> "PrefixedArray":
        """As `mx.array.swapaxes`."""
        return PrefixedArray(self.prefix.swapaxes(one, other), self.tail.swapaxes(one, other))

    def astype(self, dtype: mx.Dtype) -> "PrefixedArray":
        """As `mx.array.astype`."""
        return PrefixedArray(self.prefix.astype(dtype), self.tail.astype(dtype))

    def __rmatmul__(self, left: mx.array) -> "PrefixedArray":
        return PrefixedArray(left @ self.prefix, left @ self.tail)

    def joined(self) -> Part:
        """Ordinary keys or values, copied."""
        if isinstance(self.prefix, mx.array):
            return mx.concatenate([self.prefix, self.tail], axis=2)
        each = zip(self.prefix, self.tail, strict=True)
        return tuple(mx.concatenate([*pair], axis=2) for pair in each)


class PrefixedKVCache(_BaseCache):  # type: ignore[misc]
    """KV of one layer: `prefix` is shared and never changed, `tail` belongs to one context.

    The arrays of `prefix` are those of the keys, then those of the values.
    """

    def __init__(self, prefix: Sequence[mx.array], tail: KVCache | QuantizedKVCache) -> None:
        self.prefix = tuple(prefix)
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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Part, Part]:
        """Add tokens to the tail; all keys and values, copied."""
        self.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Part, Part]:
        """All keys and values, copied."""
        keys, values = self.split()
        return keys.joined(), values.joined()

    def split(self) -> tuple[PrefixedArray, PrefixedArray]:
        """All keys and values without a copy; the tail must have tokens."""
        keys, values = self.tail.keys_and_values()
        if len(self.prefix) == 2:
            return PrefixedArray(self.prefix[0], keys), PrefixedArray(self.prefix[1], values)
        return PrefixedArray(self.prefix[:3], keys), PrefixedArray(self.prefix[3:], values)

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
