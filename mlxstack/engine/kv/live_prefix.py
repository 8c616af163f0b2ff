"""KV of a prefix that several contexts share: one immutable copy."""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import mlx.core as mx

Layer = Sequence[mx.array]
"""The arrays of keys, then those of values (1, heads, tokens, dim)."""


class LivePrefix:
    """KV of `n_tokens` in every layer that can share it.

    Contexts and parked segments that hold the same object hold the same arrays. These may look
    into larger buffers, of `n_bytes`: those of the context that was shared first.
    """

    def __init__(
        self, layers: Sequence[Layer], n_bytes: int | None = None, whole: "LivePrefix | None" = None
    ) -> None:
        self.layers = tuple(layers)
        self.n_tokens = int(self.layers[0][0].shape[2])
        self.n_bytes = self._n_own_bytes if n_bytes is None else n_bytes
        self._whole = whole
        self._cuts: WeakValueDictionary[int, LivePrefix] = WeakValueDictionary()

    @property
    def whole(self) -> "LivePrefix":
        """The prefix whose arrays it looks into: itself, unless it was cut."""
        # An attribute that names the object itself would keep it until the next garbage collection.
        return self._whole or self

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all of its layers."""
        return self._n_own_bytes // self.n_tokens

    @property
    def _n_own_bytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer)

    def span(self, start: int, stop: int) -> list[mx.array]:
        """The arrays of all layers for these tokens, lazily."""
        return [array[..., start:stop, :] for layer in self.layers for array in layer]

    def cut(self, n_tokens: int) -> "LivePrefix":
        """The first tokens in the same buffers; cached by length."""
        whole = self.whole
        if n_tokens == whole.n_tokens:
            return whole
        known = whole._cuts.get(n_tokens)
        if known is None:
            layers = [[array[..., :n_tokens, :] for array in layer] for layer in whole.layers]
            mx.eval(layers)
            known = whole._cuts[n_tokens] = LivePrefix(layers, whole.n_bytes, whole)
        return known
