"""Distance of computed numbers from a reference, on any processor."""

from typing import Any

import mlx.core as mx
import numpy as np

ROUNDING = 1e-4
"""Largest distance of a layer's or a tower's output that is rounding alone."""
MODEL_ROUNDING = 1e-3
"""The same of logits and of KV, behind all layers of a model."""


def distance(values: Any, reference: Any) -> float:
    """Largest difference of two arrays of one shape, in standard deviations of the reference.

    Kernels of a BLAS for other processors sum in another order, and float32 rounds each sum to
    6e-8 of it. Over Debian's OpenBLAS 0.3.21 (its kernels for Nehalem, Sandy Bridge, Haswell,
    Skylake-X, Sapphire Rapids) and the reference BLAS, towers were up to 2.3e-6 away from mlx-vlm,
    logits up to 8e-5; two patches in each other's place, or positions moved by one, move logits by
    0.1 and more. The limits lie between. Numbers twice as large round twice as much, hence the
    standard deviation.
    """
    floats = _floats(values)
    expected = _floats(reference)
    assert floats.shape == expected.shape
    largest = float(np.abs(floats - expected).max())
    return largest / float(expected.std()) if largest else 0.0


def _floats(values: Any) -> Any:
    is_mlx = isinstance(values, mx.array)
    return np.array(values.astype(mx.float32) if is_mlx else values, np.float64)
