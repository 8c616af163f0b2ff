"""Recurrent state of a layer, for layers of mlx-vlm."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

Update = Callable[[Any, Any], tuple[Any, ...]]


class RecurrentUpdates:
    """Updates of mlx-vlm's `ArraysCache`, through items; no states between are kept."""

    is_speculating = False
    history_capacity = 0
    metadata_revision = 0

    def update_recurrent(self: Any, index: int, length: int, update: Update) -> tuple[Any, Any]:
        """Store the state of `update(state, None)`; returns its output too."""
        output, state = update(self[index], None)[:2]
        self[index] = state
        return output, state

    def update_window(
        self: Any, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
    ) -> mx.array:
        """Store the last `width` entries of `source` (batch, width + tokens, dim).

        `lengths` are the tokens of each row that are not padding.
        """
        n = source.shape[1] - width
        if lengths is None:
            window = mx.contiguous(source[:, n:])
        else:
            places = mx.clip(lengths, 0, n)[:, None] + mx.arange(width)
            places = places.reshape(*places.shape, *[1] * (source.ndim - 2))
            window = mx.take_along_axis(source, places, axis=1)
        self[index] = window
        return window


class RecurrentCache(RecurrentUpdates, ArraysCache):  # type: ignore[misc]
    """`ArraysCache` of mlx-lm for models of mlx-vlm."""
