"""Rows of products, padded to counts with equal bits."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxstack.features.exact.policy import RowRange


def pad_rows(x: mx.array, rows: RowRange) -> mx.array:
    """Rows (..., n, dim) with rows of zeros between or after them."""
    *outer, n, dim = x.shape
    n_padded = rows.padded(n)
    if not rows.n_used:
        return _with_rows(x, n_padded)
    n_runs = n_padded // rows.floor
    runs = _with_rows(x, n_runs * rows.n_used).reshape(*outer, n_runs, rows.n_used, dim)
    return _with_rows(runs, rows.floor).reshape(*outer, n_padded, dim)


def unpad_rows(x: mx.array, rows: RowRange, n: int) -> mx.array:
    """Rows (..., n, dim) as they were before padding."""
    if not rows.n_used:
        return x[..., :n, :]
    *outer, n_padded, dim = x.shape
    runs = x.reshape(*outer, n_padded // rows.floor, rows.floor, dim)
    return runs[..., : rows.n_used, :].reshape(*outer, -1, dim)[..., :n, :]


def has_equal_bits(
    product: Callable[[mx.array], mx.array], row: mx.array, rows: RowRange, counts: Sequence[int]
) -> bool:
    """Whether a row (dim) has equal bits in all places."""
    expected: mx.array | None = None
    for n in counts:
        padded = pad_rows(mx.broadcast_to(row, (n, row.shape[-1])), rows)
        output = unpad_rows(product(padded), rows, n)
        if expected is None:
            expected = output[..., :1, :]
        if not mx.all(output == expected).item():
            return False
    return True


def _with_rows(x: mx.array, n: int) -> mx.array:
    missing = n - x.shape[-2]
    if not missing:
        return x
    return mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])
