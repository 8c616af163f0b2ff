"""Adapters: matrices beside those of a model, checked before they are used."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_utils

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec
from mlxstack.engine.loading.load_errors import in_one_line
from mlxstack.models.bounded_json import MAX_SIZE, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MATRICES = "adapters.safetensors"
ADAPTER = (ADAPTER_CONFIG, ADAPTER_MATRICES)
"""Files of an adapter that mlx-lm reads: rank and scale, and matrices."""
ADAPTER_ERRORS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ZeroDivisionError,
)  # fmt: skip


def with_adapter(model: Any, spec: ModelSpec) -> Any:
    """Model with the adapter of `spec`.

    Raises SetupError for one that does not fit, and for numbers that are not finite: every answer
    would be noise.
    """
    try:
        _check_scale(Path(str(spec.adapter)) / ADAPTER_CONFIG)
        model = mlx_utils.load_adapters(model, spec.adapter)
        _check_matrices(Path(str(spec.adapter)) / ADAPTER_MATRICES)
    except ADAPTER_ERRORS as error:
        raise SetupError(
            f"model.adapter: {spec.adapter} is no adapter for {spec.id}: {in_one_line(error)}"
        ) from error
    model.eval()
    return model


def _check_scale(file: Path) -> None:
    """Raise ValueError for a scale by which nothing can be multiplied."""
    parameters = read_object(file).get("lora_parameters")
    scale = parameters.get("scale", 1.0) if isinstance(parameters, dict) else 1.0
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not (is_number and math.isfinite(scale) and abs(scale) <= MAX_SIZE):
        raise ValueError(f"scale is {scale!r} in {file.name}, not a number of usual size")


def _check_matrices(file: Path) -> None:
    """Raise ValueError for matrices that are not finite."""
    matrices: Any = mx.load(str(file))
    odd = [name for name, matrix in matrices.items() if not mx.isfinite(matrix).all().item()]
    if odd:
        raise ValueError(f"{len(odd)} of its matrices are not finite, such as {odd[0]}")
