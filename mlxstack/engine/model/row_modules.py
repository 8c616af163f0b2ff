"""Attention modules that compute one row at a time.

Sparse attention and caches of other kinds than keys and values use their cache in ways that no
view can imitate. Each row of a batch goes through such a module with the slot's own cache;
projections, experts and the head still see all rows at once.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxstack.engine.model.row_views import RaggedArray, RowCaches

ARGUMENT = "cache"
"""Part of the names of arguments by which models pass a layer's caches to its attention."""


class RowValues:
    """Values of a module by row.

    They are not rows of one array.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


def split_attention(model: Any) -> None:
    """Let attention modules compute one row at a time.

    They are those of each layer that take its cache, and do so where they are given `RowCaches`;
    with other caches they are as before.
    """
    for module in [part for layer in model.layers for part in _attention(layer)]:
        kind = type(module)
        if not issubclass(kind, _RowByRow):
            names = {"__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (_RowByRow, kind), names)


def by_row(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function row by row, given `RowCaches`."""

    @wraps(call)
    def each(*args: Any, **options: Any) -> Any:
        n = _n_rows((*args, *options.values()))
        if not n:
            return call(*args, **options)
        outputs = []
        for row in range(n):
            own = [_row(value, row, n) for value in args]
            named = {name: _row(value, row, n) for name, value in options.items()}
            outputs.append(call(*own, **named))
        return _joined(outputs)

    return each


class _RowByRow:
    """Mixin of a module called row by row."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return by_row(super().__call__)(*args, **options)  # type: ignore[misc]


def _attention(layer: nn.Module) -> list[nn.Module]:
    """Modules that a layer passes its cache to.

    The layer where there are none.
    """
    return list(_outermost(layer)) or [layer]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules below this one that take a cache."""
    for child in _children(module):
        if any(ARGUMENT in name for name in inspect.signature(type(child).__call__).parameters):
            yield child
        else:
            yield from _outermost(child)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for value in module.children().values():
        yield from _modules(value)


def _modules(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _modules(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _modules(inner)


def _n_rows(values: Iterable[Any]) -> int:
    """Rows of the caches among arguments, also in tuples; 0 without any."""
    for value in values:
        if isinstance(value, RowCaches):
            return len(value.caches)
        if isinstance(value, tuple | list):
            n = _n_rows(value)
            if n:
                return n
    return 0


def _row(value: Any, row: int, n: int) -> Any:
    """Part of an argument for one of `n` rows.

    What has no rows is for all.
    """
    if isinstance(value, tuple | list):
        return type(value)(_row(inner, row, n) for inner in value)
    own_values = _values_by_row(value)
    if own_values is not None:
        return own_values[row]
    if not isinstance(value, mx.array):
        return value
    if _is_positions(value, n):
        return value[:, row : row + 1]
    if value.ndim and value.shape[0] == n:
        return value[row : row + 1]
    return value


def _values_by_row(value: Any) -> Sequence[Any] | None:
    """Values of each row, where they are no rows of one array."""
    match value:
        case RowCaches():
            return value.caches
        case RowValues():
            return value.values
        case RaggedArray():
            return value.arrays
    return None


def _is_positions(value: mx.array, n: int) -> bool:
    """Whether these are positions (3, rows, tokens) on the axes of images."""
    is_integer = mx.issubdtype(value.dtype, mx.integer)
    return is_integer and value.ndim == 3 and value.shape[:2] == (3, n)


def _joined(outputs: Sequence[Any]) -> Any:
    """Output of all rows, from that of each."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    if all(output is None for output in outputs):
        return None
    are_arrays = all(isinstance(output, mx.array) for output in outputs)
    if are_arrays and first.shape[:1] == (1,) and len({output.shape for output in outputs}) == 1:
        return mx.concatenate(list(outputs), axis=0)
    return RowValues(outputs)
