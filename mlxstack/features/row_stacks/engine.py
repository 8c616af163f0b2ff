"""Row stack: KV of decoding rows in common arrays.

A step then has as many operations as that of one row. All rows end at the same index, so that
their new tokens are written at once; shorter ones have padding in front, which masks hide. The
rows' own caches keep what they had, and get the new tokens back as soon as anything but such a
step needs them.
"""

import sys
from collections.abc import Callable, Sequence
from operator import add, is_
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.row_views import CommonKV, view
from mlxstack.features.row_stacks.policy import DEFAULT_RULES, StackingRules

RETRY_STEPS = 16
"""Steps until rows that could not be stacked are tried again."""

MIN_ROOM = 128
"""Tokens until the arrays are full, at least: they are copied then."""

GRANULE = 32
"""Tokens by which capacities differ, so that freed buffers fit again."""


class StackedKVCache(CommonKV):
    """KV of one layer's rows; a ring where it has a window.

    Arrays are (rows, heads, capacity, dim). A row's token at position p stands at index
    p + padding, modulo the window.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = list(caches)
        self._n_own = list(self.lengths)
        self._n = max(self._n_own)
        """Tokens of the longest row; the next one of every row has this index."""
        self._paddings = [self._n - n for n in self._n_own]
        self._window = cache_adapters.window_of(caches[0])
        self.capacity = _capacity(self._n, self._window)
        self.keys, self.values = (
            mx.zeros((len(caches), a.shape[1], self.capacity, a.shape[3]), a.dtype)
            for a in (caches[0].keys, caches[0].values)
        )
        self._write([min(n, self.capacity) for n in self._n_own])
        mx.async_eval([self.keys, self.values])  # type: ignore[no-untyped-call]
        self.offset: mx.array | None = None
        """Position of the next token of each row (rows,)."""

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another token."""
        return self._n >= self.capacity != self._window

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(cache.offset for cache in self._caches)

    def catch_up(self) -> None:
        """Append what the rows' own caches got since the copy."""
        n_new = self._caches[0].offset - self._n_own[0]
        if n_new:
            self._n += n_new
            self._n_own = list(self.lengths)
            self._write([min(n_new, self.capacity)] * len(self._caches))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (rows, heads, 1, dim); all keys and values, with padding."""
        index = self._n % self.capacity
        self.keys[:, :, index : index + 1] = keys
        self.values[:, :, index : index + 1] = values
        self._n += 1
        for cache in self._caches:
            cache.offset += 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values of all rows, with padding."""
        if self._n >= self.capacity:
            return self.keys, self.values
        return self.keys[:, :, : self._n], self.values[:, :, : self._n]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """Mask (rows, 1, 1, keys) of the next token, or None."""
        assert n == 1, "a stack takes one token per row"
        n_keys = min(self._n + 1, self.capacity)
        least = self._n + 1 - window_size if window_size else 0
        first = [max(padding, least) for padding in self._paddings]
        if max(first) <= self._n + 1 - n_keys:
            return None
        indices = mx.arange(n_keys)
        if self._n >= self.capacity:
            indices = self._n - (self._n - indices) % self.capacity
        return indices >= mx.array(first)[:, None, None, None]

    def write_back(self) -> None:
        """Append the new tokens to the rows' own caches."""
        for i, (cache, n_own) in enumerate(zip(self._caches, self._n_own, strict=True)):
            n_new = cache.offset - n_own
            offset = cache.offset
            if not n_new:
                continue
            n_read = min(offset, self._window) if self._window else n_new
            new = [self._last(a[i : i + 1], n_read) for a in (self.keys, self.values)]
            if self._window:
                cache.keys, cache.values = new
                cache._idx = n_read
            else:
                cache.offset = n_own
                cache.update_and_fetch(*new)

    def _write(self, counts: Sequence[int]) -> None:
        """Write the last tokens of the rows' own caches."""
        for i, (cache, n) in enumerate(zip(self._caches, counts, strict=True)):
            start = (self._n - n) % self.capacity
            n_first = min(n, self.capacity - start)
            own = cache_adapters.newest(cache, n)
            for stack, part in zip((self.keys, self.values), own, strict=True):
                stack[i : i + 1, :, start : start + n_first] = part[:, :, :n_first]
                if n_first < n:
                    stack[i : i + 1, :, : n - n_first] = part[:, :, n_first:]

    def _last(self, row: mx.array, n: int) -> mx.array:
        """Copy of the last `n` tokens of a row."""
        start = (self._n - n) % self.capacity
        n_first = min(n, self.capacity - start)
        parts = [row[:, :, start : start + n_first], row[:, :, : n - n_first]]
        return mx.concatenate(parts, axis=2)


