"""`python -m tests.mac.row_dependence` prints which results of Metal kernels depend on other rows.

The kernels are run as C++ in float32, of random numbers.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.mac.metal_kernels import (
    GatedDeltaKernels,
    GatedDeltaShape,
    MissingKernelsError,
    Numbers,
    QuantizedProducts,
)

N_INPUTS = 2048
N_OUTPUTS = 64
GROUP_SIZE = 64
MAX_ROWS = 12
"""Rows up to which M3 and later, but for an Ultra (11), use `qmv_wide` for any matrix."""


class Comparison(Struct, frozen=True):
    """Numbers of a row that differ when it is computed beside others."""

    layer: str
    gpus: str
    compared: str
    n_different: int
    n_numbers: int


def random_rows(n_rows: int) -> mx.array:
    """Rows (n, N_INPUTS) to multiply with."""
    return mx.random.normal((n_rows, N_INPUTS), key=mx.random.key(1))


@cache
def random_products(bits: int) -> QuantizedProducts:
    """Products with a matrix (N_OUTPUTS, N_INPUTS)."""
    matrix = mx.random.normal((N_OUTPUTS, N_INPUTS), key=mx.random.key(0))
    return QuantizedProducts(matrix, GROUP_SIZE, bits)


@cache
def gated_delta_kernels(shape: GatedDeltaShape) -> GatedDeltaKernels:
    """Kernels for this shape."""
    return GatedDeltaKernels(shape)


def random_gated_delta(shape: GatedDeltaShape, n_rows: int, n_tokens: int) -> list[mx.array]:
    """q, k, v, g, beta and state, with keys of about unit length and scaled queries."""
    keys = mx.random.split(mx.random.key(2), 6)
    tokens = (n_rows, n_tokens)
    of_keys = (*tokens, shape.key_heads, shape.key_dim)
    state = (n_rows, shape.value_heads, shape.value_dim, shape.key_dim)
    return [
        mx.random.normal(of_keys, key=keys[0]) / shape.key_dim,
        mx.random.normal(of_keys, key=keys[1]) / shape.key_dim**0.5,
        mx.random.normal((*tokens, shape.value_heads, shape.value_dim), key=keys[2]),
        mx.random.uniform(shape=(*tokens, shape.value_heads), key=keys[3]),
        mx.random.uniform(shape=(*tokens, shape.value_heads), key=keys[4]),
        mx.random.normal(state, key=keys[5]),
    ]


def of_products(bits: int) -> list[Comparison]:
    """Comparisons of a quantized layer; raises MissingKernelsError."""
    products = random_products(bits)
    rows = random_rows(MAX_ROWS)
    layer = f"quantized, {bits} bits"
    alone = products.qmv(rows[:1])[0]
    of_two = products.qmv_wide(rows[:2])[0]
    by_qmv = _beside(products.qmv, rows)
    by_qmv_wide = _beside(products.qmv_wide, rows)
    among = f"among 2 to {MAX_ROWS}"
    return [
        _comparison(layer, "M1, M2", f"alone, {among}", alone, by_qmv),
        _comparison(layer, "M3 and later", f"alone, {among}", alone, by_qmv_wide),
        _comparison(layer, "M3 and later", f"of two, {among}", of_two, by_qmv_wide),
    ]


def of_gated_delta() -> Comparison:
    """Comparison of a layer with the gated delta rule; raises MissingKernelsError."""
    shape = GatedDeltaShape()
    kernels = gated_delta_kernels(shape)
    inputs = random_gated_delta(shape, n_rows=3, n_tokens=1)
    kernel = kernels.names[-1]
    alone, _ = kernels.run(kernel, [array[1:2] for array in inputs])
    beside, _ = kernels.run(kernel, inputs)
    return _comparison("gated delta rule", "all", "alone, among 3", alone[0], [beside[1]])


def main() -> None:
    """Print the table."""
    table = Table(
        "layer", "GPU", "a row", title=f"MLX {version('mlx')}, mlx-lm {version('mlx-lm')}"
    )
    table.add_column("numbers that differ", justify="right")
    try:
        comparisons = [*of_products(4), *of_products(8), of_gated_delta()]
    except MissingKernelsError as error:
        sys.exit(str(error))
    for row in comparisons:
        n_different = f"{row.n_different} of {row.n_numbers}"
        table.add_row(row.layer, row.gpus, row.compared, n_different)
    Console().print(table)


def _beside(kernel: Callable[[mx.array], Numbers], rows: mx.array) -> list[Numbers]:
    """The first row's results beside 1 and more others, before them and after them."""
    batches = [rows[:n] for n in range(2, len(rows) + 1)]
    return [
        *(kernel(batch)[0] for batch in batches),
        *(kernel(batch[::-1])[-1] for batch in batches),
    ]


def _comparison(
    layer: str, gpus: str, compared: str, reference: Numbers, results: Sequence[Numbers]
) -> Comparison:
    differs = np.any([result != reference for result in results], axis=0)
    return Comparison(layer, gpus, compared, int(differs.sum()), reference.size)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()
