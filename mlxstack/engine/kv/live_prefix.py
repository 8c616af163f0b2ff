"""The KV of a prefix that several live contexts share: one copy, never changed."""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import mlx.core as mx

Layer = tuple[mx.array, mx.array]


class LivePrefix:
    """Keys and values (1, heads, `n_tokens`, dim) of every layer that can share them.

    Contexts that hold the same object read its arrays together. `whole` is the prefix whose
    buffers it looks into: itself, unless it was cut.
    """

    def __init__(self, layers: Sequence[Layer], whole: "LivePrefix | None" = None) -> None:
        self.layers = tuple(layers)
        self.n_tokens = int(self.layers[0][0].shape[2])
        self.whole = whole or self
        self._cuts: WeakValueDictionary[int, LivePrefix] = WeakValueDictionary()

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for layer in self.layers for array in layer)

    def cut(self, n_tokens: int) -> "LivePrefix":
        """Its first tokens, in the same buffers; the same object for the same length."""
        if n_tokens == self.whole.n_tokens:
            return self.whole
        known = self.whole._cuts.get(n_tokens)
        if known is None:
            layers = [(k[..., :n_tokens, :], v[..., :n_tokens, :]) for k, v in self.whole.layers]
            mx.eval(layers)
            known = self.whole._cuts[n_tokens] = LivePrefix(layers, self.whole)
        return known