class RowStack:
    """Stacked KV of contexts that decode together.

    It holds what they have decoded since; `dissolve` gives it back to them.
    """

    def __init__(
        self, contexts: Sequence[SlotContext], rules: StackingRules = DEFAULT_RULES
    ) -> None:
        self._contexts = contexts
        self._rules = rules
        self._layers = list(zip(*(context.own_caches for context in contexts), strict=True))
        self._due = [i for i, caches in enumerate(self._layers) if _can_stack(caches)]
        self._stacked: dict[int, StackedKVCache] = {}
        self._is_used = False
        self.n_row_bytes = 0
        """Bytes of the stack for each of its rows."""
        self.is_dissolved = False

    def start(self) -> None:
        """Take part in the steps of the contexts from now on."""
        for context in self._contexts:
            context.lend(self)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row; empty where no layer can be stacked."""
        if self._due:
            return [cache.offset for cache in self._layers[self._due[0]]]
        return []

    @property
    def n_layers(self) -> int:
        """Layers that can be stacked."""
        return len(self._due)

    @property
    def n_bytes(self) -> int:
        """Bytes once all layers are stacked."""
        return sum(_stacked_bytes(self._layers[i]) for i in self._due)

    @property
    def is_full(self) -> bool:
        """Whether some layer has no place for another token."""
        return any(layer.is_full for layer in self._stacked.values())

    @property
    def is_complete(self) -> bool:
        """Whether all layers are stacked."""
        return len(self._stacked) == len(self._due)

    def stack_more(self) -> None:
        """Stack the layers due; this step still runs row by row."""
        n_done = len(self._stacked)
        n_due = n_done + self._rules.layers_due(len(self._due), self.n_bytes)
        self._stacked |= {i: StackedKVCache(self._layers[i]) for i in self._due[n_done:n_due]}
        n_bytes = sum(layer.n_bytes for layer in self._stacked.values())
        self.n_row_bytes = n_bytes // len(self._contexts)

    def views(self, shifts: Sequence[int] = ()) -> list[Any]:
        """View of each layer for one token per row.

        Positions are indices plus `shifts`. A mask is made for all layers at once, so that a step
        is stacked as a whole or not at all.
        """
        if not self._is_used:
            self._is_used = True
            for layer in self._stacked.values():
                layer.catch_up()
        offsets: dict[tuple[int, ...], mx.array] = {}
        for layer in self._stacked.values():
            if layer.lengths not in offsets:
                offsets[layer.lengths] = mx.array(
                    list(map(add, layer.lengths, shifts or [0] * len(layer.lengths)))
                )
            layer.offset = offsets[layer.lengths]
        counts = [1] * len(self._contexts)
        return [
            self._stacked[i] if i in self._stacked else view(caches, counts, shifts=shifts)
            for i, caches in enumerate(self._layers)
        ]

    def dissolve(self) -> None:
        """Write the new tokens back to the contexts."""
        self.is_dissolved = True
        for context in self._contexts:
            context.reclaim()
        if self._is_used:
            for layer in self._stacked.values():
                layer.write_back()
        # The contexts may get other caches while this is still referenced.
        self._stacked = {}
        self._layers = []


def stack_fully(contexts: Sequence[SlotContext]) -> RowStack | None:
    """Stack of all layers; None where no layer can be stacked."""
    stack = RowStack(contexts)
    if not stack.lengths:
        return None
    stack.start()
    while not stack.is_complete:
        stack.stack_more()
    return stack


class RowStacker:
    """Stacks the rows of a batch while they stay the same.

    `has_room` tells whether bytes fit into the budget.
    """

    def __init__(
        self, has_room: Callable[[int], bool] = lambda _: True, rules: StackingRules = DEFAULT_RULES
    ) -> None:
        self._has_room = has_room
        self._rules = rules
        self._contexts: list[SlotContext] = []
        self._n_steps = 0
        self._due_at = 0
        self._stack: RowStack | None = None

    def views(self, rows: Sequence[BatchRow]) -> list[Any] | None:
        """View of each layer, or None for rows not stacked.

        Several rows are, where each brings one token.
        """
        if len(rows) == 1:
            rows[0].context.take_back()
            return None
        if any(row.proposed or row.rolled_back for row in rows):
            self.release()
            return None
        return self._views([row.context for row in rows], [row.shift for row in rows])

    def _views(self, contexts: Sequence[SlotContext], shifts: Sequence[int]) -> list[Any] | None:
        is_same = len(contexts) == len(self._contexts) and all(map(is_, contexts, self._contexts))
        if not is_same or (self._stack is not None and self._stack.is_dissolved):
            self.release()
            self._contexts = list(contexts)
            self._due_at = self._steps_before(RowStack(contexts, self._rules))
        elif self._stack is not None and self._stack.is_full:
            self._stack.dissolve()
            self._stack = None
            self._due_at = 0
        self._n_steps += 1
        if self._stack is None and self._n_steps >= self._due_at:
            self._stack = self._stack_if_worth()
        if self._stack is None:
            return None
        if not self._stack.is_complete:
            self._stack.stack_more()
            return None
        return self._stack.views(shifts)

    def release(self) -> None:
        """Give all KV back to the contexts and count anew."""
        if self._stack is not None and not self._stack.is_dissolved:
            self._stack.dissolve()
        self._stack = None
        self._contexts = []
        self._n_steps = 0

    def _steps_before(self, stack: RowStack) -> int:
        if not stack.n_layers:
            return sys.maxsize
        return self._rules.steps_before(stack.n_bytes, len(self._contexts), stack.n_layers)

    def _stack_if_worth(self) -> RowStack | None:
        stack = RowStack(self._contexts, self._rules)
        self._due_at = self._n_steps + RETRY_STEPS
        if not self._rules.is_worth(stack.lengths, stack.n_bytes):
            return None
        if not self._has_room(stack.n_bytes):
            return None
        stack.start()
        return stack


def _can_stack(caches: Sequence[Any]) -> bool:
    """Whether a layer with such caches can be stacked."""
    return all(
        (type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0))
        and not cache.empty()
        for cache in caches
    )


def _capacity(n_tokens: int, window: int) -> int:
    """Capacity with room for a quarter more tokens, or for a window."""
    n_room = max(MIN_ROOM, n_tokens // 4)
    capacity = -(-(n_tokens + n_room) // GRANULE) * GRANULE
    return min(capacity, window) if window else capacity


def _stacked_bytes(caches: Sequence[Any]) -> int:
    """Bytes of a layer once it is stacked."""
    longest = max(cache.offset for cache in caches)
    capacity = _capacity(longest, cache_adapters.window_of(caches[0]))
    token_bytes = sum(a.nbytes // a.shape[2] for a in (caches[0].keys, caches[0].values))
    return int(len(caches) * capacity * token_bytes)
