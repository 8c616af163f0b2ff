"""Metal kernels of MLX and mlx-lm, run as C++."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models import gated_delta

from tests.mac import metal_kernels
from tests.mac.metal_kernels import GatedDeltaKernels, GatedDeltaShape, MissingKernelsError
from tests.mac.row_dependence import (
    gated_delta_kernels,
    of_gated_delta,
    of_products,
    random_gated_delta,
    random_products,
    random_rows,
)
from tests.tolerance import ROUNDING, distance

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.skipif(sys.platform != "linux", reason="a Mac runs the kernels themselves"),
]

DELTA_ROUNDING = 2e-7
"""Largest difference of the gated delta rule's kernels from its operations, of numbers up to 2."""
SHAPE = GatedDeltaShape()
DEPENDS_ON_ROWS = {
    ("M1, M2", "alone, among 2 to 12"): False,
    ("M3 and later", "alone, among 2 to 12"): True,
    ("M3 and later", "of two, among 2 to 12"): False,
}
"""Whether a quantized layer's numbers depend on the number of rows, by GPU and comparison."""


def available(find: Callable[[], object]) -> None:
    """Skip the test, or fail it under CI, where something is missing."""
    try:
        find()
    except MissingKernelsError as error:
        assert not os.environ.get("CI"), error
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    available(metal_kernels.compiler)


@pytest.fixture(scope="module")
def header() -> None:
    available(metal_kernels.header)


@pytest.mark.parametrize("bits", (4, 8))
def test_kernels_for_few_rows_equal_the_quantized_product(bits: int, header: None) -> None:
    products = random_products(bits)
    for n in (1, 2, 5, 6, 12):
        rows = random_rows(n)
        expected = products.by_operation(rows)
        assert distance(products.qmv(rows), expected) < ROUNDING
        assert distance(products.qmv_wide(rows), expected) < ROUNDING


@pytest.mark.parametrize("bits", (4, 8))
def test_a_quantized_layer_depends_on_other_rows_as_is_known(bits: int, header: None) -> None:
    counts = {(count.gpus, count.compared): count for count in of_products(bits)}
    depends = {key: count.n_different > 0 for key, count in counts.items()}
    assert depends == DEPENDS_ON_ROWS, (version("mlx"), counts)


def test_kernels_of_the_gated_delta_rule_equal_its_operations_and_each_other() -> None:
    inputs = random_gated_delta(SHAPE, n_rows=2, n_tokens=5)
    expected = [np.array(array) for array in gated_delta.gated_delta_ops(*inputs)]
    kernels = gated_delta_kernels(SHAPE)
    assert len(kernels.names) == 3
    by_kernel = [kernels.run(name, inputs) for name in kernels.names]
    for output, reference in zip(by_kernel[0], expected, strict=True):
        assert np.abs(output - reference).max() <= DELTA_ROUNDING
    for outputs in by_kernel[1:]:
        assert all(map(np.array_equal, outputs, by_kernel[0]))


def test_the_gated_delta_rule_does_not_depend_on_other_rows() -> None:
    assert of_gated_delta().n_different == 0


def changed(patch: pytest.MonkeyPatch, old: str, new: str) -> GatedDeltaKernels:
    """Kernels with another text in their bodies."""
    bodies = metal_kernels.gated_delta_bodies()
    assert old in bodies["gated_delta_step"]
    bodies["gated_delta_step"] = bodies["gated_delta_step"].replace(old, new, 1)
    patch.setattr(metal_kernels, "gated_delta_bodies", lambda: bodies)
    return GatedDeltaKernels(SHAPE)


def test_a_kernel_that_sums_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_gated_delta(SHAPE, n_rows=1, n_tokens=1)
    kernels = changed(monkeypatch, "kv_mem = simd_sum(kv_mem);", "")
    output, _ = kernels.run("gated_delta_step", inputs)
    expected, _ = gated_delta.gated_delta_ops(*inputs)
    assert distance(output, expected) > 100 * ROUNDING


def test_lanes_that_diverge_at_a_simd_function_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = random_gated_delta(SHAPE, n_rows=1, n_tokens=1)
    kernels = changed(monkeypatch, "kv_mem = simd_sum", "if (dk_idx) kv_mem = simd_sum")
    with pytest.raises(RuntimeError, match="only some lanes"):
        kernels.run("gated_delta_step", inputs)


def test_a_header_with_other_kernels_names_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = tmp_path / "quantized.h"
    renamed.write_text("METAL_FUNC void qmv_other(")
    monkeypatch.setattr(metal_kernels, "header", lambda: renamed)
    with pytest.raises(AssertionError, match=f"MLX {version('mlx')} has other kernels"):
        metal_kernels.quantized_text()
