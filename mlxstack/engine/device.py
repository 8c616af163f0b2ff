"""Device of MLX, its memory, and the cache of freed buffers.

MLX reuses a freed buffer only for a request of about its size. Buffers whose size follows the
context are never requested again, so on Metal, where the default limit is nearly all memory, the
cache must be emptied by its user.

`mx.clear_cache` waits for every CPU stream of the process while it holds the GIL. A load from a
Python file object (`slot_restore.unfilled`) needs the GIL on the stream's thread. Both at once
deadlock, so they exclude each other: call `release` instead of `mx.clear_cache`, and hold
`LOADING` while evaluating a load from a Python object.
"""

import gc
import traceback
from contextlib import suppress
from threading import Lock

import mlx.core as mx

from mlxstack.core.errors import DeviceError
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.host.macos import macos_version
from mlxstack.policy.attention_kernels import has_nax

MIN_BOUND = 32 * 2**20
"""Minimum limit of the buffer cache; MLX's own on a CPU.

Less is not worth the allocations that follow.
"""

LOADING = Lock()
"""Lock while MLX reads a Python object; waiting releases the GIL."""


def synchronize() -> None:
    """Wait for all kernels. Raises DeviceError; other errors were reported before."""
    try:
        mx.synchronize()
    except RuntimeError as error:
        raise_device_error(error)


def release() -> None:
    """Empty MLX's buffer cache, on the MLX thread between kernels. Raises DeviceError.

    A buffer may be freed only when no kernel uses it.
    """
    synchronize()
    with LOADING:
        mx.clear_cache()


def settle() -> None:
    """Empty MLX's buffer cache after the work of the kernels was given up."""
    with suppress(DeviceError):
        synchronize()
    with suppress(DeviceError):
        release()


def active_bytes() -> int:
    """Bytes of all arrays in use, without cached buffers. Thread-safe."""
    gc.collect()
    return int(mx.get_active_memory())


def clear_traceback_frames(error: BaseException | None) -> None:
    """Clear traceback frames, so that stored exceptions keep no arrays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def has_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def has_nax_units() -> bool:
    """Whether MLX uses the GPU's matrix units (M5 and later)."""
    return has_nax(str(mx.device_info().get("architecture", "")), macos_version())
