"""Outputs of chosen layers, beside the last hidden states of each pass.

A model in parts whose trunk returns (B, T, (1 + n) * dim): the last hidden states, then the
outputs of `n` layers. Runner, batch and prefill carry them as they carry hidden states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.engine.model.runner import ModelParts


class LayerTaps:
    """Taps on the outputs of layers. MLX thread only.

    Raises ValueError for layers that return something else.
    """

    def __init__(self, parts: ModelParts, layers: Sequence[Any], layer_ids: Sequence[int]) -> None:
        self._parts = parts
        self._layer_ids = tuple(layer_ids)
        self._outputs: dict[int, mx.array] | None = None
        """Outputs of the pass that is being built; None: nothing is taken."""
        for i in sorted(set(layer_ids)):
            layers[i].__class__ = _tapped(type(layers[i]), self._taker(i))
        token = mx.array([[0]])
        self.dim = int(parts.trunk(token).shape[-1])
        """Width of one layer's output."""
        width = self._trunk(token).shape[-1]
        if width != self.dim * (1 + len(self._layer_ids)):
            raise ValueError(f"layers return {width} numbers beside {self.dim} of the last one")

    @property
    def parts(self) -> ModelParts:
        """The model in parts, with these outputs in its states."""
        return replace(self._parts, trunk=self._trunk, head=self._head)

    def taken(self, states: mx.array) -> mx.array:
        """Outputs of the layers (..., n * dim) in states of `parts`."""
        return states[..., self.dim :]

    def _trunk(self, tokens: mx.array, caches: Any = None, **more: mx.array) -> mx.array:
        self._outputs = {}
        try:
            last = self._parts.trunk(tokens, caches, **more)
            outputs = [self._outputs[i] for i in self._layer_ids]
        finally:
            self._outputs = None
        return mx.concatenate([last, *outputs], axis=-1)

    def _head(self, states: mx.array) -> mx.array:
        return self._parts.head(states[..., : self.dim])

    def _taker(self, i: int) -> Callable[[mx.array], None]:
        def take(output: mx.array) -> None:
            if self._outputs is not None:
                self._outputs[i] = output

        return take


def _tapped(kind: type[Any], take: Callable[[mx.array], None]) -> type[Any]:
    """Layer class that gives its output to `take` too."""

    class Tapped(kind):  # type: ignore[misc]
        def __call__(self, *inputs: Any, **more: Any) -> Any:
            output = super().__call__(*inputs, **more)
            take(output)
            return output

    Tapped.__name__ = kind.__name__
    return Tapped
