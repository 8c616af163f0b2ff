"""Device errors: kernels that a GPU refused or did not finish.

MLX stores the error of a command buffer and raises it once, as a RuntimeError, in a later call that
encodes or waits (`device.cpp` of its Metal backend). So it may surface in the work of another
request than the one whose kernels failed. After two GPU restarts macOS denies all kernels of a
process: only a new process helps (https://github.com/ml-explore/mlx-lm/issues/1572).
"""

import re

from mlxstack.core.errors import DeviceError

DEVICE_ERROR = re.compile(
    r"\[METAL\]|Command buffer execution failed|\bCUDA\b|\bcu(?:da|blas|blasLt|dnn)?[A-Z]\w*"
)
"""Texts of Metal and CUDA in MLX's errors; `[metal::malloc]` is a refused allocation."""

MAX_DEVICE_ERRORS = 2
"""Device errors without a successful step between them; then the process must end."""

REMEDIES = (
    (
        re.compile(r"insufficient memory|out ?of ?memory", re.IGNORECASE),
        "the device is out of memory: lower prefix_cache.memory_budget_pct, slots.n_ctx or "
        "slots.count, or end other programs",
    ),
    (
        re.compile(r"impacting ?interactivity|timeout|timed out", re.IGNORECASE),
        "macOS ends kernels that delay the display: lower prefill.chunk_size, or keep the display "
        "on (https://github.com/ml-explore/mlx/issues/3267)",
    ),
)
"""Remedies by the text of an error."""

NEW_PROCESS = "try again; after a second error a supervised service starts a new process"


def device_error(error: BaseException) -> DeviceError | None:
    """DeviceError of a device's RuntimeError, with a remedy; None for others."""
    if isinstance(error, DeviceError):
        return error
    text = str(error)
    if not isinstance(error, RuntimeError) or not DEVICE_ERROR.search(text):
        return None
    remedy = next((advice for pattern, advice in REMEDIES if pattern.search(text)), NEW_PROCESS)
    return DeviceError(f"the GPU did not finish its work ({text.strip()}); {remedy}")


def raise_device_error(error: BaseException) -> None:
    """Raise DeviceError if `error` is of the device: it concerns all requests."""
    if (failure := device_error(error)) is not None:
        raise failure from error
