"""Linear layers with padded rows, for CPUs that multiply more rows faster.

OpenBLAS with two threads is slow at some row counts: on two cores, 8 rows of 2048 x 2048 take 1.25
times and 11 rows 1.85 times as long as 16 rows.
"""

import time
from itertools import cycle
from math import inf
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from mlxstack.policy.row_padding import padded_counts

MAX_ROWS = 32
MIN_WEIGHTS = 1 << 18
"""Numbers of a matrix below which padding costs more than it saves."""
MAX_MEASURED = 1 << 21
"""Numbers of the matrix to be measured at most, if there is one."""
N_TRIES = 7
"""Rounds over all row counts; the fastest counts."""
MAX_S = 1.0
"""Seconds of measuring after which no rows are padded."""


class PaddedLinear(nn.Linear):  # type: ignore[misc]
    """Linear layer that computes `counts[n]` rows for n.

    The others are `zeros` (rows, in).
    """

    def __init__(self, linear: nn.Linear, counts: tuple[int, ...], zeros: mx.array) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        if "bias" in linear:
            self.bias = linear.bias
        self._counts = counts
        self._zeros = zeros

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs (..., out) of inputs (..., in)."""
        n = x.size // x.shape[-1]
        width = x.shape[-1]
        n_missing = self._counts[n] - n if n < len(self._counts) else 0
        if n_missing == 0:
            unpadded: mx.array = super().__call__(x)
            return unpadded
        padded = mx.concatenate([x.reshape(n, width), self._zeros[:n_missing]])
        rows: mx.array = super().__call__(padded)
        return rows[:n].reshape(*x.shape[:-1], -1)


def pad_linear_layers(model: Any) -> None:
    """Replace large linear layers, if this computer multiplies padded rows faster."""
    large = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.size >= MIN_WEIGHTS
    }
    if not large:
        return
    layers = list(large.values())
    fit = [layer for layer in layers if layer.weight.size <= MAX_MEASURED]
    measured = max(fit or layers[:1], key=lambda layer: layer.weight.size).weight.shape
    counts = padded_counts(
        measured_seconds([layer for layer in layers if layer.weight.shape == measured])
    )
    n_missing = max((count - n for n, count in enumerate(counts)), default=0)
    if n_missing:
        widths = {layer.weight.shape[1]: layer.weight.dtype for layer in layers}
        zeros = {width: mx.zeros((n_missing, width), dtype) for width, dtype in widths.items()}
        mx.eval(zeros)
        padded = [
            (name, PaddedLinear(layer, counts, zeros[layer.weight.shape[1]]))
            for name, layer in large.items()
        ]
        model.update_modules(tree_unflatten(padded))


def measured_seconds(layers: list[nn.Linear]) -> list[float]:
    """Seconds of a product of 0, 1 ... rows; empty after `MAX_S`.

    The layers take turns, so that weights come from memory, as in a pass.
    """
    width = layers[0].weight.shape[1]
    turns = cycle(layers)
    seconds = [0.0, *[inf] * MAX_ROWS]
    until = time.perf_counter() + MAX_S
    for _ in range(N_TRIES):
        # Descending, so that the first product, which is slower, counts for the most rows.
        for n in range(MAX_ROWS, 0, -1):
            x = mx.random.normal((n, width))
            mx.eval(x)
            began = time.perf_counter()
            mx.eval(next(turns)(x))
            ended = time.perf_counter()
            seconds[n] = min(seconds[n], ended - began)
            if ended > until:
                return []
    return seconds
