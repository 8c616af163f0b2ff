"""Bit table: row counts at which a row has the same bytes.

MLX chooses its kernels for quantized products by the number of rows. Where the bytes of a row are
the same at every width, a batch of quantized layers is identical to a row alone.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.engine.checks.model_shapes import LayerShape, ModelShapes

ROW_COUNTS = (1, 2, 3, 5, 6, 8, 12, 13)


class BitRow(Struct, frozen=True):
    """Row counts with the first row of one and of two rows."""

    layer: str
    same_as_one: tuple[int, ...]
    same_as_two: tuple[int, ...]


def bit_table(shapes: ModelShapes) -> Iterator[BitRow]:
    """Rows of the table, one for each shape of a linear layer."""
    for shape, module in shapes.linear.items():
        yield _bit_row(shape, module, shapes.dtype)


def _bit_row(shape: LayerShape, module: Any, dtype: mx.Dtype) -> BitRow:
    compute = getattr(module, "as_linear", module)
    n_rows = max(ROW_COUNTS)
    inputs = mx.random.normal((n_rows, 1, shape.n_inputs), key=mx.random.key(0)).astype(dtype)
    first = {n: _first_row(compute(inputs[:n])) for n in ROW_COUNTS}
    same = {n: tuple(m for m in ROW_COUNTS if first[m] == first[n]) for n in (1, 2)}
    return BitRow(str(shape), same[1], same[2])


def _first_row(output: mx.array) -> bytes:
    """Bytes of the first row, which are copied."""
    whole: Any = mx.contiguous(output[0]).view(mx.uint8)
    mx.eval(whole)
    return bytes(memoryview(whole))
