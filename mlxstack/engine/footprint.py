"""How much memory MLX holds in this process, and who must not hold it."""

import gc
import traceback

import mlx.core as mx

from mlxstack.engine import buffer_cache


def active_bytes() -> int:
    """Bytes of all arrays that are still held by somebody. Callable from any thread."""
    gc.collect()
    buffer_cache.clear()
    return int(mx.get_active_memory())


def forget_frames(error: BaseException | None) -> None:
    """An error that is kept does not keep the arrays of those who raised it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
